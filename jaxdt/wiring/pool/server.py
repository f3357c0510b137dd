"""A server's wiring: it owns a cut of its stage's microbatches, has its workers compute them, and computes itself.

The servers of a stage are members of the run. Each owns the microbatches of its part of an even cut, by index
(even_transfer.py): it receives their inputs and the gradients of their outputs, grants their tasks, and passes results
on to the owner at the neighbour stage. So no server asks another one for anything within a step.

    input of m arrives   -> TaskLease and the input to a worker that wants tasks, or this server's own forward
    TaskOutput(forward)  -> if the lease is a present one: the output goes to the owner at the next stage
    gradient of m        -> TaskLease and the gradient to the worker that did the forward, or this server's own backward
    TaskOutput(backward) -> the input's gradient goes to the owner at the stage before
    all are done         -> ContributionWanted to every worker that has done something; what it sends is added here (C)
    all are added        -> Drained: from here on the servers agree as replicas do

A worker that vanishes, is late with a backward, or contributes something else than it has done, is void: its leases and
all that it has not contributed are done again here or at others (task_table.py). That is no business of anybody else:
there is no view, nothing is written to a disk, and nobody waits who would not wait anyway. A server without workers
computes everything itself, in the order of 1F1B.

A view in mid-step voids what the workers have not contributed, and the rest of the step is done by the servers alone,
by a RoutedWiring, as with the other wirings. PoolServer does a step from its start or not at all.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.protocol.events import (
    BULK,
    Accumulated,
    Action,
    Boundary,
    ContributionBegins,
    ContributionReceived,
    ContributionVoid,
    ContributionWanted,
    Drained,
    Ended,
    Enlist,
    Enlisted,
    Evaluated,
    Event,
    Evicted,
    Fetch,
    Forget,
    Key,
    LinkChanged,
    Message,
    Ran,
    Received,
    Round,
    Send,
    Shard,
    StepBlocked,
    StoreTensor,
    TaskDone,
    TaskLease,
    TaskOutput,
    Updated,
    View,
    ViewChanged,
    WakeAt,
    WantsTasks,
    Woke,
    WorkOverdue,
)
from jaxdt.protocol.reports import WorkerJoinedReport, WorkerLostReport
from jaxdt.spec.config import RunConfig
from jaxdt.spec.peer_setup import PeerSetup
from jaxdt.spec.plan import Plan
from jaxdt.spec.sizes import contribution_name, sync_groups
from jaxdt.spec.work import BACKWARD, CONTRIBUTE, EVALUATE, FORWARD, Work
from jaxdt.wiring.base import COMPUTING, PeerLoad, StepShape, WiringEntry, WorkerRole, step_shape
from jaxdt.wiring.compute_slot import ComputeSlot
from jaxdt.wiring.measured_routes import MeasuredRoutes
from jaxdt.wiring.pool.even_transfer import part, part_of, server_of
from jaxdt.wiring.pool.lease_times import LeaseTimes
from jaxdt.wiring.pool.task_table import Lease, TaskTable, Verdict
from jaxdt.wiring.pool.worker import PoolWorker
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring
from jaxdt.wiring.service_time import ServiceTime

NEVER = math.inf
CONTRIBUTION = "contribution"  # in LeaseTimes
REFUSED_MAX = 3  # contributions of a worker that were not finite, before it is put out
ADMISSIONS = 1_000_000  # of workers, for each admission of their server
BAD_INPUT, PUT_OUT = 2, 3  # exit codes


@dataclass
class _Worker:
    """A worker that is let in. `version`: of the parameters that it holds; `n_tasks`: leases that it wants at a time.
    `rounds`: of the contribution that it was asked for, until `until_s`."""

    process: int
    admission: int
    version: int = -1
    n_tasks: int = 0
    rounds: tuple[Round, ...] = ()
    asked_s: float = 0.0
    until_s: float = NEVER


@dataclass(frozen=True)
class PoolPlace:
    """A server's place. `depth`: forwards that wait for their backward at one client, as under 1F1B; `groups`: the
    names of the stage's sync groups; `fingerprint`: of the run, which a worker must know."""

    shape: StepShape
    depth: int
    groups: Sequence[str]
    fingerprint: str


