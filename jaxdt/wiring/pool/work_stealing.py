"""Work stealing between the servers of a stage: one whose clients have little left to do takes tasks of another one.

The even cut says who owns a microbatch, but servers differ in speed, in the number of their workers, and in how many of
these they lose. So towards the end of a step

    few of my tasks are left -> StealRequest to every other server of the stage, with what my clients have yet to do
    StealRequest             -> once mine would end later than the other's: StealOffer of some of them, and the
                                tensors that they read (share_of in task_times.py)
    StealOffer               -> StealReply; the tasks are mine once their tensors are here (take in task_table.py)

Only tasks that no client has, or may have done, are offered. Once the other server has taken a task it has the whole
microbatch: its clients compute it, its accumulator counts it, and it sends the results to the neighbour stages. These
know of no theft: a gradient still comes to the owner by index, who passes it on. Nobody waits for a thief: a server
whose part of the step ends before an offer comes does not take it.

A server takes at most as many microbatches as it owns, which bounds its memory, and never offers what it has taken. A
view in mid-step voids all this with the rest of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxdt.protocol.events import (
    BULK,
    Action,
    Boundary,
    Discard,
    Event,
    Key,
    Send,
    StealOffer,
    StealReply,
    StealRequest,
)
from jaxdt.protocol.reports import TasksStolenReport
from jaxdt.spec.work import BACKWARD, FORWARD
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.pool.task_table import TaskTable
from jaxdt.wiring.pool.task_times import share_of

Loads = tuple[tuple[float, float], ...]  # of clients: seconds of work yet to do, and seconds of a microbatch
StolenTask = tuple[str, int, bool]  # kind of Work, microbatch, and whether its input gradient was passed on


@dataclass
class Thief:
    """Another server that has asked: when its clients will be done (on this server's clock), the seconds of a
    microbatch of each, and how many microbatches it may still take."""

    clients: Loads
    n_max: int


@dataclass
class StepSteals:
    """What has changed hands in one step, at one server.

    As the owner: `thieves` that have asked; `offered`: the tasks for which a thief's answer is awaited; `taken_by`: who
    does a microbatch of this server's cut, from the offer on.
    As the thief: `has_asked`, since it took something last; `stolen`: microbatch -> its task when it was taken;
    `awaited`: those whose tensors are not all here; `arrived`: tensors of microbatches that are not in this server's
    table; `refused`: microbatches that were offered in vain.
    """

    thieves: dict[int, Thief] = field(default_factory=dict)
    offered: dict[int, StealOffer] = field(default_factory=dict)
    taken_by: dict[int, int] = field(default_factory=dict)
    has_asked: bool = False
    stolen: dict[int, StolenTask] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    arrived: set[Key] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether this server has yet to hear what becomes of tasks, or to receive what they read."""
        return bool(self.offered or self.awaited)

    def lacks_output(self, m: int) -> bool:
        """Whether the output of the microbatch was computed for its owner, so that a worker of this server does not
        send it."""
        return m in self.stolen and self.stolen[m][0] == BACKWARD


class WorkStealing:
    """The steals of one server."""

    def __init__(self, shape: StepShape):
        self._shape = shape
        self._stage = shape.stage
        self._reads_output_gradient = not shape.is_last_stage

    # --------------------------------------------------------------------------------------------------- as the owner

    def on_request(self, now_s: float, steals: StepSteals, src: int, request: StealRequest) -> None:
        """Another server says what its clients have yet to do."""
        clients = tuple((now_s + busy_s, microbatch_s) for busy_s, microbatch_s in request.clients)
        steals.thieves[src] = Thief(clients, request.n_max)

    def offer(
        self, now_s: float, number: int, table: TaskTable, steals: StepSteals, own: Loads
    ) -> list[Action | Event]:
        """Offer tasks of step `number` to the servers that have asked, if their clients would be done sooner. `own`:
        the loads of this server's clients."""
        actions: list[Action | Event] = []
        for src, thief in sorted(steals.thieves.items()):
            spare = [(kind, m) for kind, m in table.spare if m not in steals.stolen]
            if not spare or src in steals.offered:
                continue
            clients = [(max(0.0, ends_s - now_s), microbatch_s) for ends_s, microbatch_s in thief.clients]
            n_offered = min(share_of(clients, own, table.n_left), len(spare), thief.n_max)
            if n_offered:
                actions += self._offer(number, table, steals, src, spare[:n_offered])
        return actions

    def _offer(
        self, number: int, table: TaskTable, steals: StepSteals, dst: int, tasks: Sequence[tuple[str, int]]
    ) -> list[Action | Event]:
        offer = StealOffer(number, tuple((kind, m, table.give(kind, m)) for kind, m in tasks))
        steals.offered[dst] = offer
        del steals.thieves[dst]  # until it says again what it has to do
        actions: list[Action | Event] = [Send(dst, offer)]
        for kind, m in tasks:
            steals.taken_by[m] = dst
            actions += [self._send(dst, key) for key in self._inputs(number, kind, m)]
        return actions

    def on_reply(self, table: TaskTable, steals: StepSteals, src: int, reply: StealReply) -> None:
        """What was not taken is done here."""
        offer = steals.offered.pop(src, None)
        if offer is None or reply.is_taken:
            return
        for kind, m, is_redo in offer.tasks:
            del steals.taken_by[m]
            table.take(kind, m, is_redo)

    # --------------------------------------------------------------------------------------------------- as the thief

    def ask(self, request: StealRequest, steals: StepSteals, others: Sequence[int]) -> list[Action | Event]:
        """Tell the other servers what this one's clients have yet to do of a step, and how much more they could."""
        steals.has_asked = True
        return [Send(peer, request) for peer in others] if request.n_max > 0 else []

    def on_offer(
        self, table: TaskTable, steals: StepSteals, src: int, offer: StealOffer, n_max: int
    ) -> list[Action | Event]:
        """Take what another server offers, unless it is more than `n_max` microbatches: others may have offered some,
        too, or this server's part of the step may be over."""
        numbers = {m for _, m, _ in offer.tasks}
        if len(numbers) > n_max:
            steals.refused |= numbers
            unread = {key for key in steals.arrived if key.microbatch in numbers}
            steals.arrived -= unread
            return [Send(src, StealReply(offer.step, False)), *(Discard(key) for key in sorted(unread))]
        steals.refused -= numbers
        steals.has_asked = False
        for task in offer.tasks:
            m = task[1]
            steals.stolen[m] = task
            steals.awaited.add(m)
            self._take_if_whole(offer.step, table, steals, m)
        report = TasksStolenReport(offer.step, self._stage, src, len(offer.tasks))
        return [Send(src, StealReply(offer.step, True)), report]

    def _take_if_whole(self, number: int, table: TaskTable, steals: StepSteals, m: int) -> None:
        """A task begins to be this server's when all that it reads is here."""
        kind, _, is_redo = steals.stolen[m]
        inputs = set(self._inputs(number, kind, m))
        if inputs <= steals.arrived:
            steals.arrived -= inputs
            steals.awaited.remove(m)
            table.take(kind, m, is_redo)

    # ------------------------------------------------------------------------------------------------------ as either

    def arrived(self, table: TaskTable, steals: StepSteals, key: Key) -> list[Action | Event]:
        """A tensor of a microbatch is here that is not in this server's table: of one that another server does, to whom
        it is passed on, or of one that this server is offered."""
        m = key.microbatch
        if m in steals.taken_by:
            return [self._send(steals.taken_by[m], key)]
        if m in steals.refused:
            return [Discard(key)]
        steals.arrived.add(key)
        if m in steals.awaited:
            self._take_if_whole(key.step, table, steals, m)
        return []

    def _inputs(self, number: int, kind: str, m: int) -> list[Key]:
        """The tensors that a task reads, and that come over a link. A backward contains a forward, whose result the
        other server lacks. The first stage reads tokens."""
        keys = [] if self._stage == 0 else [Key("act", number, self._stage, m)]
        if kind != FORWARD and self._reads_output_gradient:
            keys.append(Key("grad", number, self._stage + 1, m))
        return keys

    def _send(self, dst: int, key: Key) -> Send:
        activation_bytes, gradient_bytes = self._shape.received_bytes
        return Send(dst, Boundary(key), activation_bytes if key.kind == "act" else gradient_bytes, BULK)
