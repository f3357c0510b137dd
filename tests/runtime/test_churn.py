"""Real processes that are killed, joined, paused or asked to leave: losses and parameters are those of one process."""

import os
import signal

import pytest
from fleets import ENDLESS, QUICK, SWARM, alive, assert_equal

from jaxdt.run import plan as plans
from jaxdt.runtime.storage.checkpoint import newest_whole
from planner.__main__ import main

pytestmark = pytest.mark.xdist_group("kernels")  # the planner searches here, and the tests of it come first


def test_equality_under_fire(churning, slow_links, alone):
    """kill -9 of a peer, a newcomer, kill -9 of the coordinator, SIGTERM, SIGSTOP longer than any deadline."""
    fleet = churning(*ENDLESS, *SWARM, slow_links, run_dir="swarm")
    fleet.wait_for_step(3)
    pids = fleet.children()
    os.kill(pids[3], signal.SIGKILL)
    fleet.wait_for(lambda: fleet.views(0) >= 2, "a view without peer 3")
    fleet.join()  # for the stage that has lost a peer
    os.kill(fleet.coordinator(), signal.SIGKILL)
    fleet.wait_for_step(len(fleet.losses()) + 2)
    os.kill(pids[1], signal.SIGTERM)
    fleet.wait_for(lambda: "left the run" in fleet.last_line(1), "peer 1 to leave")
    n_views = fleet.views(0)
    os.kill(pids[2], signal.SIGSTOP)
    fleet.wait_for(lambda: fleet.views(0) > n_views, "a view without peer 2")
    os.kill(pids[2], signal.SIGCONT)
    fleet.wait_for(lambda: fleet.views(0) > n_views + 1, "peer 2 to come back")
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
    assert fleet.newcomer.wait(timeout=60) == 130, fleet.log.read_text()
    assert_equal(fleet, alone)


def test_a_pipeline_that_loses_a_peer_borrows_and_is_whole_again(churning, slow_links, alone, tmp_path, capsys):
    """Fixed wiring: kill -9 of a peer, and a newcomer that takes its place. Before it comes the planner finds a plan
    for the peers that are left."""
    fleet = churning(*ENDLESS, *QUICK, slow_links)
    fleet.wait_for_step(3)
    os.kill(fleet.children()[3], signal.SIGKILL)
    fleet.wait_for(lambda: fleet.views(0) >= 2, "a view without peer 3")
    out, after = tmp_path / "new.json", tmp_path / "after.json"
    assert main(["replan", f"--run_dir={fleet.run_dir}", f"--out={out}", f"--out_network={after}"]) == 0
    plan = plans.load(out)
    assert "without a new plan: " in capsys.readouterr().out
    assert 0 < plan.found["step_s"] < 10 and 0 < plan.found["replan"]["unchanged_s"] < 10 and len(plan.peers) == 2
    fleet.join()
    n = len(fleet.losses()) + 2
    fleet.wait_for(lambda: newest_whole(fleet.run_dir, {})[0].version >= n, "a checkpoint with the newcomer's share")
    pids = [fleet.coordinator(), *fleet.children().values()]
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
    assert not alive(pids)
    assert fleet.newcomer.wait(timeout=60) == 130, fleet.log.read_text()
    assert "all 4 peers are ready, 4 on cpu: 1 x cpu" in fleet.output
    assert "peer 3 (stage 1): lost" in fleet.output
    assert_equal(fleet, alone)
