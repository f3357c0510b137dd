"""Real processes: the last replica of a stage is paused while a newcomer waits. What follows if it is killed is shown
in test_own_folders.py."""

import os
import signal

from fleets import ENDLESS, QUICK

ONE_PIPELINE = "--config.plan.pipelines=1"


def test_a_paused_last_replica_keeps_its_state_and_its_place(churning, slow_links):
    fleet = churning(*ENDLESS, *QUICK, ONE_PIPELINE, slow_links)
    fleet.wait_for_step(3)
    last = fleet.children()[1]
    os.kill(last, signal.SIGSTOP)
    fleet.wait_for(lambda: fleet.reported("vacant"), "a stage without a peer that is there")
    fleet.ask_to_join()
    fleet.wait_for(lambda: fleet.reported("candidate"), "a newcomer that is ready")
    n_steps = len(fleet.losses())
    os.kill(last, signal.SIGCONT)
    fleet.wait_for_step(n_steps + 2)
    assert fleet.reported("returned") and not fleet.reported("rollback")
    fleet.wait_for(lambda: " has the state of step " in fleet.log.read_text(), "the newcomer's download")
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
