"""One coordinator at a time: terms, a coordinator that was paused, is terminated, superseded, or has lost its disk."""

from dataclasses import replace

import pytest
from test_coordinator import STAGE_OF, TERMS, Driver, of, reports, sent

from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import DurableState
from jaxdt.membership.member import ACCEPT, DROP, Membership, PeerIdentity
from jaxdt.membership.peer import Peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import DroppedReport
from jaxdt.run.exit_codes import ExitCode

VIEW = ev.View(1, 1, 0, tuple(ev.Member(peer, stage, 1, f"h{peer}:1") for peer, stage in STAGE_OF.items()), (1, 1), 0)


def beats(run, now_s, peers=STAGE_OF):
    for peer in peers:
        run.message(peer, ev.Heartbeat(1, {}), now_s)


# ----------------------------------------------------------------------------------------------------------- pauses


def test_a_coordinator_that_was_paused_evicts_nobody_before_it_has_heard_them():
    """Its timers are the first that it sees, and what the peers have said is still in its sockets."""
    run = Driver()
    run.begin()
    beats(run, 1.0)
    assert reports(run.event(ev.Paused(9.0), 10.0), "paused") == [{"paused_s": 9.0, "patience_s": 4.0}]
    assert not reports(run.event(ev.Woke("tick"), 10.0), "lost")
    run.event(ev.LinkChanged(3, False), 10.0)
    assert not reports(run.event(ev.Woke("link"), 11.5), "lost")
    run.event(ev.LinkChanged(3, True), 11.6)
    beats(run, 11.7)
    assert not reports(run.event(ev.Woke("tick"), 14.1), "lost")


def test_who_died_during_the_pause_is_lost_after_one_lease():
    run = Driver()
    run.begin()
    beats(run, 1.0)
    run.event(ev.Paused(9.0), 10.0)
    beats(run, 13.0, (0, 1, 2))
    assert not reports(run.event(ev.Woke("tick"), 13.9), "lost")
    assert [fields["peer"] for fields in reports(run.event(ev.Woke("tick"), 14.1), "lost")] == [3]


def test_a_pause_shorter_than_a_heartbeat_is_none():
    run = Driver()
    run.begin()
    assert run.event(ev.Paused(0.4), 1.0) == []


# ------------------------------------------------------------------------------------------------------------- terms


def test_a_coordinator_that_hears_of_a_higher_term_ends_itself_and_not_the_run():
    run = Driver()
    run.begin()
    actions = run.event(ev.Received(ev.Header("r", 0, 1, 2, 3), ev.Heartbeat(1, {})), 1.0)
    reason = "coordinator: peer 2 (stage 0) obeys a coordinator of term 3, this one has term 1; that one has taken over"
    assert of(actions, ev.Stop) == [ev.Stop(ExitCode.SUPERSEDED, f"{reason} the run")]
    assert reports(actions, "stepped_down") and not sent(run.actions, ev.Ended)
    assert run.event(ev.Woke("tick"), 99.0) == []


def test_the_term_of_another_run_means_nothing():
    run = Driver()
    run.begin()
    assert run.event(ev.Received(ev.Header("other", 0, 1, 2, 3), ev.Heartbeat(1, {}))) == [
        DroppedReport(2, run="other")
    ]


def test_a_terminated_coordinator_ends_without_a_word_to_the_peers():
    run = Driver()
    run.begin()
    actions = run.event(ev.Terminated(), 1.0)
    assert [stop.code for stop in of(actions, ev.Stop)] == [ExitCode.TERMINATED] and not of(actions, ev.Send)
    assert reports(actions, "stepped_down") and not reports(actions, "ended")


def test_the_term_grows_with_each_coordinator_on_a_disk():
    first = Coordinator(replace(TERMS, last_term=4), TwoPhaseCommit(TERMS))
    again = Coordinator(TERMS, TwoPhaseCommit(TERMS), DurableState(5, VIEW, (), 0))
    assert (first.coordinator_term, again.coordinator_term) == (5, 6)
    assert ev.Persist("coordinator_term", 5) in first.handle(0.0, ev.Started())


