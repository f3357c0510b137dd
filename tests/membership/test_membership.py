from dataclasses import replace

import pytest

from jaxdt.membership.member import (
    ACCEPT,
    DROP,
    FIRST_CONTACT_S,
    HOLD,
    SAVE_AGAIN_S,
    Membership,
    PeerIdentity,
)
from jaxdt.membership.peer import Peer
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import AdoptedReport, DroppedReport, ReadyReport, StillReadyReport
from jaxdt.run.work import Work

SEAT = PeerIdentity(
    run="r",
    fingerprint="f",
    peer=1,
    stage=1,
    start_version=0,
    start_generation=0,
    n_steps=4,
    checkpoint_every_steps=2,
    heartbeat_s=0.5,
    deadline_floor_s=4.0,
)
VIEW = ev.View(1, 1, 0, (ev.Member(0, 0, 1, "h0:1"), ev.Member(1, 1, 1, "h1:1")), (1, 1), 0)
ACT = ev.Boundary(ev.Key("act", 0, 1, 0))


def from_coordinator(body, view=1, generation=0):
    return ev.Received(ev.Header("r", generation, view, ev.COORDINATOR), body)


def bodies(actions, dst=ev.COORDINATOR):
    return [action.body for action in actions if isinstance(action, ev.Send) and action.dst == dst]


def member(**seat):
    """A membership that has adopted the view at time 0."""
    machine = Membership(replace(SEAT, **seat))
    machine.handle(0.0, ev.Started("h1:1"))
    machine.handle(0.0, from_coordinator(VIEW))
    return machine


def follower(**seat):
    """The same for peer 2, another replica of the stage: peer 1 writes the checkpoints."""
    machine = Membership(replace(SEAT, peer=2, **seat))
    machine.handle(0.0, ev.Started("h2:1"))
    machine.handle(0.0, from_coordinator(replace(VIEW, members=(*VIEW.members, ev.Member(2, 1, 1, "h2:1")))))
    return machine


# ---------------------------------------------------------------------------------------------------------- beginning


def test_a_peer_says_hello_and_beats():
    actions = Membership(SEAT).handle(7.0, ev.Started("h1:1"))
    assert bodies(actions) == [ev.Hello(1, 1, "f", "h1:1"), ev.Heartbeat(1, {}, {})]
    assert actions[-1] == ev.WakeAt(7.5, "heartbeat")


def test_beats_go_on_with_the_drivers_status():
    machine = member()
    machine.handle(0.2, ev.Status({"busy_s": 1.0}))
    actions = machine.handle(0.5, ev.Woke("heartbeat"))
    assert actions == [ev.Send(ev.COORDINATOR, ev.Heartbeat(2, {"busy_s": 1.0})), ev.WakeAt(1.0, "heartbeat")]


def test_ready_tells_the_seconds_the_version_and_the_device():
    actions = Membership(replace(SEAT, start_version=3)).handle(0.0, ev.Ready({"F": 0.1}, 8, "gpu: 1 x H100"))
    assert bodies(actions) == [ev.Profiled({"F": 0.1}, 3, device="gpu: 1 x H100")]
    assert ReadyReport("gpu: 1 x H100") in actions


def test_a_ready_peer_says_now_and_then_that_it_still_waits():
    machine = Membership(SEAT)
    machine.handle(0.0, ev.Started("h1:1"))

    def said(now_s):
        actions = machine.handle(now_s, ev.Woke("heartbeat"))
        return [(now_s, action.waited_s) for action in actions if isinstance(action, StillReadyReport)]

    assert not said(50.0)
    machine.handle(50.0, ev.Ready({"F": 0.1}, 8, "cpu"))
    assert [line for s in range(100, 180) for line in said(float(s))] == [(110.0, 10.0), (130.0, 30.0), (170.0, 70.0)]
    machine.handle(180.0, from_coordinator(VIEW))
    assert not [line for s in range(180, 400) for line in said(float(s))]


def test_a_ready_peer_says_whether_it_hears_the_coordinator():
    machine = Membership(SEAT)
    machine.handle(0.0, ev.Started("h1:1"))
    machine.handle(0.0, ev.Ready({"F": 0.1}, 8, "cpu"))
    heard = []
    for s in range(32):
        if 5 <= s < 12:
            machine.handle(float(s), from_coordinator(ev.HeartbeatAck(1, 0.0)))
        actions = machine.handle(float(s), ev.Woke("heartbeat"))
        heard += [action.is_heard for action in actions if isinstance(action, StillReadyReport)]
    assert heard == [True, False]


