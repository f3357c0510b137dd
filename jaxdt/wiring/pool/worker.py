"""A pool worker's wiring: it does what its server leases to it, and hands in what it has accumulated when it is asked.

It takes a few leases at a time, so that the next one is here when one is done. Among the leases whose inputs have
arrived, those of the oldest step go first. Within a step a backward follows a forward and a forward a backward, as in
1F1B, so that neither this stage's tasks nor the next one's come in bunches; then the oldest goes first. With each
result the worker says how long it has computed, and how long it has held the task. It forgets requests of an earlier
admission, and of a step that is over. Without delayed updates one step is under way at a time; with them the worker
fetches the next version while it computes, and keeps the one before.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WorkerBeginsReport, WorkerProgressReport
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.delay import Delay
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import StepShape
from jaxdt.wiring.compute_slot import ComputeSlot
from jaxdt.wiring.pool.task_times import LEASES_MAX

Task = tuple[int, str, int]  # step, kind of Work and microbatch


@dataclass(frozen=True)
class _RunningTask:
    """`ready_s`: when all that it needs was there; `begun_s`: when its computation began."""

    lease: ev.TaskLease
    ready_s: float
    begun_s: float


class PoolWorker:
    """See the module text."""

    READS = frozenset({ev.Admitted, ev.Updated, ev.TaskLease, ev.ContributionWanted, ev.Boundary, ev.Ran})

    def __init__(self, shape: StepShape, server: int, delay: Delay):
        self._shape = shape
        self._peer = shape.peer
        self._stage = shape.stage
        self._is_first, self._is_last = shape.stage == 0, shape.is_last_stage
        self._server = server
        self._delay = delay
        self._slot = ComputeSlot()
        self._admitted: ev.Admitted | None = None
        self._gathering: tuple[RoundId, ...] = ()  # the contribution that is being laid out
        self._has_begun = False
        self._first_version = self._version = -1  # since this worker came, or the run went back
        self._n_handed_in = 0  # microbatches, since then
        self._forget()

    def _forget(self) -> None:
        self._leases: dict[Task, ev.TaskLease] = {}  # that wait
        self._known_leases: dict[int, set[int]] = {}  # step -> leases of which this worker knows
        self._arrived_keys: set[ev.Key] = set()  # tensors that are here
        self._ready_s: dict[int, float] = {}  # lease -> since when all that it needs is here
        self._running: _RunningTask | None = None
        self._last_kind = WorkKind.FORWARD  # of the task that was begun last
        self._counted: dict[int, dict[int, int]] = {}  # step -> microbatch -> lease that the accumulator got it under
        self._requested_contributions: list[tuple[RoundId, ...]] = []  # contributions that were asked for
        self._last_round = 0

    def _forget_steps_before(self, version: int) -> None:
        self._leases = {task: lease for task, lease in self._leases.items() if lease.step >= version}
        self._known_leases = {step: leases for step, leases in self._known_leases.items() if step >= version}
        self._arrived_keys = {key for key in self._arrived_keys if key.step >= version}
        self._counted = {step: counted for step, counted in self._counted.items() if step >= version}
        self._requested_contributions = [
            rounds for rounds in self._requested_contributions if rounds[0].number >= version
        ]
        waiting = {lease.number for lease in self._leases.values()}
        self._ready_s = {number: at_s for number, at_s in self._ready_s.items() if number in waiting}
        if self._running and self._running.lease.step < version:
            self._running = None

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Ran(work, values=values):
                self._slot.free()
                return self._on_ran(now_s, work, values) + self._next(now_s)
            case ev.Received(_, ev.Boundary(key)) if self._is_under_way(key.step):
                self._arrived_keys.add(key)
                return self._next(now_s)
            case ev.Received(_, ev.Boundary(key)):
                return [ev.Discard(key)]  # of a step that is over, or for the process before this one
            case ev.Received(_, ev.TaskLease() as lease) if self._is_new(lease):
                self._known_leases.setdefault(lease.step, set()).add(lease.number)
                task = (lease.step, lease.kind, lease.microbatch)
                if task not in self._leases or self._leases[task].number < lease.number:
                    self._leases[task] = lease  # the one before, if there was one, has run out
                return self._next(now_s)
            case ev.Received(_, ev.ContributionWanted(admission, rounds)) if self._is_admitted(admission):
                if rounds[0].attempt > self._last_round and self._is_under_way(rounds[0].number):
                    self._last_round = rounds[0].attempt
                    self._requested_contributions.append(rounds)
                    return self._next(now_s)
            case ev.Admitted(admission, _, version):
                if not self._is_admitted(admission):
                    self._forget()
                self._admitted = event
                self._forget_steps_before(version)
            case ev.Updated(_, version) if self._admitted:
                wants = ev.Send(self._server, ev.WantsTasks(self._admitted.admission, version, LEASES_MAX))
                return [wants, self._progress(version)]
        return []

    @property
    def queue(self) -> tuple[int, bool]:
        return len(self._leases), self._slot.is_busy

    def cancel_run(self) -> None:
        self._slot.free()

    def _progress(self, version: int) -> ev.Action:
        if self._first_version < 0 or version < self._version:
            self._first_version, self._n_handed_in = version, 0
        self._version = version
        n_of_stage = self._shape.n_microbatches * (version - self._first_version)
        return WorkerProgressReport(version, self._stage, self._n_handed_in, n_of_stage)

    def _is_admitted(self, admission: int) -> bool:
        return self._admitted is not None and self._admitted.admission == admission

    def _is_under_way(self, step: int) -> bool:
        return self._admitted is not None and step in self._delay.open(self._admitted.version)

    def _is_new(self, lease: ev.TaskLease) -> bool:
        is_of_now = self._is_admitted(lease.admission) and self._is_under_way(lease.step)
        return is_of_now and lease.number not in self._known_leases.get(lease.step, ())

    def _next(self, now_s: float) -> ev.Actions:
        """Begin a Work, if there is one whose inputs are here."""
        ready = [lease for lease in self._leases.values() if self._needs(lease) <= self._arrived_keys]
        for lease in ready:
            self._ready_s.setdefault(lease.number, now_s)
        if self._slot.is_busy:
            return []
        if self._requested_contributions:
            self._gathering = self._requested_contributions[0]
            step = self._gathering[0].number
            return [self._slot.start(Work(self._stage, WorkKind.GATHER, None, self._peer, step), self._gathering)]
        if not ready:
            return []
        lease = min(ready, key=lambda lease: (lease.step, lease.kind == self._last_kind, lease.number))
        del self._leases[lease.step, lease.kind, lease.microbatch]
        self._running = _RunningTask(lease, self._ready_s.pop(lease.number), now_s)
        self._last_kind = lease.kind
        begins = [] if self._has_begun else [WorkerBeginsReport(self._server, self._stage)]
        self._has_begun = True
        return [*begins, self._start(WorkKind.FORWARD if lease.with_forward else lease.kind, lease)]

    def _start(self, kind: WorkKind, lease: ev.TaskLease) -> ev.Action:
        """A Work takes its inputs away."""
        self._arrived_keys -= self._inputs(kind, lease)
        return self._slot.start(Work(self._stage, kind, lease.microbatch, self._peer, lease.step))

    def _needs(self, lease: ev.TaskLease) -> set[ev.Key]:
        """The tensors that must have come before the task can begin."""
        needs = self._inputs(lease.kind, lease)
        return needs | self._inputs(WorkKind.FORWARD, lease) if lease.with_forward else needs

    def _inputs(self, kind: WorkKind, lease: ev.TaskLease) -> set[ev.Key]:
        """The tensors that a Work reads, and that come over a link. The first stage reads tokens."""
        if kind == WorkKind.BACKWARD and not self._is_last:
            return {ev.Key("grad", lease.step, self._stage + 1, lease.microbatch)}
        return set() if self._is_first else {ev.Key("act", lease.step, self._stage, lease.microbatch)}

    def _on_ran(self, now_s: float, work: Work, values: dict[str, float]) -> ev.Actions:
        """A Work is done. It does not count if it began under an earlier admission, or of a step that is over."""
        if work.kind == WorkKind.GATHER:
            return self._on_gathered()
        running = self._running
        if running is None or (work.step, work.microbatch) != (running.lease.step, running.lease.microbatch):
            return []
        lease = running.lease
        output = ev.Key("act", lease.step, self._stage + 1, lease.microbatch)
        if work.kind != lease.kind:  # its output was passed on the first time
            return [ev.Discard(output), self._start(lease.kind, lease)]
        self._running = None
        n_samples, loss_sum = int(values.get("n_samples", 0)), values.get("loss_sum")
        activation_bytes, gradient_bytes = self._shape.sent_bytes[0]
        seconds = (now_s - running.begun_s, now_s - running.ready_s)
        done = (lease.admission, lease.number, n_samples, loss_sum, *seconds)
        if work.kind == WorkKind.FORWARD:
            return [ev.Send(self._server, ev.TaskOutput(output, *done), activation_bytes)]
        self._counted.setdefault(lease.step, {})[lease.microbatch] = lease.number
        gradient = ev.Key("grad", lease.step, self._stage, lease.microbatch)
        if not self._is_first and not lease.is_redo:
            return [ev.Send(self._server, ev.TaskOutput(gradient, *done), gradient_bytes)]
        told = ev.TaskDone(lease.admission, lease.step, lease.number, n_samples, loss_sum, *seconds)
        return [ev.Discard(gradient), ev.Send(self._server, told)]

    def _on_gathered(self) -> ev.Actions:
        """The accumulator of a step is laid out, and starts again; unless its request was dropped meanwhile."""
        rounds, self._gathering = self._gathering, ()
        if rounds not in self._requested_contributions:
            return [ev.Forget(round) for round in rounds]
        self._requested_contributions.remove(rounds)
        counted = self._counted.pop(rounds[0].number, {})
        self._n_handed_in += len(counted)
        return [ev.ContributionGathered(rounds, tuple(sorted(counted.items())))]
