"""The coordinator remembers a bounded number of peers that have gone, and knows them when they come back."""

import random
from collections import deque

import pytest
from test_coordinator import TERMS, Driver, of, reports, sent

from jaxdt.membership import newcomers
from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.membership.newcomers import ASKED_S
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import RECONNECT_S
from jaxdt.protocol.reports import HeartbeatReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.runtime.reporting.display import Display
from jaxdt.wiring.measured_routes import BANNED_MAX, StageQueue
from jaxdt.wiring.rebalance import Rebalancer

KEPT = 8  # instead of 256


def n_entries(one, seen=None):
    """The number of entries of all containers that can be reached from a machine."""
    seen = set() if seen is None else seen
    if id(one) in seen:
        return 0
    seen.add(id(one))
    if isinstance(one, dict):
        return len(one) + sum(n_entries(value, seen) for value in one.values())
    if isinstance(one, list | tuple | set | frozenset | deque):
        return len(one) + sum(n_entries(value, seen) for value in one)
    if type(one).__module__.startswith("jaxdt."):
        return sum(n_entries(getattr(one, name), seen) for name in getattr(one, "__dict__", ()))
    return 0


class Churned(Driver):
    """A run in which two of four peers are always there, and newcomers come and go."""

    def __init__(self, balance=None):
        super().__init__(n_steps=1 << 30, waits=True)
        self.machine.roster.balance = balance or self.machine.roster.balance
        self.now_s = 0.0
        self.begin()

    def say(self, peer, body):
        view = self.machine.view
        return self.message(peer, body, self.now_s, generation=view.generation, view=view.number)

    def ask(self, name):
        (told,) = sent(self.message(ev.TEMPORARY_IDS + name, ev.Join(), self.now_s, run=""), ev.Welcome).values()
        gone = self.event(ev.LinkChanged(ev.TEMPORARY_IDS + name, False), self.now_s)
        assert gone == [ev.Disconnect(ev.TEMPORARY_IDS + name)]
        return told

    def greet(self, told, process=1):
        return self.say(told.peer, ev.Hello(told.peer, told.stage, "f", f"n{told.peer}:1", process))

    def step(self):
        """All members are prepared, and the step is committed."""
        step, roster = self.machine.n_committed, self.machine.roster
        for peer in sorted(roster.members):
            result = ev.GroupResult(RoundId(RoundKind.GRADIENT, roster.peers[peer].stage, step, view=1), 5, 9.0, 4)
            self.say(peer, ev.Prepared(step, roster.admissions[peer], (result,)))
        assert sent(self.event(ev.Persisted("steps"), self.now_s), ev.Committed)
        self.durable()

    def durable(self):
        while "view" in self.machine._being_persisted:
            self.event(ev.Persisted("view"), self.now_s)

    def tick(self, seconds):
        """Time passes, in which those who are there are heard."""
        self.now_s += seconds
        for peer in range(4):
            self.say(peer, ev.Heartbeat(1, {"step": 1.0}))
        self.event(ev.Woke("tick"), self.now_s)
        self.durable()

    def lose(self, peer):
        self.event(ev.LinkChanged(peer, False), self.now_s)
        self.tick(RECONNECT_S + 0.1)

    def come_and_go(self, name):
        """Four newcomers: one that only asks, one that is lost as a candidate, one as a member, one that leaves."""
        self.ask(4 * name)
        candidate, member, leaver = (self.ask(4 * name + n) for n in (1, 2, 3))
        for told in (candidate, member, leaver):
            self.greet(told)
            self.say(told.peer, ev.Load(3.0, 0.5))
        self.say(candidate.peer, ev.Leaving())
        self.lose(candidate.peer)
        for told in (member, leaver):
            self.say(told.peer, ev.Profiled({"F": 1.0}, 0, 1))
        self.step()
        assert {member.peer, leaver.peer} <= self.machine.roster.members
        self.say(leaver.peer, ev.Leaving())
        self.say(0, ev.Saved(self.machine.n_committed, 0))  # of a checkpoint that will not be complete
        self.step()
        self.lose(member.peer)
        assert self.machine.roster.members == {0, 1, 2, 3}
        self.event(ev.LinkChanged(leaver.peer, False), self.now_s)
        self.step()
        for stage in (0, 1):
            self.say(stage, ev.Saved(self.machine.n_committed, stage))
        self.event(ev.Persisted("checkpoint"), self.now_s)
        self.tick(ASKED_S)
        return member


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch):
    monkeypatch.setattr(newcomers, "GONE_MAX", KEPT)