def test_a_view_connects_the_members_and_tells_the_others():
    machine = Membership(SEAT)
    machine.handle(0.0, ev.Started("h1:1"))
    actions = machine.handle(1.0, from_coordinator(VIEW))
    assert actions == [AdoptedReport(1, [0, 1]), ev.Meet(VIEW.members), ev.ViewChanged(VIEW)]
    assert machine.header == ev.Header("r", 0, 1, 1)


@pytest.mark.parametrize("number", [0, 1])
def test_a_view_that_is_not_newer_is_ignored(number):
    assert member().handle(1.0, from_coordinator(replace(VIEW, number=number))) == []


# -------------------------------------------------------------------------------------------------------------- admit


@pytest.mark.parametrize(
    ("header", "body", "verdict"),
    [
        (ev.Header("r", 0, 1, 0), ACT, ACCEPT),
        (ev.Header("other", 0, 1, 0), ACT, DROP),
        (ev.Header("r", 0, 0, 0), ACT, DROP),
        (ev.Header("r", 1, 1, 0), ACT, DROP),
        (ev.Header("r", 0, 2, 0), ACT, HOLD),
        (ev.Header("r", 1, 2, 0), ACT, HOLD),
        (ev.Header("other", 0, 2, 0), ACT, DROP),
        (ev.Header("r", 1, 2, ev.COORDINATOR), VIEW, ACCEPT),
        (ev.Header("r", 0, 0, ev.COORDINATOR), ev.HeartbeatAck(1, 0.0), ACCEPT),
        (ev.Header("r", 0, 0, ev.COORDINATOR), ev.Ended(3, ""), ACCEPT),
        (ev.Header("other", 0, 1, ev.COORDINATOR), ev.Ended(3, ""), DROP),
        (ev.Header("r", 0, 1, 0), ev.Ended(3, ""), DROP),
        (ev.Header("r", 0, 1, 0), VIEW, DROP),
        (ev.Header("r", 0, 1, 9), ACT, DROP),
        (ev.Header("r", 0, 0, ev.COORDINATOR), ev.Committed(ev.Record(0, (), 0.0, 1, "apply")), ACCEPT),
        (ev.Header("r", 1, 1, ev.COORDINATOR), ev.Committed(ev.Record(0, (), 0.0, 1, "apply")), DROP),
        (ev.Header("r", 0, 2, ev.COORDINATOR), ev.Committed(ev.Record(0, (), 0.0, 1, "apply")), HOLD),
    ],
)
def test_who_may_be_heard(header, body, verdict):
    assert member().admit(header, body) == verdict


def test_before_the_first_view_everything_else_waits():
    assert Membership(SEAT).admit(ev.Header("r", 0, 1, 0), ACT) == HOLD


class Probe:
    """A machine that writes down what it is given, and answers with what it was told to."""

    READS = frozenset({ev.View, ev.Boundary, ev.Updated, ev.ViewChanged})

    def __init__(self, answers=None):
        self.seen, self.answers = [], answers or {}

    def handle(self, now_s, event):
        self.seen.append(event)
        return list(self.answers.get(type(event), []))


def peer_with(wiring=None, sync=None):
    wiring, sync = wiring or Probe(), sync or Probe()
    return Peer(Membership(SEAT), wiring, sync), wiring, sync


def handled(peer, event):
    """All actions of the peer, as a driver does them."""
    done = []
    for action in peer.handle(0.0, event):
        done += handled(peer, action.event) if isinstance(action, ev.HandleAgain) else [action]
    return done


def test_messages_of_a_newer_view_are_delivered_after_it_in_order():
    peer, wiring, sync = peer_with()
    messages = [ev.Received(ev.Header("r", 0, 1, 0), ev.Boundary(ev.Key("act", 0, 1, m))) for m in range(3)]
    for message in messages:
        assert peer.handle(0.0, message) == []
    assert not wiring.seen and not sync.seen
    handled(peer, from_coordinator(VIEW))
    assert wiring.seen == [from_coordinator(VIEW), ev.ViewChanged(VIEW), *messages]
    assert sync.seen == wiring.seen
    handled(peer, from_coordinator(replace(VIEW, number=2)))
    assert wiring.seen.count(messages[0]) == 1 and peer.n_dropped == 0


