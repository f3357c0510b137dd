"""Real processes: the last replica of a stage is paused while a newcomer waits; later all replicas are killed."""

import os
import signal

from fleets import ENDLESS, QUICK

ONE_PIPELINE = "--config.plan.pipelines=1"


def test_a_paused_last_replica_keeps_its_state_and_the_death_of_a_stage_is_noticed_at_once(churning, slow_links):
    """The run would wait for 300 s for who may live. Processes that have ended are known to, since their host refuses
    connections: a newcomer takes their place long before."""
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
    os.kill(last, signal.SIGKILL)
    fleet.newcomer.kill()
    fleet.newcomer.wait()
    fleet.ask_to_join()
    fleet.wait_for(lambda: fleet.reported("rollback"), "the way back with another newcomer")
    fleet.wait_for_step(len(fleet.losses()) + 1)
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
