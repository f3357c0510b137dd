"""A stage whose last replica is silent: the run waits for those who may hold its state, before it goes back."""

from dataclasses import replace

import pytest
from test_coordinator import STAGE_OF, TERMS, Driver, lose, of, prepared, reports, sent

from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.membership.roster import KnownPeer
from jaxdt.protocol import events as ev
from jaxdt.protocol.deadline import RECONNECT_S
from jaxdt.protocol.round_id import RoundId, RoundKind

GRACE_S = 60.0
NEWCOMER = 4
COMMITTED = ev.StateName(0, 1, (RoundId(RoundKind.GRADIENT, 0, 0, view=1), RoundId(RoundKind.GRADIENT, 1, 0, view=1)))


class Vacant(Driver):
    """One replica of stage 1 (peer 3) was evicted before anything was committed, so peer 1 is the last. One step is
    committed, and a newcomer of stage 1 is ready. The last complete checkpoint is that of 0 steps."""

    def __init__(self, **terms):
        super().__init__(**{"waits": True, "stage_grace_s": GRACE_S} | terms)
        self.begin()
        lose(self, 3, now_s=0.0)
        self.event(ev.Persisted("view"), 2.0)
        self.now_s = 2.0
        self.commit_in_view()
        self.machine.roster.peers[NEWCOMER] = KnownPeer(1)
        self.ready(NEWCOMER)

    def say(self, peer, body):
        view = self.machine.view
        return self.message(peer, body, self.now_s, generation=view.generation, view=view.number)

    def ready(self, peer, state=None, process=0):
        stage = self.machine.roster.peers[peer].stage
        actions = self.say(peer, ev.Hello(peer, stage, "f", f"h{peer}:1", process))
        return actions + self.say(peer, ev.Profiled({"F": 1.0}, 1, process, state=state))

    def forget_candidates(self):
        for known in self.machine.roster.peers.values():
            known.is_candidate = False

    def commit_in_view(self):
        step, roster = self.machine.n_committed, self.machine.roster
        for peer, admission in sorted(roster.admissions.items()):
            vote = prepared(peer, step) if peer in STAGE_OF else prepared(1, step)
            self.say(peer, replace(vote, admission=admission))
        return self.event(ev.Persisted("steps"), self.now_s)

    def tick(self, seconds, *silent):
        """Time passes; all members but the silent ones are heard."""
        end_s = self.now_s + seconds
        actions = []
        while self.now_s < end_s:
            self.now_s = min(end_s, self.now_s + 2.0)
            for peer in sorted((self.machine.roster.members | {NEWCOMER}) - set(silent)):
                self.say(peer, ev.Heartbeat(1, {}))
            actions += self.event(ev.Woke("tick"), self.now_s)
        return actions

    def cut(self, peer):
        """Its link breaks, and its host does not answer."""
        self.event(ev.LinkChanged(peer, False, "no answer"), self.now_s)
        return self.tick(RECONNECT_S + 0.1, peer)

    def durable(self):
        return self.event(ev.Persisted("view"), self.now_s)

    @property
    def generation(self):
        return self.machine.view.generation


def test_a_short_silence_of_the_last_replica_loses_nothing_though_a_newcomer_waits():
    run = Vacant()
    actions = run.cut(1)
    (vacant,) = reports(actions, "vacant")
    assert vacant["stage"] == 1 and vacant["waits_for"] == [1] and 50.0 < vacant["waits_s"] <= GRACE_S
    note = sent(run.say(0, ev.Heartbeat(1, {})), ev.HeartbeatAck)[0].note
    assert note == "the run stands still: stage 1 has no peer that is there"
    assert not of(actions, ev.Persist) and not reports(actions, "rollback")
    returned = run.say(1, ev.Heartbeat(1, {}))
    assert reports(returned, "returned") == [{"peer": 1}]
    run.commit_in_view()  # with the state that it held, and the newcomer joins after that
    run.durable()
    assert run.machine.n_committed == 2 and run.generation == 0
    assert run.machine.view.joining == (NEWCOMER,)


def test_a_silent_peer_is_dialled_and_its_connections_are_ended_when_it_is_given_up():
    run = Vacant()
    actions = run.cut(1)
    ends, dials = (actions.index(action) for action in (ev.Disconnect(1), ev.Connect(1, "h1:1")))
    assert ends < dials
    assert list(sent(actions, ev.View)) == [1], "a transport dials only when it has something to send"
    assert run.event(ev.LinkChanged(1, False, "no answer"), run.now_s) == []
    given_up = run.tick(GRACE_S, 1)
    assert ev.Disconnect(1) in given_up