def test_held_messages_of_another_lineage_are_dropped_at_the_view():
    peer, wiring, _ = peer_with()
    late = ev.Received(ev.Header("r", 0, 2, 0), ACT)
    peer.handle(0.0, from_coordinator(VIEW))
    peer.handle(0.0, late)
    actions = handled(peer, from_coordinator(replace(VIEW, number=2, generation=1, rolled_back=True)))
    assert late not in wiring.seen and peer.n_dropped == 1
    assert DroppedReport(0, message="Boundary", view=2) in actions


def test_a_rollback_whose_view_was_missed_is_one_all_the_same():
    """So is the one that took a candidate in; who joins the new generation has nothing to go back to."""
    later = replace(VIEW, number=3, generation=1)
    candidate = Membership(SEAT)
    for machine in (member(), candidate):
        assert ev.ViewChanged(replace(later, rolled_back=True)) in machine.handle(1.0, from_coordinator(later, 3, 1))
        again = replace(later, number=4)
        assert ev.ViewChanged(again) in machine.handle(2.0, from_coordinator(again, 4, 1))
    joins = replace(later, joining=(1,))
    for machine, view in ((Membership(SEAT), joins), (Membership(replace(SEAT, start_generation=1)), later)):
        assert ev.ViewChanged(view) in machine.handle(1.0, from_coordinator(view, 3, 1))


@pytest.mark.parametrize("header", [ev.Header("other", 0, 1, 0), ev.Header("r", 0, 0, 0), ev.Header("r", 3, 1, 0)])
def test_the_tensor_of_a_message_that_is_dropped_is_not_stored(header):
    """Its key may be that of a tensor which is waited for: keys name no generation."""
    peer, *_ = peer_with()
    peer.handle(0.0, from_coordinator(VIEW))
    assert not any(isinstance(action, ev.StoreTensor) for action in peer.handle(0.0, ev.Received(header, ACT, "late")))
    (stored, *_) = peer.handle(0.0, ev.Received(ev.Header("r", 0, 1, 0), ACT, "due"))
    assert stored == ev.StoreTensor(0, ACT) and stored.tensor == "due"


def test_the_tensor_of_a_message_that_waits_for_its_view_is_stored_after_what_the_view_asks_for():
    free = ev.Free(3)
    peer, *_ = peer_with(Probe({ev.ViewChanged: [free]}))
    assert peer.handle(0.0, ev.Received(ev.Header("r", 0, 1, 0), ACT, "early")) == []
    actions = handled(peer, from_coordinator(VIEW))
    assert actions.index(free) < actions.index(ev.StoreTensor(0, ACT))


def test_what_a_message_that_has_waited_asks_for_is_done_before_the_next_one_is_read():
    """Else a machine would count on tensors that the driver has not stored yet."""
    again = ev.Updated(1, 2)
    peer, wiring, _ = peer_with(Probe({ev.ViewChanged: [again]}))
    messages = [ev.Received(ev.Header("r", 0, 1, 0), ev.Boundary(ev.Key("act", 0, 1, m)), "early") for m in range(2)]
    for message in messages:
        peer.handle(0.0, message)
    actions = peer.handle(0.0, from_coordinator(VIEW))
    assert actions[-2:] == [ev.HandleAgain(message) for message in messages] and wiring.seen[-1] == again
    for n_read, message in enumerate(messages, 1):
        assert peer.handle(0.0, message) == [ev.StoreTensor(0, message.body)] and wiring.seen[3:] == messages[:n_read]


def test_who_was_put_out_accepts_nothing_from_the_members():
    peer, wiring, _ = peer_with()
    for event in (ev.Started("h1:1"), ev.Ready({}), from_coordinator(VIEW)):
        peer.handle(0.0, event)
    peer.handle(0.0, from_coordinator(replace(VIEW, number=2, members=VIEW.members[:1])))
    assert [type(action) for action in peer.handle(0.0, ev.Received(ev.Header("r", 0, 1, 0), ACT, "late"))] == [
        DroppedReport
    ]


