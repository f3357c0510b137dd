"""A newcomer that does not fetch its state is put out, and one that fetches slowly is not."""

import itertools
from dataclasses import replace

import pytest
from mutants import Mutant

from jaxdt.membership.join_progress import ASKED_FLOORS, SLOWEST_BYTES_PER_S, WAITS_MAX, JoinProgress
from jaxdt.membership.roster import Roster
from jaxdt.protocol.events import COORDINATOR, FETCHED, Fetch, Heartbeat, Member, Send, View
from jaxdt.sim.faults import JOIN, Fault
from jaxdt.sim.fuzz import cases, symbolic_tensors
from jaxdt.sim.fuzz.cases import draw_case, play
from jaxdt.spec.network import Link

FLOOR_S = 8.0
STAGES = {0: 0, 1: 1}


class Stalled(Mutant):
    """A newcomer that greets, says that it is there and takes views, and asks for `n_slices` of its state only. What it
    says of its download is true."""

    n_slices = 0

    def __init__(self, machine):
        super().__init__(machine)
        self.left = self.n_slices

    def handle(self, now_s, event):
        actions = []
        for action in self.machine.handle(now_s, event):
            body = action.body if isinstance(action, Send) else None
            if isinstance(body, Fetch) and not self.left:
                continue
            self.left -= isinstance(body, Fetch)
            if isinstance(body, Heartbeat) and not self.n_slices:
                action = replace(action, body=Heartbeat(body.count, {}))
            actions.append(action)
        return actions


class StalledLater(Stalled):
    n_slices = 3


def case_with_a_newcomer(seed=0):
    """Of a few steps more than usual, without other faults."""
    case = next(c for s in range(seed, 100) if (c := draw_case(s)).plan.n_pipelines > 1 and c.spoilt is None)
    train = replace(case.config.train, steps=12)
    sync = replace(case.config.sync, slice_bytes=1 << 10)
    config = replace(case.config, train=train, sync=sync)
    return replace(case, config=config, faults=(Fault(0.5, JOIN, 0),), restless_s=0.0)


def newcomers_are(mutant, case):
    return lambda who, machine, contents: machine if who in (COORDINATOR, *case.plan.peers) else mutant(machine)


@pytest.mark.parametrize("mutant", [Stalled, StalledLater])
@pytest.mark.parametrize("seed", [0, 20])
def test_the_run_goes_on_without_a_newcomer_that_does_not_fetch_its_state(mutant, seed, monkeypatch):
    monkeypatch.setattr(symbolic_tensors, "N_WORDS", 4000)
    case = case_with_a_newcomer(seed)
    outcome, _ = play(case, newcomers_are(mutant, case))
    assert len(outcome.fields("step")) == case.config.train.steps
    lost = outcome.fields("lost")
    assert lost and all("joins and does not fetch its state: " in fields["reason"] for fields in lost), lost
    assert {fields["peer"] for fields in lost}.isdisjoint(case.plan.peers)
    instants = [now_s for now_s, _, report in outcome.reports if report.kind == "lost"]
    floor_s = 2 * case.config.net.deadline_floor_s
    assert all(later - earlier > floor_s for earlier, later in itertools.pairwise(instants)), (
        "each time it has a chance"
    )


def test_a_newcomer_with_a_large_state_on_a_slow_link_stays(monkeypatch):
    """Four minutes for the state, which no other deadline allows."""
    case, slow = case_with_a_newcomer(), []

    def link(latency_s, bandwidth_gbps):
        slow.append(Link(latency_s, 2e-5))
        return slow[-1]

    monkeypatch.setattr(cases, "Link", link)
    monkeypatch.setattr(symbolic_tensors, "N_WORDS", 400_000)
    case = replace(case, config=replace(case.config, sync=replace(case.config.sync, slice_bytes=100_000)))
    monkeypatch.setattr(cases, "DETECTION_S", 10_000.0)
    outcome, _ = play(case)
    (download,) = outcome.fields("download")
    assert download["seconds"] > 200 and slow
    assert not outcome.fields("lost")


# ------------------------------------------------------------------------------------------------------------ by hand


class Judge:
    """Of a run of two stages that peer 7 joins."""

    def __init__(self):
        members = tuple(Member(peer, stage, 1) for peer, stage in (STAGES | {7: 0}).items())
        self.roster = Roster(STAGES | {7: 0}, 2, 1)
        self.roster.adopt(View(5, 1, 0, members, (1, 1), 0, joining=(7,)))
        self.joiners = JoinProgress(FLOOR_S)
        assert self.at(0.0) is None

    def at(self, now_s, *said):
        if said:
            self.joiners.heartbeat(now_s, 7, dict(zip(FETCHED, said, strict=True)))
        found = self.joiners.stalled(now_s, self.roster)
        assert found is None or found[0] == 7
        return found and found[1]


def test_who_says_nothing_goes_after_the_floor():
    judge = Judge()
    assert judge.at(FLOOR_S) is None
    assert judge.at(9.0) == "joins and does not fetch its state: 0 bytes are there, no more for 9.0 s"


def test_what_is_asked_for_is_waited_for_as_the_slowest_link_takes_it():
    judge, slices = Judge(), 4 * (1 << 22)
    assert judge.at(1.0, 0, slices, 1e9) is None
    longest_s = ASKED_FLOORS * FLOOR_S + slices / SLOWEST_BYTES_PER_S
    assert judge.at(longest_s, 0, slices, 1e9) is None
    assert "0 bytes" in judge.at(longest_s + 1.1, 0, slices, 1e9)


def test_once_something_has_come_the_longest_wait_is_the_measure():
    """All donors' slices come at once, every 100 s."""
    judge = Judge()
    judge.at(0.0, 0, 4e6, 40e6)
    for n in range(1, 5):
        for k in range(4):
            assert judge.at(100.0 * n + k / 1e3, n * 4e6 + k * 1e6, 4e6, 40e6) is None
    last_s = 400.003
    assert judge.at(last_s + WAITS_MAX * 100.0 - 1.0, 19e6, 4e6, 40e6) is None
    assert "19000000 bytes" in judge.at(last_s + WAITS_MAX * 100.0 + 1.0, 19e6, 4e6, 40e6)


def test_who_has_it_all_is_waited_for_as_others_are():
    judge = Judge()
    assert judge.at(1.0, 40e6, 0, 40e6) is None
    assert judge.at(1e4) is None


def test_nobody_is_blamed_while_a_stage_has_nobody_to_fetch_from():
    judge = Judge()
    judge.roster.lose(0)
    assert judge.at(1e3) is None
    judge.roster.missing.discard(0)
    assert judge.at(1e3 + 1.0) is None
    assert judge.at(1e3 + 1.0 + 2 * FLOOR_S)


def test_the_step_waits_for_it_no_more():
    judge = Judge()
    judge.roster.committed()
    assert judge.at(1e4) is None and not judge.joiners._joining
