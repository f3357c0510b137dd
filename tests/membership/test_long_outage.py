"""A coordinator that stays away: members come to one version, and write it before they end."""

from dataclasses import replace

from test_membership import SEAT, VIEW, bodies, follower, from_coordinator, member

from jaxdt.membership.member import ACCEPT, DROP, Membership
from jaxdt.protocol import events as ev
from jaxdt.run.config import NetConfig

RECORD = ev.Record(0, (), 1.0, 4, "apply")


def left_alone(at_s, machine=None):
    """A member that has applied one step and hears nothing of the coordinator after 1 s."""
    machine = machine or member(outage_s=60.0)
    machine.handle(0.5, from_coordinator(ev.HeartbeatAck(1, 0.4)))
    machine.handle(0.6, from_coordinator(ev.Committed(RECORD)))
    machine.handle(1.0, ev.Updated(1, 1))
    return machine, machine.handle(at_s, ev.Woke("heartbeat"))


def test_by_default_it_is_waited_for_over_a_night():
    assert NetConfig().outage_s >= 8 * 3600


def test_members_repeat_the_last_record_since_others_may_not_have_heard_of_it():
    machine, actions = left_alone(9.0)
    assert bodies(actions, 0) == [ev.Committed(RECORD)] and bodies(actions, 1) == []
    assert bodies(machine.handle(9.5, ev.Woke("heartbeat")), 0) == []
    head = ev.Header("r", 0, 1, 0)
    assert machine.admit(head, ev.Committed(RECORD)) == ACCEPT
    assert machine.admit(replace(head, generation=1), ev.Committed(RECORD)) == DROP


def test_a_member_writes_what_it_holds_before_it_gives_up():
    machine, actions = left_alone(70.0)
    assert [action for action in actions if isinstance(action, ev.WriteCheckpoint | ev.Stop)] == [ev.WriteCheckpoint(1)]
    assert not [
        action for action in machine.handle(71.0, ev.Woke("heartbeat")) if isinstance(action, ev.WriteCheckpoint)
    ]
    (stop,) = machine.handle(72.0, ev.WroteCheckpoint(1, 0.0, "a", 9))
    assert stop.code == 3 and "the state after 1 steps is written" in stop.reason


def test_every_replica_does_so_since_the_others_may_be_gone():
    machine = follower()
    machine.identity = replace(machine.identity, outage_s=60.0)
    _, actions = left_alone(70.0, machine)
    assert ev.WriteCheckpoint(1) in actions


def test_a_disk_that_refuses_is_named_at_the_end():
    machine, _ = left_alone(70.0)
    (stop,) = machine.handle(72.0, ev.CheckpointFailed(1, "disk: full"))
    assert stop.code == 3 and stop.reason.endswith("cannot be written: disk: full")


def test_what_nobody_has_trained_is_not_written():
    machine = member(outage_s=60.0)
    machine.handle(0.5, from_coordinator(ev.HeartbeatAck(1, 0.4)))
    assert [type(action) for action in machine.handle(70.0, ev.Woke("heartbeat")) if isinstance(action, ev.Stop)] == [
        ev.Stop
    ]
    outside = Membership(replace(SEAT, outage_s=60.0))
    outside.handle(0.0, ev.Started("h1:1"))
    outside.handle(0.1, from_coordinator(replace(VIEW, members=VIEW.members[:1])))
    _, actions = left_alone(70.0, outside)
    assert not [action for action in actions if isinstance(action, ev.WriteCheckpoint)]