@pytest.mark.parametrize("header", [ev.Header("other", 0, 1, 0), ev.Header("r", 0, 0, 0), ev.Header("r", 3, 1, 0)])
def test_messages_of_another_run_lineage_or_old_view_are_counted_and_dropped(header):
    peer, wiring, sync = peer_with()
    peer.handle(0.0, from_coordinator(VIEW))
    n_seen = len(wiring.seen)
    actions = peer.handle(0.0, ev.Received(header, ACT))
    assert actions == [DroppedReport(0, message="Boundary", view=header.view)]
    assert peer.n_dropped == 1 and len(wiring.seen) == len(sync.seen) == n_seen


def test_what_one_machine_tells_the_others_stays_inside_and_messages_get_a_header():
    run = ev.Run(Work(1, "F", 0, 1, 0))
    wiring = Probe({ev.ViewChanged: [run, ev.Send(0, ACT, 100)]})
    sync = Probe({ev.ViewChanged: [ev.Updated(1, 2)]})
    peer, *_ = peer_with(wiring, sync)
    actions = peer.handle(0.0, from_coordinator(VIEW))
    assert wiring.seen[-1] == sync.seen[-1] == ev.Updated(1, 2)
    assert ev.Send(0, ACT, 100, header=ev.Header("r", 0, 1, 1)) in actions and run in actions
    assert ev.WriteCheckpoint(2) in actions
    assert not any(isinstance(action, ev.ViewChanged | ev.Updated) for action in actions)


# ---------------------------------------------------------------------------------------------------------- suspicion


def test_a_silent_coordinator_stops_the_peer_with_code_3():
    machine = member()
    for now_s in (0.1, 0.6, 1.1):
        machine.handle(now_s, from_coordinator(ev.HeartbeatAck(1, now_s)))
    assert not [a for a in machine.handle(5.0, ev.Woke("heartbeat")) if isinstance(a, ev.Stop)]
    stops = [a for a in machine.handle(5.2, ev.Woke("heartbeat")) if isinstance(a, ev.Stop)]
    assert stops == [ev.Stop(3, "coordinator: lost, silent for 4.1 s")]


def test_a_coordinator_that_never_answers_is_given_longer():
    machine = Membership(SEAT)
    machine.handle(0.0, ev.Started("h1:1"))
    assert not [a for a in machine.handle(FIRST_CONTACT_S, ev.Woke("heartbeat")) if isinstance(a, ev.Stop)]
    stops = [a for a in machine.handle(FIRST_CONTACT_S + 1, ev.Woke("heartbeat")) if isinstance(a, ev.Stop)]
    assert stops == [ev.Stop(3, "coordinator: not reached within 121 s")]


def test_a_neighbour_without_a_way_to_it_is_reported_at_once():
    machine = member()
    assert bodies(machine.handle(1.0, ev.NoWay(0, "why"))) == [ev.CannotReach(0, "why")]
    assert not machine.handle(1.0, ev.NoWay(ev.COORDINATOR, "why")) and not machine.handle(1.0, ev.NoWay(99, "why"))


def test_a_neighbour_out_of_reach_is_reported_once():
    machine = member()
    machine.handle(1.0, from_coordinator(ev.HeartbeatAck(1, 1.0)))
    assert machine.handle(1.0, ev.LinkChanged(0, False, "reset")) == [ev.WakeAt(2.5, "links")]
    machine.handle(1.5, ev.LinkChanged(0, False, "refused"))
    assert not [b for b in bodies(machine.handle(2.4, ev.Woke("heartbeat"))) if isinstance(b, ev.Suspect)]
    assert bodies(machine.handle(2.5, ev.Woke("links"))) == [ev.Suspect(0, "no link for 1.5 s")]
    machine.handle(2.5, from_coordinator(ev.HeartbeatAck(1, 1.0)))
    assert not [b for b in bodies(machine.handle(3.0, ev.Woke("heartbeat"))) if isinstance(b, ev.Suspect)]


def test_a_link_that_comes_back_is_forgiven():
    machine = member()
    machine.handle(1.0, ev.LinkChanged(0, False, "reset"))
    machine.handle(2.0, ev.LinkChanged(0, True))
    machine.handle(8.0, from_coordinator(ev.HeartbeatAck(1, 1.0)))
    assert not [b for b in bodies(machine.handle(9.0, ev.Woke("heartbeat"))) if isinstance(b, ev.Suspect)]


