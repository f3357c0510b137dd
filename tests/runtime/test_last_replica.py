"""Real processes: the last replica of a stage is paused, and later killed, while a newcomer to its stage waits."""

import os
import signal

import test_churn
from test_churn import QUICK

churning, slow_links = test_churn.churning, test_churn.slow_links  # fixtures


def test_a_pause_of_the_last_replica_loses_nothing_and_its_death_is_noticed_at_once(churning, slow_links):
    """Peer 1 alone holds stage 1. It is paused before anything is saved, and the newcomer becomes ready meanwhile. Then
    it is killed: its host refuses connections, so the newcomer takes its place long before the grace period is over."""
    one_pipeline = ("--config.plan.pipelines=1", "--config.train.checkpoint_every_steps=0")
    fleet = churning("--config.train.steps=1000", "--config.plan.microbatches=4", *QUICK, *one_pipeline, slow_links)
    fleet.wait_for_step(3)
    last = fleet.children()[1]
    os.kill(last, signal.SIGSTOP)
    fleet.wait_for(lambda: "which may live" in fleet.so_far, "a report of whom the run waits for")
    fleet.ask_to_join()
    fleet.wait_for(lambda: "candidate: " in fleet.so_far, "a newcomer that is ready")
    n_steps = len(fleet.losses())
    os.kill(last, signal.SIGCONT)
    fleet.wait_for(lambda: "returned: peer 1" in fleet.so_far, "the paused peer")
    fleet.wait_for_step(n_steps + 2)
    assert "back from step" not in fleet.so_far
