"""A generation begins at a checkpoint while an update runs at one replica: the others are ahead of it by then, and what
they send is kept."""

from dataclasses import replace

import numpy as np
import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.sizes import Group
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.storage.gradient_slices import GradientSlices, RoundAborted
from jaxdt.sync.allreduce import AllReduce

PEERS = (0, 1)
N_ELEMENTS = 4
VIEW = ev.View(1, 1, 0, tuple([ev.Member(peer, 0, 1) for peer in PEERS]), (1,), 0)
BACK = replace(VIEW, number=2, generation=1, stage_views=(2,), rolled_back=True)


class Wire:
    """The replicas of a stage, each with one microbatch in a step, and their slices as the runtime keeps them. What the
    compute threads are asked to do is a list, and the test says when it is done."""

    def __init__(self):
        group = Group(0, (0,), N_ELEMENTS)
        self.machines = {peer: AllReduce(peer, 0, (group,), len(PEERS), 8) for peer in PEERS}
        self.slices = {peer: GradientSlices(peer) for peer in PEERS}
        self.view = VIEW
        self.asked = {peer: [] for peer in PEERS}
        self.letters, self.prepared = [], {}
        for peer in PEERS:
            self.tell(peer, ev.ViewChanged(VIEW))

    def tell(self, peer, event):
        for action in self.machines[peer].handle(0.0, event):
            self.act(peer, action)

    def act(self, peer, action):
        slices = self.slices[peer]
        match action:
            case ev.Send(ev.COORDINATOR, body):
                self.prepared[peer] = body
            case ev.Post(letters):
                self.letters += [(dst, peer, body, slices.part_to_send(body.key)) for dst, body, _ in letters]
            case ev.Run(Work(kind=WorkKind.GATHER) as work, rounds=rounds):
                for round in rounds:
                    slices.offer(round, np.full(N_ELEMENTS, peer + 1, np.float32))
                self.tell(peer, ev.Ran(work, 0.0, 0.0))
            case ev.Sum(key, members):
                self.tell(peer, ev.Summed(key, *slices.sum(key, members)))
            case ev.Forget(round):
                slices.forget(round)
            case ev.Free(_, rounds):
                slices.free(rounds)
            case _:
                self.asked[peer].append(action)

    def compute(self, peer, step):
        """The backward Work of a step, and what follows from it."""
        self.tell(peer, ev.Accumulated(step, 0, peer, 1, None))
        self.tell(peer, ev.Drained(step))

    def deliver(self):
        while self.letters:
            dst, src, body, tensor = self.letters.pop(0)
            self.slices[dst].put(body.key, tensor)
            self.tell(dst, ev.Received(ev.Header("r", self.view.generation, self.view.number, src), body))

    def prepare(self, step):
        for peer in PEERS:
            self.compute(peer, step)
        self.deliver()

    def commit(self, peer, step, generation=0):
        """The coordinator announces the record of a step."""
        (result,) = self.prepared[peer].results
        record = ev.Record(step, (result.round,), result.sq_norm, result.n_samples, "apply", generation=generation)
        self.tell(peer, ev.Received(ev.Header("r", 0, 1, ev.COORDINATOR), ev.Committed(record)))

    def update(self, peer, step):
        """The update of a step is done; it reads the sum as it begins."""
        self.tell(peer, ev.Ran(Work(0, WorkKind.UPDATE, None, peer, step), 0.0, 0.0))

    def result(self, peer):
        return self.slices[peer].result(self.prepared[peer].results[0].round)


@pytest.mark.parametrize("n_steps", [1, 2])
def test_what_comes_while_an_update_of_the_generation_before_runs_is_kept(n_steps):
    """Also if the update is of a later step than the first of the new generation, which begins at step 0."""
    wire = Wire()
    for step in range(n_steps):
        wire.prepare(step)
        for peer in PEERS:
            wire.commit(peer, step)
        for peer in PEERS if step + 1 < n_steps else PEERS[:1]:
            wire.update(peer, step)
    last, sums = wire.prepared[1].results[0].round, wire.result(1)
    wire.view = BACK
    for peer in PEERS:
        wire.tell(peer, ev.ViewChanged(BACK))
        assert wire.asked[peer][-1] == ev.GoBack(BACK)  # its Restore comes after the update, on the compute thread
    assert np.array_equal(wire.result(1), sums)  # which the update may still read
    wire.tell(0, ev.Restored(0))
    wire.compute(0, 0)
    wire.deliver()
    wire.update(1, n_steps - 1)
    assert not holds(wire.slices[1], last)
    wire.tell(1, ev.Restored(0))
    wire.prepared.clear()
    wire.compute(1, 0)
    wire.deliver()
    assert {result.round.view for body in wire.prepared.values() for result in body.results} == {BACK.number}
    assert all(np.array_equal(wire.result(peer), np.full(N_ELEMENTS, 3, np.float32)) for peer in PEERS)
    wire.commit(1, 0, generation=1)
    assert wire.asked[1][-1].work == Work(0, WorkKind.UPDATE, None, 1, 0)


def holds(slices: GradientSlices, round: RoundId) -> bool:
    """Whether the whole result of a round is here."""
    try:
        return len(slices.result(round)) == N_ELEMENTS
    except RoundAborted:
        return False
