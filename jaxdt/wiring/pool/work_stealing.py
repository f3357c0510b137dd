"""Work stealing between the servers of a stage: one whose clients have little to do takes tasks of another one.

The even cut says who owns a microbatch, but servers differ in speed, in the number of their workers, and in how many of
these they lose; and so do the servers of the stage before, from whom inputs come. So

    each client has at most one more task -> StealRequest to every other server of the stage, with what the clients have
                    yet to do; again after the time of a microbatch, then of two, of three and so on, as long as that is
                    so
    StealRequest -> StealOffer of some tasks, if those of this server would be done later than the other's (share_of in
                    task_times.py), with what its clients would still have to do
    StealOffer   -> StealReply: how many of them to take, by the same rule, since others may have offered some, too
    StealReply   -> the tensors that those read; then they are the other's (take in task_table.py). The rest stays

Only tasks that no client has, or may have done, are offered. A server that takes a task takes the whole microbatch: its
clients compute it, its accumulator counts it, and it sends the results to the neighbour stages. These know of no theft:
a gradient still comes to the owner by index, who passes it on. No server waits for a thief: one whose part of
the step ends before an offer comes takes nothing.

A server takes at most as many microbatches as it owns, which bounds its memory, and never offers what it has taken. A
view in mid-step voids all this with the rest of the step.
"""

from dataclasses import dataclass, field

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import TasksStolenReport
from jaxdt.run.work import WorkKind
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.pool.task_table import TaskTable
from jaxdt.wiring.pool.task_times import Loads, share_of

StolenTask = tuple[WorkKind, int, bool]  # kind of Work, microbatch, and whether its input gradient was passed on


@dataclass
class StepSteals:
    """The steals of one step, at one server, which has the `table` of its tasks. `others`: the other servers of its
    stage.

    As the owner: `offered`: the tasks for which another server's answer is awaited; `taken_by`: who does a microbatch
    of this server's cut.
    As the thief: `asks_at_s`: when it may ask again, `pause_s` after the last time; `stolen`: microbatch -> its task
    when it was taken; `awaited`: those whose tensors are not all here, and `arrived`: those of their tensors that are.
    """

    shape: StepShape
    number: int
    table: TaskTable
    others: tuple[int, ...] = ()
    offered: dict[int, tuple[StolenTask, ...]] = field(default_factory=dict)
    taken_by: dict[int, int] = field(default_factory=dict)
    asks_at_s: float = 0.0
    pause_s: float = 0.0
    stolen: dict[int, StolenTask] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    arrived: set[ev.Key] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether this server has yet to hear what becomes of tasks, or to receive what they read."""
        return bool(self.offered or self.awaited)

    def thief_of(self, m: int) -> int | None:
        """The server that does a microbatch of this one's cut, if another one does. A gradient that comes before the
        answer to an offer says that the task was taken, as the forward was done."""
        offered = (peer for peer, tasks in self.offered.items() if any(task[1] == m for task in tasks))
        return self.taken_by.get(m, next(offered, None))

    def lacks_output(self, m: int) -> bool:
        """Whether the output of the microbatch was computed for its owner, so that a worker of this server does not
        send it."""
        return m in self.stolen and self.stolen[m][0] == WorkKind.BACKWARD

    # --------------------------------------------------------------------------------------------------- as the owner

    def tasks_for(self, src: int, request: ev.StealRequest, own: Loads) -> tuple[StolenTask, ...]:
        """The tasks that another server should be offered, which this server's clients get no more. `own`: the loads of
        this server's clients."""
        spare = [(kind, m) for kind, m in self.table.spare if m not in self.stolen]
        if src in self.offered or not spare:
            return ()
        # A stolen task has to travel, so a thief's clients count as busy for a microbatch longer.
        clients = tuple((busy_s + microbatch_s, microbatch_s) for busy_s, microbatch_s in request.clients)
        n_offered = min(share_of(clients, own, self.table.n_left), len(spare), request.n_max)
        tasks = tuple((kind, m, self.table.give(kind, m)) for kind, m in spare[:n_offered])
        if tasks:
            self.offered[src] = tasks
        return tasks

    def on_reply(self, src: int, reply: ev.StealReply) -> ev.Actions:
        """The first tasks of an offer are the other server's, who gets their tensors; the rest is done here."""
        tasks = self.offered.pop(src, ())
        actions: ev.Actions = []
        for kind, m, _ in tasks[: reply.n_taken]:
            self.taken_by[m] = src
            actions += [self._send(src, key) for key in self._inputs(kind, m)]
        for kind, m, is_redo in tasks[reply.n_taken :]:
            self.table.take(kind, m, is_redo)
        return actions

    # --------------------------------------------------------------------------------------------------- as the thief

    def on_offer(self, src: int, offer: ev.StealOffer, n_taken: int) -> ev.Actions:
        """Take so many of the tasks that another server offers."""
        reply = ev.Send(src, ev.StealReply(offer.step, n_taken))
        if not n_taken:
            return [reply]
        self.pause_s = 0.0
        for task in offer.tasks[:n_taken]:
            m = task[1]
            self.stolen[m] = task
            self.awaited.add(m)
            self._take_if_whole(m)
        return [reply, TasksStolenReport(offer.step, self.shape.stage, src, n_taken)]

    def _take_if_whole(self, m: int) -> None:
        """A task begins to be this server's when all that it reads is here."""
        kind, _, is_redo = self.stolen[m]
        inputs = set(self._inputs(kind, m))
        if inputs <= self.arrived:
            self.arrived -= inputs
            self.awaited.remove(m)
            self.table.take(kind, m, is_redo)

    # ------------------------------------------------------------------------------------------------------ as either

    def on_arrived(self, key: ev.Key) -> ev.Actions:
        """A tensor of a microbatch is here that is not in this server's table: of one that another server does, to whom
        it is passed on, or of one that this server takes."""
        m = key.microbatch
        thief = self.thief_of(m)
        if thief is not None:
            return [self._send(thief, key)]
        if m not in self.awaited:
            return [ev.Discard(key)]
        self.arrived.add(key)
        self._take_if_whole(m)
        return []

    def _inputs(self, kind: WorkKind, m: int) -> list[ev.Key]:
        """The tensors that a task reads, and that come over a link. A backward contains a forward, whose result the
        other server lacks. The first stage reads tokens."""
        stage = self.shape.stage
        keys = [] if stage == 0 else [ev.Key("act", self.number, stage, m)]
        if kind != WorkKind.FORWARD and not self.shape.is_last_stage:
            keys.append(ev.Key("grad", self.number, stage + 1, m))
        return keys

    def _send(self, dst: int, key: ev.Key) -> ev.Send:
        activation_bytes, gradient_bytes = self.shape.received_bytes
        return ev.Send(dst, ev.Boundary(key), activation_bytes if key.kind == "act" else gradient_bytes, ev.BULK)
