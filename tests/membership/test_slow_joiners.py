"""A newcomer that does not fetch its state is evicted, and one that fetches slowly is not."""

import itertools
from dataclasses import replace

import pytest
from mutants import Mutant
from report_fields import report_fields

from jaxdt.membership.roster import ASKED_FLOORS, JOINING_FLOORS, SLOWEST_BYTES_PER_S, WAITS_MAX, Roster
from jaxdt.protocol import events as ev
from jaxdt.sim.faults import JOIN, Fault
from jaxdt.testing import case as testing_case
from jaxdt.testing import symbolic_tensors
from jaxdt.testing.case import LINK_OF_NEWCOMERS, play
from jaxdt.testing.cases import draw_case

FLOOR_S = 8.0
STAGES = {0: 0, 1: 1}


class Stalled(Mutant):
    """A newcomer that joins, sends heartbeats and adopts views, but asks for only `n_slices` slices of its state. Its
    heartbeats report its download truthfully."""

    n_slices = 0

    def __init__(self, machine):
        super().__init__(machine)
        self.left = self.n_slices

    def handle(self, now_s, event):
        actions = []
        for action in self.machine.handle(now_s, event):
            body = action.body if isinstance(action, ev.Send) else None
            if isinstance(body, ev.Fetch) and not self.left:
                continue
            self.left -= isinstance(body, ev.Fetch)
            if isinstance(body, ev.Heartbeat) and not self.n_slices:
                action = replace(action, body=ev.Heartbeat(body.count, {}))
            actions.append(action)
        return actions


class StalledLater(Stalled):
    n_slices = 3


def case_with_a_newcomer(seed=0):
    """A case of more steps than usual, whose only fault is a join."""
    drawn = map(draw_case, range(seed, 100))
    case = next(case for case in drawn if case.plan.n_pipelines > 1 and case.nonfinite is None)
    train = replace(case.config.train, steps=12)
    sync = replace(case.config.sync, slice_bytes=1 << 10)
    config = replace(case.config, train=train, sync=sync)
    return replace(case, config=config, faults=(Fault(0.5, JOIN, 0),), random_moves_s=0.0)


def newcomers_are(mutant, case):
    return lambda peer, machine, tensors: machine if peer in (ev.COORDINATOR, *case.plan.peers) else mutant(machine)


@pytest.mark.parametrize("mutant", [Stalled, StalledLater])
@pytest.mark.parametrize("seed", [0, 20])
def test_the_run_goes_on_without_a_newcomer_that_does_not_fetch_its_state(mutant, seed, monkeypatch):
    monkeypatch.setattr(symbolic_tensors, "N_WORDS", 4000)
    case = case_with_a_newcomer(seed)
    outcome, _ = play(case, newcomers_are(mutant, case))
    assert len(report_fields(outcome, "step")) == case.config.train.steps
    lost = report_fields(outcome, "lost")
    assert lost and all("joins and does not fetch its state: " in fields["reason"] for fields in lost), lost
    assert {fields["peer"] for fields in lost}.isdisjoint(case.plan.peers)
    instants = [now_s for now_s, _, report in outcome.reports if report.kind == "lost"]
    floor_s = 2 * case.config.net.deadline_floor_s
    assert all(later - earlier > floor_s for earlier, later in itertools.pairwise(instants)), (
        "each time it has a chance"
    )


def test_a_newcomer_with_a_large_state_on_a_slow_link_stays(monkeypatch):
    """Four minutes for the state, which no other deadline allows."""
    case = case_with_a_newcomer()
    monkeypatch.setattr(testing_case, "LINK_OF_NEWCOMERS", replace(LINK_OF_NEWCOMERS, bandwidth_gbps=2e-5))
    monkeypatch.setattr(symbolic_tensors, "N_WORDS", 400_000)
    case = replace(case, config=replace(case.config, sync=replace(case.config.sync, slice_bytes=100_000)))
    monkeypatch.setattr(testing_case, "DETECTION_S", 10_000.0)
    outcome, _ = play(case)
    (download,) = report_fields(outcome, "download")
    assert download["seconds"] > 200
    assert not report_fields(outcome, "lost")


# ------------------------------------------------------------------------------------------------------------ by hand


class Judge:
    """The roster of a run of two stages that peer 7 joins."""

    def __init__(self):
        members = tuple(ev.Member(peer, stage, 1) for peer, stage in (STAGES | {7: 0}).items())
        self.roster = Roster(STAGES | {7: 0}, 2, 1, lease_floor_s=FLOOR_S / JOINING_FLOORS)
        self.roster.adopt(ev.View(5, 1, 0, members, (1, 1), 0, joining=(7,)))
        assert self.at(0.0) is None

    def at(self, now_s, *fetched_bytes):
        if fetched_bytes:
            self.roster.on_heartbeat(now_s, 7, dict(zip(ev.FETCHED, fetched_bytes, strict=True)))
        found = self.roster.overdue(now_s)
        assert found is None or found[0] == 7
        return found and found[1]


def test_a_joiner_that_reports_nothing_is_evicted_after_the_floor():
    judge = Judge()
    assert judge.at(FLOOR_S) is None
    assert judge.at(9.0) == "joins and does not fetch its state: 0 bytes are there, no more for 9.0 s"


def test_the_first_bytes_have_as_long_as_the_slowest_link_takes():
    judge, slices = Judge(), 4 * (1 << 22)
    assert judge.at(1.0, 0, slices, 1e9) is None
    longest_s = ASKED_FLOORS * FLOOR_S + slices / SLOWEST_BYTES_PER_S
    assert judge.at(longest_s, 0, slices, 1e9) is None
    assert "0 bytes" in judge.at(longest_s + 1.1, 0, slices, 1e9)


def test_after_the_first_bytes_the_longest_gap_is_the_measure():
    """All donors' slices come at once, every 100 s."""
    judge = Judge()
    judge.at(0.0, 0, 4e6, 40e6)
    for n in range(1, 5):
        for k in range(4):
            assert judge.at(100.0 * n + k / 1e3, n * 4e6 + k * 1e6, 4e6, 40e6) is None
    last_s = 400.003
    assert judge.at(last_s + WAITS_MAX * 100.0 - 1.0, 19e6, 4e6, 40e6) is None
    assert "19000000 bytes" in judge.at(last_s + WAITS_MAX * 100.0 + 1.0, 19e6, 4e6, 40e6)


def test_a_joiner_that_has_its_state_is_not_evicted_here():
    judge = Judge()
    assert judge.at(1.0, 40e6, 0, 40e6) is None
    assert judge.at(1e4) is None


def test_no_joiner_is_evicted_while_its_stage_has_no_peer_to_fetch_from():
    judge = Judge()
    judge.roster.lose(0.0, 0, is_dead=True)
    assert judge.at(1e3) is None
    judge.roster.on_returned(0)
    assert judge.at(1e3 + 1.0) is None
    assert judge.at(1e3 + 1.0 + 2 * FLOOR_S)


def test_a_step_that_is_committed_waits_for_no_joiner():
    judge = Judge()
    judge.roster.on_committed(1)
    assert judge.at(1e4) is None and judge.roster.peers[7].download is None
