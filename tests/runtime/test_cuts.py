"""Real processes whose links break and heal: losses and parameters are those of one process."""

import signal

import cutting
import pytest
from fleets import ENDLESS, SWARM, Churning, assert_equal


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
    started.kill()


def test_links_that_break_and_heal(fleet, alone):
    """First one between two peers that live on: of these goes who came last, whoever accuses first, and it comes back
    more and more rarely while the link stays broken. Then one peer is cut off from everybody and comes back."""
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
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
    lost = [line for line in fleet.output.splitlines() if ": lost, " in line]
    assert len(lost) <= 6 and lost[-1].startswith("peer 1 (stage 1): lost, "), fleet.output
    assert all(line.startswith("peer 3 (stage 1): lost, no link for ") for line in lost[:-1]), fleet.output
    assert_equal(fleet, alone)