class PoolServer:
    """One server's side; see the module text. `routed`, which shares `recovery` and `slot` with this one, does the
    steps in which a view comes."""

    READS = RoutedWiring.READS | {Enlist, WantsTasks, TaskDone, TaskOutput, ContributionReceived, LinkChanged, Woke}

    def __init__(
        self, place: PoolPlace, routed: RoutedWiring, recovery: Recovery, slot: ComputeSlot, times: LeaseTimes
    ):
        shape = place.shape
        self._place = place
        self._shape = shape
        self._peer = shape.peer
        self._stage = shape.stage
        self._is_first, self._is_last = shape.stage == 0, shape.is_last_stage
        self._routed = routed
        self._recovery = recovery
        self._slot = slot
        self._times = times
        self._view: View | None = None
        self._strict_from: float = NEVER  # the first step of the view that is done here
        self._version = -1  # of the parameters that are here
        self._step = -1
        self._table: TaskTable | None = None  # of the step under way, if it is done here
        self._next_lease = 1
        self._workers: dict[int, _Worker] = {}
        self._waiting: dict[int, int] = {}  # worker -> process, of those who have asked too early
        self._n_admissions = 0
        self._n_refused: Counter[int] = Counter()
        self._n_rounds = 0
        self._early: list[Key] = []  # of steps that have not begun here
        self._own: Lease | None = None  # the own task that runs
        self._losses: dict[int, tuple[int, float | None]] = {}  # microbatch -> samples and loss of its last backward
        self._held_out: deque[int] = deque()  # whose input is here
        self._n_held_out = 0  # that are still to be measured here
        self._adding: deque[tuple[tuple[Round, ...], tuple[tuple[int, int], ...]]] = deque()  # contributions, in order
        self._is_adding = False  # the first of them, now
        self._is_drained = False
        self._wakes_s = NEVER

    # -------------------------------------------------------------------------------------------------------- events

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case Ran(work) if work.kind == CONTRIBUTE:
                self._slot.free()
                return self._contributed(now_s) + self._go_on(now_s)
            case Ran(work, values=values) if self._table and work.step == self._step and work.kind in COMPUTING:
                self._slot.free()
                return self._computed(now_s, work, values) + self._go_on(now_s)
            case Received(header, Enlist(process, fingerprint)):
                return self._enlist(header.src, process, fingerprint)
            case Received(header, body) if self._view and self._is_for_pool(body):
                return self._received(now_s, event, header.src, body) + self._go_on(now_s)
            case Updated(_, version) if self._view and version >= self._strict_from:
                return self._begin(now_s, version)
            case Updated(_, version):
                self._version = version
                return [*self._tell_workers(), *self._routed.handle(now_s, event)]
            case ContributionReceived():
                return self._on_contribution(now_s, event) + self._go_on(now_s)
            case Woke("pool"):
                self._wakes_s = NEVER
                return self._expire(now_s) + self._go_on(now_s)
            case LinkChanged(peer, False, reason) if peer in self._workers:
                return self._lose(peer, reason, readmit=False) + self._go_on(now_s)
            case ViewChanged(view):
                return self._adopt(now_s, view)
            case Evicted():
                actions = self._stop(forgets_workers=True)
                self._view = None
                return [*actions, *self._routed.handle(now_s, event)]
            case WorkOverdue() if self._table:
                return [StepBlocked()]  # nobody else does what this server has begun
            case Woke() | LinkChanged():
                return []
        return self._routed.handle(now_s, event)

    @property
    def queue(self) -> tuple[int, bool]:
        n_waiting, is_busy = self._routed.queue
        return n_waiting + (self._table.n_queued if self._table else 0), is_busy

    def cancel_run(self) -> None:
        self._slot.free()

    def _is_for_pool(self, body: Message) -> bool:
        if isinstance(body, Boundary):
            return body.key.step >= self._strict_from
        return isinstance(body, WantsTasks | TaskDone | TaskOutput)

    def _received(self, now_s: float, event: Received, src: int, body: Message) -> list[Action | Event]:
        match body:
            case Boundary(key):
                self._arrived(key)
            case WantsTasks(admission, version, n_tasks) if worker := self._admitted(src, admission):
                worker.version, worker.n_tasks = version, n_tasks
            case TaskDone(admission, step) if self._admitted(src, admission) and step == self._step:
                return self._on_result(now_s, src, body, None)
            case TaskOutput(key, admission) if self._admitted(src, admission) and key.step == self._step:
                return self._on_result(now_s, src, body, event.tensor)
        return []

    # --------------------------------------------------------------------------------------------------------- steps

    def _adopt(self, now_s: float, view: View) -> list[Action | Event]:
        """All steps of the first view are done here, and of later views those that begin after the one under way. After
        a rollback the workers come again, when the version is known."""
        actions = self._stop(view.rolled_back)
        self._view = view
        self._strict_from = view.n_committed + (view.number > 1)
        if view.n_committed < self._strict_from:
            return [*actions, *self._routed.handle(now_s, ViewChanged(view))]
        self._routed.void_routes(view)
        return actions

    def _stop(self, forgets_workers: bool) -> list[Action | Event]:
        """The rest of the step is not done here, and what workers have not contributed is void. A contribution that is
        being added stays, unless the state does not."""
        actions: list[Action | Event] = []
        if self._table or forgets_workers:
            for peer in list(self._workers):
                actions += self._lose(peer, "a new view", readmit=not forgets_workers)
        n_kept = 1 if self._is_adding and not forgets_workers else 0
        while len(self._adding) > n_kept:
            rounds, _ = self._adding.pop()
            actions += _forget(rounds)
        if forgets_workers:
            self._version = -1
        self._close_table()
        self._strict_from = NEVER
        self._early.clear()
        self._held_out.clear()
        return actions

    def _close_table(self) -> None:
        if self._table:
            self._next_lease = self._table.next_lease
        self._table = self._own = None

    def _begin(self, now_s: float, step: int) -> list[Action | Event]:
        self._version = step
        self._close_table()
        if step < self._shape.n_steps:
            self._open(step)
        return [*self._tell_workers(), *self._go_on(now_s)]

    def _open(self, step: int) -> None:
        """A step begins, and nothing is left of the one before."""
        assert self._view is not None
        self._step = step
        self._routed.enter_without_tasks(step)
        servers = self._servers(self._stage, step)
        numbers = part(self._shape.n_microbatches, len(servers), servers.index(self._peer)) if servers else range(0)
        self._table = TaskTable(numbers, self._peer, self._is_last, self._next_lease)
        self._losses.clear()
        self._is_drained = False
        held_out = range(self._shape.n_held_out(step))
        own_held_out = [m for m in held_out if self._owner(self._stage, EVALUATE, m) == self._peer]
        self._n_held_out = len(own_held_out)
        self._held_out = deque(own_held_out if self._is_first else ())
        for m in numbers if self._is_first else ():
            self._table.input_arrived(m)
        early, self._early = self._early, []
        for key in early:
            self._arrived(key)

    def _servers(self, stage: int, step: int) -> tuple[int, ...]:
        assert self._view is not None
        return self._view.working(stage, step)

    def _owner(self, stage: int, kind: str, m: int) -> int:
        """The server of a stage to whom a microbatch, or of kind EVALUATE a held-out one, belongs."""
        servers = self._servers(stage, self._step)
        if kind == EVALUATE:
            return servers[m % len(servers)]
        return servers[part_of(self._shape.n_microbatches, len(servers), m)]

    def _arrived(self, key: Key) -> None:
        """A boundary tensor is here."""
        if key.step > self._step or not self._table:
            self._early.append(key)
        elif key.step < self._step:
            return
        elif key.kind == "eval":
            self._held_out.append(key.microbatch)
        elif key.kind == "act":
            self._table.input_arrived(key.microbatch)
        else:
            self._table.gradient_arrived(key.microbatch)

    # -------------------------------------------------------------------------------------------------- who does what

    def _go_on(self, now_s: float) -> list[Action | Event]:
        """Do whatever can be done now."""
        if not self._table:
            return []
        actions = self._begin_own(now_s) + self._grant(now_s, self._table) + self._end_step(now_s, self._table)
        until_s = min([self._table.next_deadline_s, *(worker.until_s for worker in self._workers.values())])
        if until_s < self._wakes_s:
            self._wakes_s = until_s
            actions.append(WakeAt(until_s, "pool"))
        return actions

    def _begin_own(self, now_s: float) -> list[Action | Event]:
        """The next Work of this server: what workers have sent, then held-out microbatches, then a task."""
        table, step = self._table, self._step
        if self._slot.is_busy or not table:
            return []
        if self._adding:
            rounds, _ = self._adding[0]
            self._is_adding = True
            return [self._slot.start(Work(self._stage, CONTRIBUTE, None, self._peer, step), rounds)]
        if self._held_out:
            return [self._slot.start(Work(self._stage, EVALUATE, self._held_out.popleft(), self._peer, step))]
        task = table.next_task(self._peer, self._place.depth)
        if task is None:
            return []
        self._own = table.lease(*task, self._peer, now_s)
        kind = FORWARD if self._own.with_forward else self._own.kind
        return [self._slot.start(Work(self._stage, kind, self._own.microbatch, self._peer, step))]

    def _grant(self, now_s: float, table: TaskTable) -> list[Action | Event]:
        """Lease what workers can do now. A backward goes at once to the worker that did the forward; other tasks to
        the workers with the fewest, as long as they want more."""
        ready = [peer for peer, worker in self._workers.items() if worker.version == self._step and not worker.rounds]
        actions: list[Action | Event] = []
        for peer in sorted(ready):
            while (m := table.own_backward(peer)) is not None:
                actions += self._lease(now_s, table, (BACKWARD, m), peer)
        queue = [(len(table.leases_of(peer)), peer) for peer in ready]
        heapq.heapify(queue)
        while queue and table.n_queued:
            n_leases, peer = heapq.heappop(queue)
            n_tasks = self._workers[peer].n_tasks
            task = table.next_task(peer, self._place.depth + n_tasks) if n_leases < n_tasks else None
            if task:
                actions += self._lease(now_s, table, task, peer)
                heapq.heappush(queue, (n_leases + 1, peer))
        return actions

    def _lease(self, now_s: float, table: TaskTable, task: tuple[str, int], peer: int) -> list[Action | Event]:
        """Grant a task, and send what the worker needs for it: the input for a forward, or for Work that contains one,
        and the gradient for a backward. The last stage has no gradient, and the first one has tokens for input."""
        kind, m = task
        timeout_s = self._times.timeout_s(peer, kind, table.n_failures(kind, m))
        lease = table.lease(kind, m, peer, now_s, now_s + timeout_s)
        step, admission = self._step, self._workers[peer].admission
        told = TaskLease(admission, lease.number, step, kind, m, lease.with_forward, lease.is_redo)
        actions: list[Action | Event] = [Send(peer, told)]
        reads_input = kind == FORWARD or lease.with_forward or self._is_last
        activation_bytes, gradient_bytes = self._shape.received_bytes
        if reads_input and not self._is_first:
            actions.append(Send(peer, Boundary(Key("act", step, self._stage, m)), activation_bytes, BULK))
        if kind == BACKWARD and not self._is_last:
            actions.append(Send(peer, Boundary(Key("grad", step, self._stage + 1, m)), gradient_bytes, BULK))
        return actions

    def _expire(self, now_s: float) -> list[Action | Event]:
        """Leases that have run out go to others; a worker that has not contributed in time is void."""
        if self._table:
            self._table.expire(now_s)
        late = [peer for peer, worker in self._workers.items() if worker.until_s <= now_s]
        return [action for peer in late for action in self._lose(peer, "no contribution in time", readmit=True)]

    # ------------------------------------------------------------------------------------------------------- results

    def _computed(self, now_s: float, work: Work, values: dict[str, float]) -> list[Action | Event]:
        """This server has done a Work of its own."""
        m = work.microbatch
        assert m is not None and self._table is not None  # as in all Work of a wiring
        n_samples, loss_sum = int(values.get("n_samples", 0)), values.get("loss_sum")
        if work.kind == EVALUATE:
            return self._evaluated(m, n_samples, loss_sum)
        lease = self._own
        assert lease is not None  # the Work was its, or a step of it
        if work.kind != lease.kind:
            return [self._slot.start(Work(self._stage, lease.kind, m, self._peer, self._step))]
        self._own = None
        self._table.finish(lease.number)
        if lease.kind == FORWARD:
            return self._pass_on(lease)
        self._losses[m] = (n_samples, loss_sum)
        self._table.commit(self._peer, self._table.contribution(self._peer))
        return [*self._pass_on(lease), *self._count(m)]

    def _evaluated(self, m: int, n_samples: int, loss_sum: float | None) -> list[Action | Event]:
        self._n_held_out -= 1
        if not self._is_last:
            key = Key("eval", self._step, self._stage + 1, m)
            return [Send(self._owner(self._stage + 1, EVALUATE, m), Boundary(key), self._shape.sent_bytes[0][0])]
        assert loss_sum is not None  # the last stage measures it
        self._recovery.count(EVALUATE, m)
        return [Evaluated(self._step, n_samples, loss_sum)]

    def _count(self, m: int) -> list[Action | Event]:
        """A microbatch's gradient is in this server's accumulator."""
        n_samples, loss_sum = self._losses[m]
        self._recovery.count(BACKWARD, m)
        return [Accumulated(self._step, self._stage, m, n_samples, loss_sum)]

    def _pass_on(self, lease: Lease) -> list[Action | Event]:
        """The output of a task is here: it goes to the neighbour stage, if that waits for it."""
        m, step, stage = lease.microbatch, self._step, self._stage
        actions: list[Action | Event] = [*self._recovery.made(Work(stage, lease.kind, m, self._peer, step))]
        activation_bytes, gradient_bytes = self._shape.sent_bytes[0]
        if lease.kind == FORWARD:
            key = Key("act", step, stage + 1, m)
            actions.append(Send(self._owner(stage + 1, FORWARD, m), Boundary(key), activation_bytes))
        elif not self._is_first and not lease.is_redo:
            key = Key("grad", step, stage, m)
            actions.append(Send(self._owner(stage - 1, BACKWARD, m), Boundary(key), gradient_bytes))
        return actions

    def _on_result(self, now_s: float, src: int, body: TaskDone | TaskOutput, tensor: object) -> list[Action | Event]:
        """A worker says that it has done a task. One that was late with a backward has counted what another client may
        count too, so it is void."""
        table, number = self._table, body.number
        lease = table.lease_of(number) if table else None
        if not table or (lease and lease.client != src):
            return []
        verdict = table.finish(number)
        if verdict is Verdict.STALE:
            is_backward = isinstance(body, TaskDone) or body.key.kind == "grad"
            return self._lose(src, "a backward came too late", readmit=True) if is_backward else []
        if verdict is Verdict.DUPLICATE or not lease:
            return []
        self._times.took(src, lease.kind, now_s - lease.granted_s)
        if lease.kind == BACKWARD:
            self._losses[lease.microbatch] = (body.n_samples, body.loss_sum)
        keep = [] if tensor is None else [StoreTensor(src, body, tensor)]
        return [*keep, *self._pass_on(lease)]

    # ------------------------------------------------------------------------------------------------- contributions

    def _end_step(self, now_s: float, table: TaskTable) -> list[Action | Event]:
        """All is computed: ask for the contributions. All is here: the step is over at this server."""
        if not table.is_done or self._n_held_out or self._is_drained:
            return []
        if table.is_committed:
            if self._adding:
                return []
            self._is_drained = True
            return [Drained(self._step)]
        actions: list[Action | Event] = []
        for peer in table.contributors:
            if not self._workers[peer].rounds:
                actions += self._ask_for_contribution(now_s, peer, self._workers[peer])
        return actions

    def _ask_for_contribution(self, now_s: float, peer: int, worker: _Worker) -> list[Action | Event]:
        self._n_rounds += 1
        names = [contribution_name(group, peer) for group in self._place.groups]
        worker.rounds = tuple(Round(self._step, name, worker.admission, self._n_rounds) for name in names)
        worker.asked_s, worker.until_s = now_s, now_s + self._times.timeout_s(peer, CONTRIBUTION)
        wanted = Send(peer, ContributionWanted(worker.admission, worker.rounds))
        return [ContributionBegins(peer, worker.rounds), wanted]

    def _on_contribution(self, now_s: float, received: ContributionReceived) -> list[Action | Event]:
        """It is added if it holds exactly what the worker has done, in finite numbers."""
        peer, rounds = received.worker, received.rounds
        worker = self._workers.get(peer)
        if not self._table or not worker or worker.rounds != rounds:
            return _forget(rounds)
        if not math.isfinite(received.sq_norm):
            return self._refuse(peer)
        if not self._table.commit(peer, received.items):
            return self._lose(peer, "its contribution is not what it has done", readmit=True)
        self._times.took(peer, CONTRIBUTION, now_s - worker.asked_s)
        worker.rounds, worker.until_s = (), NEVER
        self._adding.append((rounds, received.items))
        return []

    def _contributed(self, now_s: float) -> list[Action | Event]:
        """The oldest contribution that waited is in this server's accumulator. If a view came meanwhile, others wait to
        hear what is in it."""
        self._is_adding = False
        actions: list[Action | Event] = []
        if self._adding:  # else of a generation that was rolled back
            rounds, items = self._adding.popleft()
            actions += [*_forget(rounds), *(action for m, _ in items for action in self._count(m))]
        return actions if self._table else [*actions, *self._routed.freed(now_s)]

    def _refuse(self, peer: int) -> list[Action | Event]:
        """A gradient that is not finite may be the worker's fault or the run's. This server computes it again, and so
        decides."""
        assert self._table is not None
        self._table.distrust(peer)
        self._n_refused[peer] += 1
        is_put_out = self._n_refused[peer] >= REFUSED_MAX
        actions = self._lose(peer, "its gradient is not finite", readmit=not is_put_out)
        ended = Ended(PUT_OUT, f"worker {peer}: {REFUSED_MAX} of its gradients were not finite")
        return [*actions, Send(peer, ended)] if is_put_out else actions

    # ------------------------------------------------------------------------------------------------------- workers

    def _admitted(self, peer: int, admission: int) -> _Worker | None:
        """A worker that speaks under its present admission."""
        worker = self._workers.get(peer)
        return worker if worker and worker.admission == admission else None

    def _enlist(self, peer: int, process: int, fingerprint: str) -> list[Action | Event]:
        if fingerprint != self._place.fingerprint:
            return [Send(peer, Ended(BAD_INPUT, f"worker {peer}: runs {fingerprint}, not {self._place.fingerprint}"))]
        if self._n_refused[peer] >= REFUSED_MAX:
            return []
        actions: list[Action | Event] = []
        worker = self._workers.get(peer)
        if worker and worker.process != process:
            actions += self._lose(peer, "it was started again", readmit=False)
        if self._view is None or self._version < 0:
            self._waiting[peer] = process
            return actions
        if peer not in self._workers:
            actions += self._join(peer, process)
        return [*actions, self._welcome(peer)]

    def _join(self, peer: int, process: int) -> list[Action | Event]:
        self._admit(peer, process)
        return [WorkerJoinedReport(self._stage, peer, self._version)]

    def _admit(self, peer: int, process: int) -> None:
        assert self._view is not None
        self._n_admissions += 1
        own = self._view.by_peer[self._peer].admission
        self._workers[peer] = _Worker(process, own * ADMISSIONS + self._n_admissions)

    def _welcome(self, peer: int) -> Send:
        assert self._view is not None
        return Send(peer, Enlisted(self._workers[peer].admission, self._version, self._view.n_reseeds))

    def _tell_workers(self) -> list[Action | Event]:
        """A version is here. Those who have asked before there was one are let in."""
        if self._view is None:
            return []
        waiting, self._waiting = self._waiting, {}
        joins = [action for peer, process in sorted(waiting.items()) for action in self._join(peer, process)]
        return [*joins, *(self._welcome(peer) for peer in sorted(self._workers))]

    def _lose(self, peer: int, reason: str, readmit: bool) -> list[Action | Event]:
        """What the worker has done and not contributed is void. One that may still be there begins anew."""
        worker = self._workers.pop(peer)
        redone = self._table.void(peer) if self._table else []
        report = WorkerLostReport(self._stage, peer, reason, len(redone))
        actions: list[Action | Event] = [report, *_forget(worker.rounds)]
        if worker.rounds:
            actions.append(ContributionVoid(worker.rounds))
        if readmit:
            self._admit(peer, worker.process)
            actions.append(self._welcome(peer))
        return actions


