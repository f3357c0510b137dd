"""A replica's own state: its digest goes with `Prepared`, and a state that is wrong is replaced before the step."""

from dataclasses import replace

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import DownloadReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.delay import NO_DELAY, Delay
from jaxdt.run.sizes import Group
from jaxdt.run.work import Work
from jaxdt.sync.allreduce import AllReduce
from jaxdt.sync.state_transfer import StateTransfer

ALONE = ev.View(1, 1, 0, (ev.Member(0, 0, 1),), (1,), 0)
SUMS = (1.0,)


class Replica:
    """The only member of its stage: it is prepared as soon as it has computed."""

    def __init__(self, every_steps, delay=NO_DELAY):
        groups = (Group(0, (0,), 4),)
        self.machine = AllReduce(0, 0, groups, 1, 1 << 10, delay=delay, check_every_steps=every_steps)
        self.tell(ev.ViewChanged(ALONE))

    def tell(self, event):
        """The actions of the machine beside its Work and its sums, which are done at once."""
        others = []
        for action in self.machine.handle(0.0, event):
            if isinstance(action, ev.Run) and action.work.kind == "G":
                others += self.tell(ev.Ran(action.work, 0.0, 0.0))
            elif isinstance(action, ev.Sum):
                others += self.tell(ev.Summed(action.key, 5, 1.0))
            else:
                others.append(action)
        return others

    def hear(self, body):
        return self.tell(ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR), body))

    def compute(self, step):
        self.tell(ev.Accumulated(step, 0, 0, 1, None))
        return self.tell(ev.Drained(step))

    def apply(self, step):
        self.hear(ev.Committed(ev.Record(step, (RoundId(RoundKind.GRADIENT, 0, step, view=1),), 1.0, 1, "apply")))
        return self.tell(ev.Ran(Work(0, "U", None, 0, step), 0.0, 0.0))


def digested(version, digest=9, generation=0):
    return ev.Digested(version, generation, digest, 2.0, SUMS)


def votes(actions):
    return [
        action.body.state for action in actions if isinstance(action, ev.Send) and isinstance(action.body, ev.Prepared)
    ]


def test_every_nth_vote_waits_for_the_digest_of_the_state():
    replica = Replica(every_steps=2)
    actions = replica.compute(0)
    assert ev.DigestState(0, 0) in actions and not votes(actions)
    assert votes(replica.tell(digested(0))) == [ev.StateDigest(0, 0, 9, 2.0, SUMS)]
    replica.apply(0)
    actions = replica.compute(1)
    assert votes(actions) == [None] and ev.DigestState(1, 0) not in actions
    replica.apply(1)
    assert ev.DigestState(2, 0) in replica.compute(2)


def test_zero_asks_never():
    assert votes(Replica(every_steps=0).compute(0)) == [None]


def test_a_digest_of_another_state_does_not_count():
    replica = Replica(every_steps=1)
    replica.compute(0)
    assert replica.tell(digested(1)) == [] and replica.tell(digested(0, generation=1)) == []
    assert votes(replica.tell(digested(0)))


def test_a_vote_that_is_said_again_has_the_same_digest():
    replica = Replica(every_steps=1)
    replica.compute(0)
    replica.tell(digested(0))
    assert votes(replica.tell(ev.LinkChanged(ev.COORDINATOR, True))) == [ev.StateDigest(0, 0, 9, 2.0, SUMS)]


def test_with_a_delay_the_vote_waits_for_the_version_of_its_step():
    """Step 1 is computed with version 0, and its result is here before the update of step 0 is done."""
    replica = Replica(every_steps=1, delay=Delay(1, 0))
    replica.compute(0)
    replica.tell(digested(0))
    assert not votes(replica.compute(1))
    actions = replica.apply(0)
    assert ev.DigestState(1, 0) in actions and not votes(actions)
    assert votes(replica.tell(digested(1))) == [ev.StateDigest(0, 1, 9, 2.0, SUMS)]


def test_a_wrong_state_is_replaced_before_the_replica_votes_again():
    replica = Replica(every_steps=1)
    replica.compute(0)
    replica.tell(digested(0, digest=9))
    repair = ev.Repair(0, 9, donor=4)
    assert replica.hear(repair) == [ev.Repairing(0, 4)]
    assert replica.hear(repair) == []  # it came twice
    assert not votes(replica.tell(ev.LinkChanged(ev.COORDINATOR, True)))
    assert replica.tell(ev.Joined(0)) == [ev.DigestState(0, 0), ev.Holds(ev.StateName(0, 0))]
    assert votes(replica.tell(digested(0, digest=8))) == [ev.StateDigest(0, 0, 8, 2.0, SUMS)]
    assert replica.hear(repair) == []  # it came late