def test_a_run_whose_stage_nobody_can_fill_says_so_again():
    run = Vacant(stage_grace_s=0.0)
    run.message(NEWCOMER, ev.Leaving(), run.now_s)
    run.event(ev.LinkChanged(1, False, "ECONNREFUSED", gone=True), run.now_s)
    (said,) = reports(run.tick(RECONNECT_S + 12.0, 1, NEWCOMER), "still_waiting")
    assert said["stages"] == [1] and said["missing"] == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_has_ended_is_not_waited_for(when):
    """Its host answers that nobody listens: as soon as it is missed, or while the run waits for it."""
    run = Vacant()
    gone = ev.LinkChanged(1, False, "ECONNREFUSED", gone=True)
    if when == "before":
        run.event(gone, run.now_s)
        actions = run.tick(RECONNECT_S + 0.1, 1)
    else:
        run.cut(1)
        actions = run.event(gone, run.now_s)
    assert [report["waits_for"] for report in reports(actions, "vacant")] == [[]]
    assert [report["again"] for report in reports(actions, "rollback")] == [[0]]
    (view,) = set(sent(run.durable(), ev.View).values())
    assert {member.peer for member in view.members} == {0, 2, NEWCOMER} and view.rolled_back


def test_nor_is_one_whose_peer_was_started_again():
    run = Vacant()
    run.cut(1)
    assert reports(run.ready(1, process=9), "rollback")


def test_after_the_grace_the_run_goes_back():
    run = Vacant()
    run.cut(1)
    assert not reports(run.tick(GRACE_S - 4.0, 1), "rollback")
    assert reports(run.tick(6.0, 1), "rollback") == [{"step": 1, "to": 0, "generation": 1, "again": [0]}]


def test_a_stage_whose_grace_is_over_is_refilled_as_soon_as_no_other_one_is_vacant():
    """A newcomer of stage 1 waits, and nobody comes for stage 0 until its last replica is heard again."""
    run = Vacant()
    run.event(ev.LinkChanged(0, False, "no answer"), run.now_s)
    run.event(ev.LinkChanged(2, False, "no answer"), run.now_s)
    run.tick(RECONNECT_S + 0.1, 0, 2)
    run.durable()
    run.event(ev.LinkChanged(1, False, "ECONNREFUSED", gone=True), run.now_s)
    assert not reports(run.tick(RECONNECT_S + 0.1, 0, 1, 2), "rollback")
    assert reports(run.say(2, ev.Heartbeat(1, {})), "rollback") == [{"step": 1, "to": 0, "generation": 1, "again": [0]}]


def test_without_a_newcomer_the_run_waits_after_the_grace_too():
    run = Vacant()
    run.forget_candidates()
    actions = run.cut(1) + run.tick(GRACE_S, 1)
    assert not reports(actions, "rollback") and not of(actions, ev.Stop)
    assert [report["waits_for"] for report in reports(actions, "vacant")] == [[1], []]


def test_a_run_that_stops_at_a_lost_stage_waits_for_the_silent_too():
    run = Vacant(waits=False)
    assert not of(run.cut(1) + run.tick(GRACE_S - 4.0, 1), ev.Stop)
    (stop,) = of(run.tick(6.0, 1), ev.Stop)
    assert stop.code == 3 and stop.reason.endswith("it was the last of its stage")
    run = Vacant(waits=False)
    run.event(ev.LinkChanged(1, False, "ECONNREFUSED", gone=True), run.now_s)
    assert [stop.code for stop in of(run.tick(RECONNECT_S + 0.1, 1), ev.Stop)] == [3]


# ------------------------------------------------------------------------------- holders of the committed version


class FalselyEvicted(Vacant):
    """Peer 3 has joined again; it is evicted on suspicion with the committed version, and then peer 1 dies."""

    def __init__(self):
        super().__init__()
        self.forget_candidates()
        self.ready(3)
        self.commit_in_view()
        self.durable()
        self.commit_in_view()  # the third step is under way, peer 3 takes part in it
        self.ready(NEWCOMER)
        self.event(ev.LinkChanged(3, False, "reset"), self.now_s)
        self.tick(RECONNECT_S + 0.1, 3)
        self.durable()
        rounds = tuple(RoundId(RoundKind.GRADIENT, stage, 2, view=1) for stage in (0, 1))
        self.held = ev.StateName(0, 3, rounds)

    def kill(self):
        self.event(ev.LinkChanged(1, False, "ECONNREFUSED", gone=True), self.now_s)
        return self.tick(RECONNECT_S + 0.1, 1, 3)