def test_a_coordinator_says_nothing_before_its_term_is_durable():
    """Else its successor could have the same term."""
    run = Driver()
    run.event(ev.Started())
    assert run.join(0) == []
    actions = run.event(ev.Persisted("coordinator_term"), 0.3)
    assert reports(actions, "connected") == [{"peer": 0, "stage": 0}] and reports(actions, "waiting")


def test_a_coordinator_whose_disk_knows_nothing_of_the_run_says_so_and_ends():
    run = Driver()
    actions = run.message(1, ev.Hello(1, 1, "f", "h1:1"), view=7)
    (stop,) = of(actions, ev.Stop)
    assert stop.code == 2 and "peer 1 (stage 1) is in view 7" in stop.reason
    assert "holds no state of the run" in stop.reason and not of(actions, ev.Send)


# ------------------------------------------------------------------------------------------------------------- peers


def membership(view=VIEW, term=1):
    machine = Membership(PeerIdentity("r", "f", 0, 0, 0, 0, 3, 0, TERMS.heartbeat_s, TERMS.deadline_floor_s))
    peer = Peer(machine)
    peer.handle(0.0, ev.Started("h0:1"))
    if view:
        peer.handle(0.0, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR, term), view))
    return peer, machine


def test_a_peer_obeys_the_highest_term_that_it_has_heard_of():
    peer, machine = membership()
    assert machine.admit(ev.Header("r", 0, 1, ev.COORDINATOR, 2), ev.HeartbeatAck(1, 0.0)) == ACCEPT
    assert machine.admit(ev.Header("r", 0, 1, ev.COORDINATOR, 1), ev.Ended(130, "interrupted")) == DROP
    dropped = peer.handle(1.0, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR, 1), ev.Ended(130, "interrupted")))
    assert dropped == [DroppedReport(ev.COORDINATOR, message="Ended", view=1, coordinator_term=1)]


def test_a_peer_says_which_term_it_obeys():
    peer, _ = membership(term=2)
    (beat,) = [action for action in peer.handle(0.5, ev.Woke("heartbeat")) if isinstance(action, ev.Send)]
    assert beat.header == ev.Header("r", 0, 1, 0, 2)


@pytest.mark.parametrize("body", [ev.Ended(130, "interrupted"), VIEW, ev.HeartbeatAck(1, 0.0)])
def test_a_peer_without_a_view_obeys_no_coordinator_of_another_run(body):
    peer, machine = membership(view=None)
    assert peer.handle(1.0, ev.Received(ev.Header("older", 0, 1, ev.COORDINATOR, 9), body)) == [
        DroppedReport(ev.COORDINATOR, message=type(body).__name__, view=1, coordinator_term=9)
    ]
    assert machine.header.coordinator_term == 0


def test_a_peer_without_a_view_ends_if_its_coordinator_refuses_it_and_not_if_it_refuses_another():
    """A process that says that it is the coordinator, and is refused here, has not shown that it is."""
    peer, _ = membership(view=None)
    assert not of(peer.handle(1.0, ev.Refused(None, "1.2.3.4: run: coordinator is of run 'older'")), ev.Stop)
    assert of(peer.handle(1.0, ev.Refused(ev.COORDINATOR, "run: ...")), ev.Stop) == [
        ev.Stop(2, "coordinator: run: ...")
    ]


# ------------------------------------------------------------------ views that a superseded coordinator made since then


def successor(view=VIEW):
    """A coordinator of term 2 that knows of view 1 alone, and what it has done."""
    run = Driver()
    run.machine = Coordinator(TERMS, TwoPhaseCommit(TERMS), DurableState(1, view, ()))
    run.event(ev.Started())
    run.event(ev.Persisted("coordinator_term"))
    return run


def test_views_of_different_coordinators_have_different_numbers_and_say_what_they_continue():
    assert VIEW.next_number(1) == (2, ())
    number, continued = replace(VIEW, number=7).next_number(3)
    third = replace(VIEW, number=number, continued=continued)
    assert (number, continued) == (2_000_001, (7,)) and third.next_number(3) == (2_000_002, (7,))
    assert third.continues(7) and third.continues(1) and third.continues(2_000_001)
    assert not third.continues(8) and not third.continues(1_000_001) and not third.continues(2_000_002)