def test_a_donor_makes_its_digest_again_and_keeps_its_state():
    replica = Replica(every_steps=1)
    replica.compute(0)
    replica.tell(digested(0, digest=9))
    assert replica.hear(ev.Repair(0, 9, donor=0)) == [ev.DigestState(0, 0)]
    assert votes(replica.tell(digested(0, digest=10))) == [ev.StateDigest(0, 0, 10, 2.0, SUMS)]


# ------------------------------------------------------------------------------------------------- where it comes from


THREE = ev.View(2, 1, 0, tuple(ev.Member(peer, 0, 1) for peer in (0, 1, 2)), (1,), 0)
N_WORDS, SLICE_WORDS = 10, 4


def transfer(peer):
    machine = StateTransfer(peer, 0, 4 * SLICE_WORDS)
    machine.handle(0.0, ev.Ready({}, N_WORDS))
    machine.handle(0.0, ev.ViewChanged(THREE))
    return machine


def asked(actions):
    return [(action.dst, action.body.key) for action in actions if isinstance(action, ev.Send)]


def test_a_repair_asks_one_donor_alone():
    machine = transfer(2)
    keys = asked(machine.handle(0.0, ev.Repairing(0, 1)))
    actions = []
    while keys:
        donor, key = keys.pop(0)
        assert donor == 1
        actions = machine.handle(1.0, ev.Received(ev.Header("r", 0, 2, donor), ev.State(key)))
        keys += asked(actions)
    assert ev.Install(0, 0) in actions
    assert machine.handle(2.0, ev.Installed(0)) == [DownloadReport(0, 4 * N_WORDS, 2.0, [1]), ev.Joined(0)]


def test_a_donor_gives_its_state_to_any_replica_of_its_stage_but_to_nobody_else():
    donor = transfer(1)
    body = ev.Fetch(ev.StateKey(0, 0, SLICE_WORDS))
    ask = lambda src: donor.handle(0.0, ev.Received(ev.Header("r", 0, 2, src), body))  # noqa: E731
    (send,) = ask(2)
    assert send.dst == 2 and isinstance(send.body, ev.State)
    assert ask(7) == []


def test_a_view_ends_a_repair_so_that_the_coordinator_decides_again():
    """The donor may have gone with it."""
    machine = transfer(2)
    machine.handle(0.0, ev.Repairing(0, 1))
    without = replace(THREE, number=3, members=tuple(ev.Member(peer, 0, 1) for peer in (0, 2)))
    assert machine.handle(1.0, ev.ViewChanged(without)) == [ev.Joined(0)]
    assert machine.handle(2.0, ev.Received(ev.Header("r", 0, 2, 1), ev.State(ev.StateKey(0, 0, SLICE_WORDS)))) == []


def test_who_has_joined_gives_its_state_in_the_same_step():
    """A step that was committed before the peer came is no update of its own that is about to begin."""
    back = transfer(2)
    record = ev.Record(0, (RoundId(RoundKind.GRADIENT, 0, 0, view=1),), 1.0, 1, "apply")
    back.handle(0.0, ev.Evicted(replace(THREE, number=3, members=THREE.members[:2])))
    joined = replace(THREE, number=4, n_committed=1, joining=(2,), records=(record,))
    keys = asked(back.handle(0.0, ev.ViewChanged(joined)))
    while keys:
        donor, key = keys.pop(0)
        keys += asked(back.handle(0.0, ev.Received(ev.Header("r", 0, 4, donor), ev.State(key))))
    back.handle(0.0, ev.Installed(1))
    (send,) = back.handle(0.0, ev.Received(ev.Header("r", 0, 4, 1), ev.Fetch(ev.StateKey(1, 0, SLICE_WORDS))))
    assert isinstance(send.body, ev.State)


@pytest.mark.parametrize("version", [0, 3])
def test_the_state_of_any_committed_version_may_be_asked_for(version):
    """A view may be many steps old."""
    donor = transfer(1)
    donor.handle(0.0, ev.Updated(0, version))
    (send,) = donor.handle(0.0, ev.Received(ev.Header("r", 0, 2, 2), ev.Fetch(ev.StateKey(version, 0, SLICE_WORDS))))
    assert isinstance(send.body, ev.State)
