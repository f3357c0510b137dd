"""Real processes whose links break and heal, and that are killed, joined, paused or asked to leave: losses and
parameters are those of one process."""

import os
import signal

import cutting
import pytest
from fleets import ENDLESS, QUICK, SWARM, Churning, alive, assert_equal

from jaxdt.run import plan as plans
from jaxdt.runtime.storage.checkpoint import newest_whole
from planner.__main__ import main

# The planner searches here, and the tests of it come first.
pytestmark = pytest.mark.xdist_group("kernels")


class Cut(Churning):
    """An elastic fleet whose links can be cut."""

    def __init__(self, tmp_path, *flags):
        self.cuts = tmp_path / "cuts.json"
        cutting.cut(self.cuts)
        obey = f"import cutting; cutting.install({str(self.cuts)!r})"
        super().__init__(tmp_path, *flags, changes={"train.py": obey, "coordinate.py": obey})

    def view(self, peer: int) -> str:
        """Number of the view that a peer adopted last."""
        log = (self.run_dir / "logs" / f"peer_{peer}.log").read_text()
        return log.rpartition(" is in view ")[2].partition(",")[0]

    def cut(self, *pairs):
        cutting.cut(self.cuts, *pairs)


@pytest.fixture
def fleet(tmp_path, slow_links):
    started = Cut(tmp_path, *ENDLESS, *SWARM, slow_links)
    yield started
    started.end()


@pytest.mark.timeout(900)
def test_equality_under_fire(fleet, alone):
    """First a link breaks between two peers that live on: of these goes who came last, whoever accuses first, and it
    comes back more and more rarely while the link stays broken. Then one peer is cut off from everybody and comes back.
    Then kill -9 of a peer, a newcomer, kill -9 of the coordinator, SIGTERM, SIGSTOP longer than any deadline."""
    fleet.wait_for_step(3)
    fleet.cut((0, 3))
    fleet.wait_for(lambda: fleet.views(1) >= 4, "peer 3 to be put out twice")
    fleet.wait_for_step(len(fleet.losses()) + 3)
    fleet.cut()
    fleet.wait_for(lambda: fleet.view(3) == fleet.view(0), "peer 3 to come back")
    fleet.wait_for_step(len(fleet.losses()) + 2)  # now it has the state, and peer 1 can be spared
    n_views = fleet.views(0)
    fleet.cut(*cutting.off(1, range(4)))
    fleet.wait_for(lambda: fleet.views(0) > n_views, "a view without peer 1")
    fleet.wait_for_step(len(fleet.losses()) + 3)
    fleet.cut()
    fleet.wait_for(lambda: fleet.views(0) > n_views + 1, "peer 1 to come back")
    fleet.wait_for_step(len(fleet.losses()) + 2)  # now peer 3 can be spared
    n_lost, n_views = len(fleet.reports("lost")), fleet.views(0)
    pids = fleet.children()
    os.kill(pids[3], signal.SIGKILL)
    fleet.wait_for(lambda: fleet.views(0) > n_views, "a view without peer 3")
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
    lost = [line for line in fleet.output.splitlines() if ": lost, " in line]
    by_links = lost[:n_lost]
    assert 0 < n_lost <= 6 and by_links[-1].startswith("peer 1 (stage 1): lost, "), fleet.output
    assert all(line.startswith("peer 3 (stage 1): lost, no link for ") for line in by_links[:-1]), fleet.output
    assert lost[n_lost].startswith("peer 3 (stage 1): lost, ") and len(by_links) == n_lost, fleet.output
    assert_equal(fleet, alone)


@pytest.mark.timeout(900)
def test_a_pipeline_that_loses_a_peer_borrows_and_is_whole_again(churning, slow_links, alone, tmp_path, capsys):
    """Fixed wiring: kill -9 of a peer, and a newcomer that takes its place. Before it comes the planner finds a plan
    for the peers that are left. While it comes the last replica of the stage is paused, and keeps its state and its
    place; what follows if it is killed is shown in test_own_folders.py."""
    fleet = churning(*ENDLESS, *QUICK, slow_links)
    fleet.wait_for_step(3)
    os.kill(fleet.children()[3], signal.SIGKILL)
    fleet.wait_for(lambda: fleet.views(0) >= 2, "a view without peer 3")
    out, after = tmp_path / "new.json", tmp_path / "after.json"
    assert main(["replan", f"--run_dir={fleet.run_dir}", f"--out={out}", f"--out_network={after}"]) == 0
    plan = plans.load(out)
    assert "without a new plan: " in capsys.readouterr().out
    assert 0 < plan.found["step_s"] < 10 and 0 < plan.found["replan"]["unchanged_s"] < 10 and len(plan.peers) == 2
    fleet.wait_for_step(len(fleet.losses()) + 2)  # the pipeline borrows peer 1
    os.kill(fleet.children()[1], signal.SIGSTOP)
    fleet.wait_for(lambda: fleet.reports("vacant"), "a stage without a peer that is there")
    fleet.ask_to_join()
    is_ready = lambda: any(fields["peer"] > 3 for fields in fleet.reports("candidate"))  # noqa: E731
    fleet.wait_for(is_ready, "a newcomer that is ready")
    n_steps = len(fleet.losses())
    os.kill(fleet.children()[1], signal.SIGCONT)
    fleet.wait_for_step(n_steps + 2)
    assert {fields["peer"] for fields in fleet.reports("returned")} == {1} and not fleet.reports("rollback")
    fleet.wait_for_download()
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