def test_the_coordinators_own_link_is_not_suspected():
    machine = member()
    machine.handle(1.0, ev.LinkChanged(ev.COORDINATOR, False, "reset"))
    machine.handle(8.0, from_coordinator(ev.HeartbeatAck(1, 1.0)))
    assert not [b for b in bodies(machine.handle(9.0, ev.Woke("heartbeat"))) if isinstance(b, ev.Suspect)]


def test_a_coordinator_that_is_there_again_is_greeted():
    """Also before it has told us a view. It may have been started anew, and must know who is here."""
    newcomer = Membership(SEAT)
    newcomer.handle(0.0, ev.Started("h1:1"))
    for machine in (member(), newcomer):
        assert machine.handle(1.0, ev.LinkChanged(ev.COORDINATOR, False, "reset")) == []
        assert ev.Hello(1, 1, "f", "h1:1") in bodies(machine.handle(2.0, ev.LinkChanged(ev.COORDINATOR, True)))


def test_ended_and_interrupted_stop_the_peer():
    assert member().handle(1.0, from_coordinator(ev.Ended(3, "peer 0: lost"))) == [ev.Stop(3, "peer 0: lost")]
    assert member().handle(1.0, ev.Interrupted()) == [ev.Stop(130, "interrupted")]


def test_a_run_that_ends_well_before_a_peer_is_in_it_is_no_success_of_that_peer():
    ended = from_coordinator(ev.Ended(0, "done: 9 steps"))
    assert member().handle(1.0, ended) == [ev.Stop(0, "done: 9 steps")]
    outside = Membership(SEAT)
    outside.handle(0.0, ev.Started("h1:1"))
    assert outside.handle(1.0, ended) == [ev.Stop(7, "peer 1: the run ended before it joined (done: 9 steps)")]


def test_who_cannot_go_on_says_why():
    """A full disk or a damaged file: the others end with the reason, and do not look for a lost peer."""
    machine = member()
    actions = machine.handle(1.0, ev.Interrupted(2, "stage_0: damaged"))
    assert bodies(actions) == [ev.Failed("stage_0: damaged")] and actions[-1] == ev.Stop(2, "stage_0: damaged")


def test_a_checkpoint_that_fails_ends_nothing():
    machine = member()
    assert machine.handle(1.0, ev.Updated(1, 2)) == [ev.WriteCheckpoint(2)]
    assert machine.handle(2.0, ev.CheckpointFailed(2, "disk: full")) == [
        ev.Send(ev.COORDINATOR, ev.SaveFailed(2, "disk: full"))
    ]
    assert machine.handle(3.0, ev.Woke("save")) == []


@pytest.mark.parametrize("version", [SEAT.n_steps, 1])
def test_a_checkpoint_that_the_end_waits_for_is_tried_again(version):
    """The last one, and one that an operator has asked for, who may have asked the run to stop after it."""
    machine = member()
    machine.handle(1.0, from_coordinator(ev.Committed(ev.Record(version - 1, (), 1.0, 4, "apply", 0, version == 1))))
    assert ev.WriteCheckpoint(version) in machine.handle(1.0, ev.Updated(1, version))
    failed, wake = machine.handle(2.0, ev.CheckpointFailed(version, "disk: full"))
    assert failed == ev.Send(ev.COORDINATOR, ev.SaveFailed(version, "disk: full"))
    assert wake == ev.WakeAt(2.0 + SAVE_AGAIN_S, "save")
    assert machine.handle(wake.at_s, ev.Woke("save")) == [ev.WriteCheckpoint(version)]
    assert machine.handle(wake.at_s, ev.Woke("save")) == []


# --------------------------------------------------------------------------------------------- checkpoints and the end


def test_checkpoints_are_written_every_n_steps_and_at_the_end():
    machine = member()
    assert [machine.handle(1.0, ev.Updated(1, version)) for version in (1, 2, 3, 4)] == [
        [],
        [ev.WriteCheckpoint(2)],
        [],
        [ev.WriteCheckpoint(4)],
    ]
    assert bodies(machine.handle(2.0, ev.WroteCheckpoint(2, 0.1, "a", 9))) == [ev.Saved(2, 1, 0.1, "a", 9)]