@pytest.mark.parametrize("body", [ev.Heartbeat(1, {}), ev.Hello(2, 0, "f", "h2:1")])
def test_a_member_in_a_view_that_its_coordinator_does_not_know_is_admitted_anew(body):
    run = successor()
    assert reports(run.message(2, body, 1.0, view=3), "lost")
    assert reports(run.event(ev.Persisted("view"), 1.0), "view")[0]["members"] == {0: 0, 1: 1, 3: 1}
    run.message(2, ev.Hello(2, 0, "f", "h2:1"), 1.1, view=3)
    run.message(2, ev.Profiled({"F": 1.0}, 0, state=ev.StateName(0, 0)), 1.1, view=3)
    assert 2 in run.machine.roster.candidates


def test_a_member_that_lags_behind_is_not_evicted_for_it():
    run = successor()
    assert not reports(run.message(2, ev.Heartbeat(1, {}), 1.0, view=1), "lost")


def test_the_last_of_a_stage_takes_its_place_again_with_the_state_that_it_has():
    run = successor()
    for peer in (0, 2):
        run.message(peer, ev.Hello(peer, 0, "f", f"h{peer}:1"), 1.0, view=3)
        run.message(peer, ev.Profiled({"F": 1.0}, 0, state=ev.StateName(0, 0)), 1.0, view=3)
    run.event(ev.Persisted("view"), 1.0)
    run.event(ev.Persisted("view"), 1.0)
    members = run.machine.view.by_peer
    assert {peer: member.admission for peer, member in members.items()} == {0: 1_000_002, 1: 1, 2: 1_000_002, 3: 1}
    assert not of(run.actions, ev.Stop)


def test_a_joining_member_that_is_admitted_anew_is_ready_before_the_view_without_it_is_durable():
    """It has its state, and then it is the last of its stage that has it."""
    run = successor(replace(VIEW, joining=(3,)))
    run.message(3, ev.Hello(3, 1, "f", "h3:1"), 1.0, view=3)
    run.message(3, ev.Profiled({"F": 1.0}, 0, state=ev.StateName(0, 0)), 1.0, view=3)
    run.event(ev.Persisted("view"), 1.0)
    assert run.machine.roster.candidates == {3}
    run.message(1, ev.Failed("disk: full"), 1.1)
    run.event(ev.Persisted("view"), 1.1)
    assert {member.peer for member in run.machine.view.members} == {0, 2, 3} and run.machine.view.joining == ()
    assert not of(run.actions, ev.Stop)


LATER = replace(VIEW, number=1_000_001, coordinator_term=2, continued=(1,))


def hear(peer, view, now_s=1.0):
    return peer.handle(now_s, ev.Received(ev.Header("r", 0, view.number, ev.COORDINATOR, view.coordinator_term), view))


@pytest.mark.parametrize("later", [replace(VIEW, coordinator_term=2), LATER])
def test_a_peer_whose_view_the_next_coordinator_does_not_know_gives_up_what_it_has_done_and_says_so(later):
    peer, machine = membership()
    hear(peer, replace(VIEW, number=3))
    actions = hear(peer, later)
    assert reports(actions, "evicted") and machine.view is None
    (hello,) = sent(actions, ev.Hello).values()
    assert machine.header.view == 3 and hello.peer == 0  # the coordinator sees which view it was in
    assert not reports(hear(peer, replace(LATER, number=1_000_002)), "adopted")  # not under the old admission
    members = (replace(VIEW.members[0], admission=1_000_003), *VIEW.members[1:])
    assert reports(hear(peer, replace(LATER, number=1_000_003, members=members)), "adopted")
    assert machine.header.view == 1_000_003


def test_a_peer_whose_view_is_continued_goes_on():
    peer, machine = membership()
    assert hear(peer, replace(VIEW, coordinator_term=2)) == []
    assert reports(hear(peer, LATER), "adopted") and not reports(hear(peer, VIEW), "evicted")
    assert machine.header.view == 1_000_001