def _forget(rounds: tuple[Round, ...]) -> list[Action | Event]:
    return [Forget(round) for round in rounds]


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup, n_under_way: int) -> list[PoolServer]:
    config, plan, shape = setup.config, setup.plan, step_shape(setup)
    n_routers = min(config.wiring.routers, len(plan.peers))
    seed = f"{config.train.seed} {setup.peer}"
    routes = MeasuredRoutes(plan.n_stages, n_routers, plan.depth(0) * n_routers, plan.n_microbatches, seed)
    recovery, slot = Recovery(shape), ComputeSlot()
    routed = RoutedWiring(shape, routes, recovery, slot, ServiceTime())
    groups = [group.name for group in sync_groups(config, plan) if setup.stage in group.stages]
    place = PoolPlace(shape, plan.depth(setup.stage), groups, setup.fingerprint)
    assert n_under_way == 1  # `_check` refuses a delay
    return [PoolServer(place, routed, recovery, slot, LeaseTimes(config.net.deadline_floor_s))]


def _build_worker(setup: PeerSetup) -> PoolWorker:
    return PoolWorker(step_shape(setup), server_of(setup.plan, setup.peer))


def _check(config: RunConfig, plan: Plan) -> str:
    if config.sync.delay:
        return (
            f"sync.delay: got {config.sync.delay}, expected 0 with wiring {config.wiring.kind}, which cannot delay yet"
        )
    if plan.schedule != "1f1b":
        return f"plan.schedule: got {plan.schedule}, expected 1f1b with wiring {config.wiring.kind}"
    if not config.wiring.retain_bytes:
        return (
            f"wiring.retain_bytes: got 0, expected more with wiring {config.wiring.kind}: a server sends the tensors "
            "of a microbatch again when a worker is lost"
        )
    for stage, row in enumerate(plan.roles.servers):
        if set(row) != set(plan.placement[stage]):
            return (
                f"plan.roles.servers[{stage}]: got {list(row)}, expected {list(plan.placement[stage])} with wiring "
                f"{config.wiring.kind}, whose servers are the peers of the placement"
            )
    return ""


def _peer_load(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> PeerLoad:
    """All of a server's microbatches have their tensors there."""
    share = -(-plan.n_microbatches // plan.n_replicas[stage])
    return PeerLoad(min(share, plan.depth(stage)), share)


ENTRY = WiringEntry(
    _build,
    _check,
    _peer_load,
    follows_plan=False,
    may_change_stages=False,
    plan_roles=frozenset({"servers", "front", "back", "workers"}),
    workers=WorkerRole(
        _build_worker, server_of, messages=frozenset({Enlist, WantsTasks, TaskDone, TaskOutput, Fetch, Shard})
    ),
)