def test_each_member_writes_what_it_owes_whoever_writes_the_state():
    """Of the versions of which there are checkpoints."""
    for machine, saves in ((member(owes=True), True), (follower(owes=True), False)):
        actions = [action for version in range(1, 5) for action in machine.handle(1.0, ev.Updated(1, version))]
        assert [action for action in actions if isinstance(action, ev.WriteOwed)] == [
            ev.WriteOwed(v, 0) for v in (2, 4)
        ]
        assert any(isinstance(action, ev.WriteCheckpoint) for action in actions) == saves


def test_a_rollback_does_not_write_its_checkpoint_again():
    """Else a kill in that moment would take the last good one, and the coordinator would believe in progress."""
    machine = member()
    written = []
    for version in (1, 2, 3, 2, 3, 2, 0, 1, 2):
        written += [a for a in machine.handle(1.0, ev.Updated(1, version)) if isinstance(a, ev.WriteCheckpoint)]
    assert written == [ev.WriteCheckpoint(2), ev.WriteCheckpoint(2)]


def test_a_part_of_a_generation_that_is_void_counts_for_nothing():
    """The next generation may have drawn other samples."""
    machine = member()
    machine.handle(1.0, ev.Updated(1, 2))
    saved = machine.handle(1.5, ev.WroteCheckpoint(2, 0.1, "a", 9))
    machine.handle(1.6, ev.Updated(1, 4))
    back = replace(machine.view, number=2, generation=1, rolled_back=True)
    machine.handle(2.0, from_coordinator(back))
    assert machine.handle(2.5, ev.WroteCheckpoint(4, 0.1, "b", 9)) == []
    machine.handle(3.0, ev.LinkChanged(ev.COORDINATOR, False))
    again = bodies(machine.handle(3.5, ev.LinkChanged(ev.COORDINATOR, True)))
    assert ev.Saved in map(type, bodies(saved)) and ev.Saved not in map(type, again)
    machine.handle(4.0, ev.Updated(1, 0))
    assert ev.WriteCheckpoint(2, 1) in machine.handle(5.0, ev.Updated(1, 2))
    assert bodies(machine.handle(6.0, ev.WroteCheckpoint(2, 0.1, "c", 9, 1))) == [ev.Saved(2, 1, 0.1, "c", 9)]


def test_done_waits_for_the_last_checkpoint():
    machine = member()
    machine.handle(1.0, ev.Status({"busy_s": 1.5}, {"0": 10}))
    machine.handle(1.0, ev.Updated(1, 4))
    saved, done = bodies(machine.handle(2.0, ev.WroteCheckpoint(4)))
    assert saved == ev.Saved(4, 1)
    assert done == ev.Done(4, {"busy_s": 1.5, "clock_offset_s": 0.0}, {"0": 10})


def test_who_saves_nothing_is_done_at_once():
    machine = follower()
    assert machine.handle(1.0, ev.Updated(1, 2)) == []
    assert [type(body) for body in bodies(machine.handle(1.0, ev.Updated(1, 4)))] == [ev.Done]


def test_a_coordinator_that_was_started_anew_hears_again_who_is_done():
    """Also if the view has changed since; not after a rollback, when it is not true any more."""
    others = replace(VIEW, number=2, members=(ev.Member(1, 1, 1, "h1:1"), ev.Member(2, 1, 1, "h2:1")), n_committed=4)
    back = replace(others, n_committed=2, generation=1, rolled_back=True)
    for view, again in ((others, [ev.Done]), (back, [])):
        machine = follower()
        machine.handle(1.0, ev.Updated(1, 4))
        machine.handle(2.0, from_coordinator(view, 2, view.generation))
        machine.handle(3.0, ev.LinkChanged(ev.COORDINATOR, False, "reset"))
        told = bodies(machine.handle(4.0, ev.LinkChanged(ev.COORDINATOR, True)))
        assert [type(body) for body in told] == [ev.Hello, *again]


def test_without_a_period_only_the_end_is_saved():
    machine = member(checkpoint_every_steps=0)
    assert [machine.handle(1.0, ev.Updated(1, version)) for version in (1, 2, 3)] == [[], [], []]
    assert machine.handle(1.0, ev.Updated(1, 4)) == [ev.WriteCheckpoint(4)]


def test_a_complete_checkpoint_is_marked_by_all_since_any_host_may_hold_a_part():
    complete = ev.Checkpoint(2, 0, (ev.Part(2, 0, "a", 9, ("d",)),))
    for one in (member(), follower()):
        assert one.handle(1.0, from_coordinator(ev.CheckpointComplete(complete))) == [ev.MarkCheckpoint(complete)]