def test_a_falsely_evicted_peer_takes_the_vacant_place_with_its_state():
    run = FalselyEvicted()
    actions = run.kill()
    assert [report["waits_for"] for report in reports(actions, "vacant")] == [[3]]
    assert not reports(actions, "rollback")
    assert not reports(run.say(3, ev.Hello(3, 1, "f", "h3:1")), "rollback")  # an update may still run there
    actions = run.ready(3, run.held)
    (view,) = set(sent(run.durable(), ev.View).values())
    assert not reports(actions, "rollback") and view.generation == 0 and view.n_committed == 3
    members = {member.peer: member for member in view.members}
    assert set(members) == {0, 2, 3} and view.joining == ()
    assert members[3].first_step == 3 and members[3].admission == view.number == view.stage_views[1]


@pytest.mark.parametrize(
    "state",
    [
        ev.StateName(0, 2),
        ev.StateName(0, 3),
        ev.StateName(1, 3, (RoundId(RoundKind.GRADIENT, 0, 2, view=1), RoundId(RoundKind.GRADIENT, 1, 2, view=1))),
    ],
)
def test_one_with_another_state_does_not(state):
    """An older version, other rounds, another generation: now nobody is left who might hold the stage's state."""
    run = FalselyEvicted()
    run.kill()
    run.say(3, ev.Hello(3, 1, "f", "h3:1"))
    assert reports(run.say(3, ev.Profiled({"F": 1.0}, state.version, state=state)), "rollback")


def test_what_an_evicted_peer_holds_is_outdated_after_another_step():
    run = FalselyEvicted()
    run.forget_candidates()
    run.commit_in_view()
    assert run.machine.roster.peers[3].silent_since_s is None
    run.ready(NEWCOMER)
    assert reports(run.kill(), "rollback")


def test_a_joining_member_that_has_its_state_takes_over_from_its_donor():
    """It is admitted anew: what it has begun as a joining member is void."""
    run = Vacant()
    run.commit_in_view()
    run.durable()
    assert run.machine.view.joining == (NEWCOMER,)
    state = ev.StateName(0, 2, (RoundId(RoundKind.GRADIENT, 0, 1, view=1), RoundId(RoundKind.GRADIENT, 1, 1, view=1)))
    run.say(NEWCOMER, ev.Profiled({"F": 1.0}, 2, state=state))
    run.say(NEWCOMER, replace(prepared(1, 2), admission=run.machine.roster.admissions[NEWCOMER]))
    run.event(ev.LinkChanged(1, False, "ECONNREFUSED", gone=True), run.now_s)
    run.tick(RECONNECT_S + 0.1, 1)
    (view,) = set(sent(run.durable(), ev.View).values())
    assert view.generation == 0 and view.joining == () and {member.peer for member in view.members} == {0, 2, NEWCOMER}
    assert view.results == ()  # it gives up what it holds of the step under way
    assert run.machine.roster.admissions[NEWCOMER] == view.number and view.by_peer[NEWCOMER].first_step == 2


# ------------------------------------------------------------------------------- a last replica that blocks the run

BLOCKS = ev.Overdue("1:1B1@p1", 4.5, 4.0, blocks=True)


def test_a_peer_with_the_state_takes_over_from_a_last_replica_whose_work_is_overdue():
    run = FalselyEvicted()
    run.forget_candidates()
    assert not reports(run.say(1, BLOCKS), "lost")
    run.ready(3, run.held)
    (lost,) = reports(run.say(1, BLOCKS), "lost")
    view = sent(run.durable(), ev.View)[0]
    assert lost["peer"] == 1 and set(view.by_peer) == {0, 2, 3} and view.joining == ()


def test_newcomers_join_in_mid_step_if_a_last_replica_blocks_it_and_then_take_over():
    run = Vacant()
    assert not of(run.say(1, replace(BLOCKS, blocks=False)), ev.Persist)
    assert not reports(run.say(1, BLOCKS), "lost")
    view = sent(run.durable(), ev.View)[1]
    assert set(view.by_peer) == {0, 1, 2, NEWCOMER} and view.joining == (NEWCOMER,) and view.n_committed == 1
    run.say(NEWCOMER, ev.Profiled({"F": 1.0}, 1, state=COMMITTED))
    assert [report["peer"] for report in reports(run.say(1, BLOCKS), "lost")] == [1]
    view = sent(run.durable(), ev.View)[0]
    assert set(view.by_peer) == {0, 2, NEWCOMER} and view.joining == () and view.generation == 0