@pytest.mark.parametrize("balance", [None, Rebalancer(5.0)])
def test_nothing_grows_with_newcomers_that_come_and_go(balance):
    run = Churned(balance)
    for name in range(30):
        run.come_and_go(name)
    before, n_members = n_entries(run.machine), len(run.machine.roster.members)
    for name in range(30, 130):
        run.come_and_go(name)
        run.actions.clear()
    assert n_members == 4 and n_entries(run.machine) <= before + 4
    assert not of(run.actions, ev.Stop)


def test_who_was_put_out_lately_is_known_and_who_was_long_ago_may_ask_again():
    run = Churned()
    told = [run.come_and_go(name) for name in range(6)]
    late, early = told[-1], told[0]
    reach, answer = run.say(late.peer, ev.Heartbeat(9, {}))
    assert reach == ev.Connect(late.peer, f"n{late.peer}:1") and type(answer.body) is ev.View
    assert reports(run.greet(late), "connected")
    reasons = reports(actions := run.greet(early), "refused")
    assert reasons == [{"reason": f"peer {early.peer}: is not known any more, and may join again as a newcomer"}]
    assert sent(actions, ev.Ended) == {early.peer: ev.Ended(6, reasons[0]["reason"])}
    assert ev.Connect(early.peer, f"n{early.peer}:1") in actions
    assert run.event(ev.LinkChanged(early.peer, False), run.now_s) == [ev.Disconnect(early.peer)]


def test_ids_and_admissions_go_on():
    run = Churned()
    peers = [run.come_and_go(name).peer for name in range(12)]
    assert peers == sorted(set(peers))
    assert run.ask(1000).peer > peers[-1]
    assert run.machine.view.number > 12 * 2


def test_a_peer_of_the_plan_is_known_for_ever():
    run = Churned()
    run.lose(3)
    for name in range(6):
        run.tick(1.0)
        run.ask(name)
        run.tick(ASKED_S + 1.0)
    assert 3 in run.machine.roster.peers
    assert reports(run.say(3, ev.Hello(3, 1, "f", "h3:1")), "connected")


def test_who_asked_and_did_not_come_is_not_expected_for_ever():
    run = Churned()
    stages = [run.ask(name).stage for name in range(4)]
    assert stages == [0, 1, 0, 1]
    run.tick(ASKED_S - 1.0)
    assert len(run.machine.roster.coming) == 4
    run.tick(2.0)
    assert not run.machine.roster.coming


def test_the_last_of_a_stage_that_is_missed_is_not_forgotten():
    run = Churned()
    run.lose(2)
    run.lose(0)
    assert run.machine.roster.missing == {0}
    run.tick(ASKED_S)
    assert reports(run.actions, "returned") == [{"peer": 0}]


def test_a_member_keeps_no_connection_of_one_that_is_not_in_its_view():
    membership = Membership(PeerIdentity("r", "f", 0, 0, 0, 0, 3, 0, TERMS.heartbeat_s, TERMS.deadline_floor_s))
    assert membership.handle(0.0, ev.LinkChanged(7, False)) == [ev.Disconnect(7)]
    assert membership.handle(0.0, ev.LinkChanged(ev.COORDINATOR, False)) == []
    assert set(membership._down_since_s) == {ev.COORDINATOR}


def test_a_router_remembers_the_last_that_were_banned():
    queue = StageQueue(random.Random(0))
    for peer in range(2 * BANNED_MAX):
        queue.add(peer)
        queue.ban(peer)
    assert (
        set(queue._priority)
        == set(queue._estimates)
        == set(queue._last_choice)
        == set(range(BANNED_MAX, 2 * BANNED_MAX))
    )
    queue.add(0)
    assert queue.open == [0]


def test_the_display_keeps_the_members():
    class Plan:
        peers = ()

    display = Display(Plan(), 10, live=False, heartbeat_s=0.5)
    for peer in range(9):
        display.heartbeat(HeartbeatReport(peer, {"busy_s": 0.0}))
    display.members({0: 0, 7: 1})
    assert set(display._heartbeats) == set(display._rate_starts) == {0, 7}