def test_the_clock_offset_is_taken_from_the_shortest_round_trip():
    """Beats at 0, 10 and 20; the coordinator's clock is 100 s ahead. Round trips of 4, 1 (symmetric) and 6 s."""
    machine = follower()
    machine.handle(4.0, from_coordinator(ev.HeartbeatAck(1, 103.0)))
    machine.handle(10.0, ev.Woke("heartbeat"))
    machine.handle(11.0, from_coordinator(ev.HeartbeatAck(2, 110.5)))
    machine.handle(20.0, ev.Woke("heartbeat"))
    machine.handle(26.0, from_coordinator(ev.HeartbeatAck(3, 120.1)))
    (done,) = bodies(machine.handle(27.0, ev.Updated(1, 4)))
    assert done.totals["clock_offset_s"] == pytest.approx(100.0)


def test_the_version_that_a_view_begins_with_is_saved_by_who_did_so_before_it():
    """Else the one who leaves and its successor would write the same part at the same time."""
    two = replace(VIEW, members=(*VIEW.members, ev.Member(2, 1, 1, "h2:1")))
    leaves = replace(two, number=2, n_committed=2, members=(VIEW.members[0], ev.Member(2, 1, 1, "h2:1")))
    successor = follower()
    successor.handle(1.0, from_coordinator(leaves))
    assert ev.WriteCheckpoint(2) not in successor.handle(1.1, ev.Updated(1, 2))
    assert ev.WriteCheckpoint(4) in successor.handle(2.0, ev.Updated(1, 4))
    stays = member()
    stays.handle(1.0, from_coordinator(two, 1))
    assert ev.WriteCheckpoint(2) in stays.handle(1.1, ev.Updated(1, 2))


@pytest.mark.parametrize("last", [SEAT.n_steps, 1])
def test_what_the_end_waits_for_is_saved_by_the_next_member_if_the_first_is_gone_before_it_is_applied(last):
    """The record came, and its update still runs when the view comes without the member that would have saved. Of
    version 1 nobody would make a checkpoint, had not an operator asked for it."""
    asked = (ev.Record(last - 1, (), 1.0, 4, "apply", 0, last != SEAT.n_steps),)
    two = replace(VIEW, members=(*VIEW.members, ev.Member(2, 1, 1, "h2:1")), records=asked)
    without = replace(two, number=2, n_committed=last, members=(VIEW.members[0], ev.Member(2, 1, 1, "h2:1")))
    successor = follower()
    assert ev.WriteCheckpoint(last) not in successor.handle(1.0, from_coordinator(without))
    assert ev.WriteCheckpoint(last) in successor.handle(1.1, ev.Updated(1, last))
    replaced = replace(two, number=2, n_committed=last, members=(*VIEW.members, ev.Member(2, 1, 1, "h2:1")))
    second = follower()
    second.handle(1.0, from_coordinator(replaced))
    assert ev.WriteCheckpoint(last) not in second.handle(1.1, ev.Updated(1, last)), "the first one is there"


@pytest.mark.parametrize("again", [(), (ev.Member(1, 1, 2, "h1:1", first_step=3),)])
def test_or_by_one_that_has_joined_meanwhile_if_all_others_are_gone_or_begin_again(again):
    """It joined to work from a later step on, and works from the view's first step on, since it is alone."""
    asked = ev.Record(0, (), 1.0, 4, "apply", 0, True)
    joined = replace(VIEW, members=(*VIEW.members, ev.Member(2, 1, 1, "h2:1", first_step=2)))
    working = ev.Member(2, 1, 1, "h2:1", first_step=1)
    view = replace(joined, number=2, n_committed=1, members=(VIEW.members[0], *again, working))
    last = Membership(replace(SEAT, peer=2))
    last.handle(0.0, ev.Started("h2:1"))
    last.handle(0.0, from_coordinator(joined))
    last.handle(1.0, from_coordinator(ev.Committed(asked)))
    assert ev.WriteCheckpoint(1) not in last.handle(1.0, from_coordinator(view)), "its update still runs"
    assert ev.WriteCheckpoint(1) in last.handle(1.1, ev.Updated(1, 1))