def test_after_the_step_newcomers_wait_for_the_end_of_the_next_one_again():
    run = Vacant()
    run.forget_candidates()
    run.say(1, BLOCKS)
    run.commit_in_view()
    assert not of(run.ready(NEWCOMER), ev.Persist)


def test_the_same_holds_if_a_last_replica_is_put_out_since_it_cannot_reach_another():
    """No replica of either end can be spared, so the one that goes is missing, comes back, and newcomers join."""
    run = Vacant()
    run.event(ev.LinkChanged(2, False, "ECONNREFUSED", gone=True), run.now_s)
    run.tick(RECONNECT_S + 0.1, 2)
    run.durable()
    run.say(0, ev.Suspect(1, "no link for 1.5 s"))
    run.say(1, ev.Suspect(0, "no link for 1.5 s"))
    assert [report["peer"] for report in reports(run.tick(1.0), "lost")] == [1]
    assert reports(run.say(1, ev.Heartbeat(1, {})), "returned") == [{"peer": 1}]
    view = sent(run.durable(), ev.View)[0]
    assert set(view.by_peer) == {0, 1, NEWCOMER} and view.joining == (NEWCOMER,)


def test_a_joining_member_whose_donor_has_died_is_put_out_and_says_what_it_has():
    """Without a state it is a newcomer with which the run goes back."""
    run = Vacant()
    run.commit_in_view()
    run.durable()
    run.event(ev.LinkChanged(1, False, "ECONNREFUSED", gone=True), run.now_s)
    run.tick(RECONNECT_S + 0.1, 1)
    told = sent(run.durable(), ev.View)
    assert NEWCOMER not in told[0].by_peer and told[NEWCOMER] == told[0] and told[0].generation == 0
    assert run.machine.roster.awaited(1) == [NEWCOMER]
    assert reports(run.ready(NEWCOMER), "rollback")


def test_a_rollback_for_other_reasons_keeps_a_silent_member_whose_stage_has_nobody_else():
    run = Vacant(on_nonfinite="rollback", n_steps=4)
    run.forget_candidates()
    run.say(1, prepared(1, 1))
    run.cut(1)
    for peer in (0, 2):
        run.say(peer, prepared(peer, 1, sq_norm=float("nan")))
    (view,) = set(sent(run.durable(), ev.View).values())
    assert view.rolled_back and 1 in view.by_peer and run.machine.roster.missing == {1}
    assert reports(run.say(1, ev.Heartbeat(1, {})), "returned")


# ------------------------------------------------------------------------------------------------ the peer's side


def membership():
    machine = Membership(PeerIdentity("r", "f", 1, 1, 0, 0, 9, 0, TERMS.heartbeat_s, TERMS.deadline_floor_s))
    machine.handle(0.0, ev.Ready({"F": 1.0}))
    return machine


def view_of(number, admission=1, joining=()):
    members = (ev.Member(0, 0, 1, "h0:1"), ev.Member(1, 1, admission, "h1:1"))
    return ev.Received(
        ev.Header("r", 0, number, ev.COORDINATOR), ev.View(number, 1, 0, members, (1, 1), 3, joining=joining)
    )


def profiled(actions):
    return [action.body for action in actions if type(getattr(action, "body", None)) is ev.Profiled]


def test_a_joining_member_says_that_its_state_is_here_and_says_it_again_to_another_coordinator():
    machine, state = membership(), ev.StateName(0, 3)
    machine.handle(0.0, view_of(2, 2, joining=(1,)))
    (told,) = profiled(machine.handle(1.0, ev.Holds(state)))
    assert told.state == state
    machine.handle(2.0, ev.LinkChanged(ev.COORDINATOR, False))
    assert profiled(machine.handle(3.0, ev.LinkChanged(ev.COORDINATOR, True))) == [told]
    machine.handle(4.0, view_of(3, 2))
    assert profiled(machine.handle(5.0, ev.Holds(state))) == []


def test_a_member_that_is_admitted_anew_drops_what_it_has_begun():
    machine = membership()
    machine.handle(0.0, view_of(2))
    kinds = [type(action) for action in machine.handle(1.0, view_of(3, admission=3))]
    assert kinds.index(ev.Evicted) < kinds.index(ev.ViewChanged)
    assert ev.Evicted not in [type(action) for action in machine.handle(2.0, view_of(4, admission=3))]
