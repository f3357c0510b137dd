"""A server's wiring: it owns a cut of its stage's microbatches, has its workers compute them, and computes itself.

The servers of a stage are members of the run. Each owns the microbatches of its part of an even cut, by index
(even_transfer.py): it receives their inputs and the gradients of their outputs, grants their tasks, and passes results
on to the owner at the neighbour stage. A server with little to do takes tasks of the others (work_stealing.py).

    input of m arrives   -> TaskLease and the input to a worker that wants tasks, or this server's own forward
    TaskOutput(forward)  -> if the lease is a present one: the output goes to the owner at the next stage
    gradient of m        -> TaskLease and the gradient to the worker that did the forward, or this server's own backward
    TaskOutput(backward) -> the input's gradient goes to the owner at the stage before
    nothing is left      -> ContributionWanted to every worker that has done something, once it has nothing to do; what
                            it sends is added here (C; contributions.py)
    all are added        -> Drained: from here on the servers agree as replicas do

Each client has a forward for each backward, and all may have as many forwards in flight: what comes back to the clients
comes in proportion to what they have in flight, so a client with fewer would wait for work. The last tasks of a step
are for whoever will be done first (task_times.py).

A worker that vanishes, is late with a backward, or contributes something else than it has done, is void: its leases and
all that it has not contributed are done again here or at others (task_table.py). No other peer takes part in that: it
needs no view and no write to a disk, and delays no other peer. A server without workers computes everything itself, in
the order of 1F1B.

With delayed updates two steps are under way, each with a table of its own; the older one's tasks go first. A worker
does the tasks of a step if it holds the version with which the step computes.

A view in mid-step voids what the workers have not contributed, and the rest of the steps under way is done by the
servers alone, each step by a RoutedWiring, as with the other wirings. PoolServer does a step from its start or not at
all.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WorkerJoinedReport, WorkerLostReport
from jaxdt.protocol.wake_up import WakeUp
from jaxdt.run.delay import Delay
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import COMPUTING, StepShape, view_of_step
from jaxdt.wiring.compute_slot import ComputeSlot
from jaxdt.wiring.pool.contributions import Contributions, forget
from jaxdt.wiring.pool.even_transfer import part, part_of
from jaxdt.wiring.pool.step_under_way import StepUnderWay
from jaxdt.wiring.pool.task_table import Lease, TaskTable, Verdict
from jaxdt.wiring.pool.task_times import LEASES_MIN, LeaseTimes, Loads, TaskTimes, others_are_sooner, share_of
from jaxdt.wiring.pool.work_stealing import StepSteals
from jaxdt.wiring.pool.worker_roster import AdmittedWorker, WorkerRoster
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring

NEVER = math.inf


@dataclass(frozen=True)
class PoolPlace:
    """A server's place. `depth`: forwards that wait for their backward at one client, as under 1F1B; `sync_stages`: the
    stage of each sync group that the server is in; `fingerprint`: of the run, which a worker must know."""

    shape: StepShape
    depth: int
    sync_stages: Sequence[int]
    fingerprint: str
    delay: Delay


@dataclass(frozen=True)
class Fallback:
    """The part that finishes a step in which a view comes: a wiring, and the recovery that the server shares."""

    routed: RoutedWiring
    recovery: Recovery


class PoolServer:
    """One server's side; see the module text. `fallbacks`, which share `slot` with this one, do the steps in which a
    view comes: one of the even steps and one of the odd ones, if two are under way at a time."""

    READS = (
        RoutedWiring.READS
        | {ev.Enlist, ev.WantsTasks, ev.TaskDone, ev.TaskOutput, ev.ContributionReceived, ev.LinkChanged, ev.Woke}
        | {ev.StealRequest, ev.StealOffer, ev.StealReply, ev.Ended}
    )

    def __init__(self, place: PoolPlace, fallbacks: Sequence[Fallback], slot: ComputeSlot, times: LeaseTimes):
        shape = place.shape
        self._place = place
        self._shape = shape
        self._peer = shape.peer
        self._stage = shape.stage
        self._is_first, self._is_last = shape.stage == 0, shape.is_last_stage
        self._fallbacks = tuple(fallbacks)
        self._slot = slot
        self._times = times
        self._contributions = Contributions(shape.peer, shape.stage, place.sync_stages, times)
        self._view: ev.View | None = None
        self._strict_from: float = NEVER  # the first step of the view that is done here
        self._version = -1  # of the parameters that are here
        self._begun: set[int] = set()  # steps that this version opens, and that have begun
        self._steps: dict[int, StepUnderWay] = {}  # under way and done here, the oldest first
        self._lease_numbers = itertools.count(1)
        self._roster = WorkerRoster()
        self._workers = self._roster.admitted
        self._early: list[ev.Key] = []  # of steps that have not begun here
        self._own: Lease | None = None  # the own task that runs
        self._last_kind = WorkKind.FORWARD  # of the own task that was begun last
        self._task_times = TaskTimes()
        self._wake_up = WakeUp("pool")

    # -------------------------------------------------------------------------------------------------------- events

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Ran(work) if work.kind == WorkKind.CONTRIBUTE:
                self._slot.free()
                return self._on_contributed() + self._go_on(now_s)
            case ev.Ran(work, values=values) if work.kind in COMPUTING:
                number, _ = work.place
                if number not in self._steps:
                    return self._fallback_of(number).routed.handle(now_s, event) + self._go_on(now_s)
                counts = self._slot.free()
                computed = self._on_computed(now_s, self._steps[number], work, values) if counts else []
                return computed + self._go_on(now_s)
            case ev.Received(header, ev.Enlist() as body):
                return self._enlist(now_s, header.src, body)
            case ev.Received(_, ev.Ended() as ended):
                return [ev.Send(peer, ended) for peer in sorted(self._workers)]
            case ev.Received(header, ev.WantsTasks() | ev.TaskDone() | ev.TaskOutput() as body) if self._view:
                return self._from_worker(now_s, event, header.src, body) + self._go_on(now_s)
            case ev.Received(header, ev.StealRequest() | ev.StealOffer() | ev.StealReply() as body) if self._view:
                return self._from_server(now_s, header.src, body) + self._go_on(now_s)
            case ev.Received(_, ev.Boundary(key)) if self._view and key.step < self._version:
                return [ev.Discard(key)]  # of a step that is over
            case ev.Received(_, ev.Boundary(key)) if self._view and key.step >= self._strict_from:
                return self._on_arrived(key) + self._go_on(now_s)
            case ev.Received(_, body):
                step = _step_of(body)
                return [] if step is None else self._fallback_of(step).routed.handle(now_s, event)
            case ev.Updated(_, version):
                return self._on_updated(now_s, version)
            case ev.ContributionReceived():
                return self._on_contribution(now_s, event) + self._go_on(now_s)
            case ev.Woke("pool"):
                self._wake_up.woke(now_s)
                return self._expire(now_s) + self._go_on(now_s)
            case ev.LinkChanged(peer, False) if self._version >= self._shape.n_steps:
                self._roster.remove(peer)  # it has heard that all is done
                return []
            case ev.LinkChanged(peer, False, reason) if peer in self._workers:
                return self._lose(peer, reason, readmit=False) + self._go_on(now_s)
            case ev.ViewChanged(view):
                return self._adopt(now_s, view)
            case ev.Evicted():
                actions = self._stop(forgets_workers=True)
                self._view = None
                return [*actions, *self._tell_fallbacks(now_s, event)]
            case ev.WorkOverdue() if self._steps:
                return [ev.StepBlocked()]  # only this server does what it has begun
            case ev.WorkOverdue():
                return self._tell_fallbacks(now_s, event)
        return []

    @property
    def queue(self) -> tuple[int, bool]:
        n_queued = sum(step.table.n_queued for step in self._steps.values())
        return n_queued + sum(fallback.routed.queue[0] for fallback in self._fallbacks), self._slot.is_busy

    @property
    def n_workers(self) -> int:
        return len(self._workers)

    def worker_statuses(self, now_s: float) -> tuple[ev.WorkerStatus, ...]:
        return self._roster.statuses(now_s)

    @property
    def computed_steps(self) -> list[int]:
        """Steps under way of which all microbatches of this server are computed."""
        return [number for number, step in self._steps.items() if step.table.is_done and not step.n_held_out]

    @property
    def n_leases(self) -> int:
        """That workers hold now."""
        return sum(self._n_leases(peer) for peer in self._workers)

    def cancel_run(self) -> None:
        self._slot.free()

    def _fallback_of(self, step: int) -> Fallback:
        return self._fallbacks[step % len(self._fallbacks)]

    def _tell_fallbacks(self, now_s: float, event: ev.Event) -> ev.Actions:
        return [action for fallback in self._fallbacks for action in fallback.routed.handle(now_s, event)]

    def _from_worker(
        self, now_s: float, event: ev.Received, src: int, body: ev.WantsTasks | ev.TaskDone | ev.TaskOutput
    ) -> ev.Actions:
        worker = self._roster.of_admission(src, body.admission)
        if worker is None:
            return []
        if isinstance(body, ev.WantsTasks):
            self._holds(worker, body)
            return []
        number = body.step if isinstance(body, ev.TaskDone) else body.key.step
        step = self._steps.get(number)
        return self._on_result(now_s, step, src, body, event.tensor) if step else []

    def _holds(self, worker: AdmittedWorker, wants: ev.WantsTasks) -> None:
        """A worker with the next version keeps the one before, where updates are delayed. What it said earlier may come
        later."""
        newest = max(worker.versions, default=-1)
        if wants.version > newest:
            keeps = self._place.delay.steps and wants.version == newest + 1
            worker.versions = frozenset({newest, wants.version} if keeps and newest >= 0 else {wants.version})
        worker.n_tasks = wants.n_tasks

    def _from_server(self, now_s: float, src: int, body: ev.StealRequest | ev.StealOffer | ev.StealReply) -> ev.Actions:
        """Another server of the stage asks for tasks of a step, offers some, or answers. One that asks for tasks of a
        step that is not under way here gets none, and does not wait for an answer."""
        step = self._steps.get(body.step)
        if step is None:
            return [ev.Send(src, ev.StealReply(body.step, 0))] if isinstance(body, ev.StealOffer) else []
        if isinstance(body, ev.StealReply):
            return step.steals.on_reply(src, body)
        clients = self._clients(step)
        if isinstance(body, ev.StealRequest):
            tasks = step.steals.tasks_for(src, body, self._loads(clients, 0))
            offer = ev.StealOffer(step.number, tasks, self._loads(clients, step.table.n_left))
            return [ev.Send(src, offer)] if tasks else []
        n_taken = share_of(self._loads(clients, step.n_left), body.clients, len(body.tasks))
        return step.steals.on_offer(src, body, min(n_taken, self._n_may_take(step)))

    # --------------------------------------------------------------------------------------------------------- steps

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        """All steps of the first view are done here, and of later views those after the ones that may be under way
        somewhere. After a rollback the workers come again, when the version is known."""
        actions = self._stop(view.rolled_back)
        n_steps = len(self._fallbacks)
        self._view = view
        self._strict_from = view.n_committed + (n_steps if view.number > 1 else 0)
        for step in range(view.n_committed, view.n_committed + n_steps):
            own_view = view_of_step(view, step)
            routed = self._fallback_of(step).routed
            if step < self._strict_from:
                actions += routed.handle(now_s, ev.ViewChanged(own_view))
            else:
                routed.void_routes(own_view)
        return actions + self._begin_open_steps(now_s)

    def _stop(self, forgets_workers: bool) -> ev.Actions:
        """The rest of the steps under way is not done here, and what workers have not contributed is void. A
        contribution that is being added stays, unless the state does not."""
        actions: ev.Actions = []
        if self._steps or forgets_workers:
            for peer in list(self._workers):
                actions += self._lose(peer, "a new view", readmit=not forgets_workers)
        actions += self._contributions.drop(keeps_what_is_being_added=not forgets_workers)
        if forgets_workers:
            self._version = -1
            self._begun.clear()
        self._steps.clear()
        self._own = None
        self._strict_from = NEVER
        self._early.clear()
        return actions

    def _on_updated(self, now_s: float, version: int) -> ev.Actions:
        """A version is here, so the steps before it are over, and those that compute with it may begin."""
        if self._view is None:
            return []
        self._version = version
        self._steps = {number: step for number, step in self._steps.items() if number >= version}
        begun = self._begin_open_steps(now_s)
        return [*begun, *self._tell_workers(), *self._go_on(now_s)]

    def _begin_open_steps(self, now_s: float) -> ev.Actions:
        """Begin the steps that may begin, if this server takes part in them. It may yet have to, when others are
        lost."""
        if self._view is None or self._version < 0:
            return []
        actions: ev.Actions = []
        steps = self._place.delay.open(self._version)
        self._begun &= set(steps)
        for step in steps:
            if step in self._begun or self._peer not in self._servers(self._stage, step):
                continue
            self._begun.add(step)
            if step < self._strict_from:
                actions += self._fallback_of(step).routed.handle(now_s, ev.Updated(self._stage, step))
            elif self._shape.has_work(step):
                actions += self._open(step)
        return actions

    def _open(self, number: int) -> ev.Actions:
        """A step begins, and nothing is left of the one before that had its place."""
        self._fallback_of(number).routed.enter_without_tasks(number)
        own = self._own_cut(number)
        table = TaskTable(own, self._peer, self._is_last, self._lease_numbers)
        held_out = range(self._shape.n_held_out(number))
        own_held_out = [m for m in held_out if self._owner(number, self._stage, WorkKind.EVALUATE, m) == self._peer]
        others = tuple(p for p in self._servers(self._stage, number) if p != self._peer)
        steals = StepSteals(self._shape, number, table, others)
        step = StepUnderWay(number, table, len(own_held_out), deque(own_held_out if self._is_first else ()), steals)
        self._steps[number] = step
        for m in own if self._is_first else ():
            table.input_arrived(m)
        early, self._early = self._early, []
        return [action for key in early for action in self._on_arrived(key)]

    def _own_cut(self, number: int) -> range:
        """The microbatches of a step that this server owns."""
        servers = self._servers(self._stage, number)
        return part(self._shape.n_trained(number), len(servers), servers.index(self._peer))

    def _servers(self, stage: int, step: int) -> tuple[int, ...]:
        assert self._view is not None
        return self._view.working(stage, step)

    def _owner(self, step: int, stage: int, kind: WorkKind, m: int) -> int:
        """The server of a stage to whom a microbatch, or of kind EVALUATE a held-out one, belongs."""
        servers = self._servers(stage, step)
        if kind == WorkKind.EVALUATE:
            return servers[m % len(servers)]
        return servers[part_of(self._shape.n_microbatches, len(servers), m)]

    def _on_arrived(self, key: ev.Key) -> ev.Actions:
        step = self._steps.get(key.step)
        if step is None:
            if key.step >= self._version and key.step not in self._begun:
                self._early.append(key)
        elif key.kind == "eval":
            step.held_out.append(key.microbatch)
        elif key.microbatch not in step.table:
            return step.steals.on_arrived(key)
        elif key.kind == "act":
            step.table.input_arrived(key.microbatch)
        else:
            step.table.gradient_arrived(key.microbatch)
        return []

    # -------------------------------------------------------------------------------------------------- who does what

    def _go_on(self, now_s: float) -> ev.Actions:
        """Do whatever can be done now, for the oldest step first."""
        actions = [action for fallback in self._fallbacks for action in fallback.routed.freed(now_s)]
        steps = list(self._steps.values())
        actions += self._begin_own(now_s, steps)
        for step in steps:
            actions += self._grant(now_s, step)
        for step in steps:
            actions += self._ask_others(now_s, step)
        for step in steps:
            actions += self._end_step(now_s, step)
        until_s = min([step.table.next_deadline_s for step in steps], default=NEVER)
        until_s = min([until_s, *(asked.until_s for step in steps for asked in step.asked.values())])
        until_s = min([until_s, *(step.steals.asks_at_s for step in steps if step.steals.asks_at_s > now_s)])
        return [*actions, *self._wake_up.at(until_s)]

    def _begin_own(self, now_s: float, steps: list[StepUnderWay]) -> ev.Actions:
        """The next Work of this server: what workers have sent, then held-out microbatches, then a task."""
        if self._slot.is_busy:
            return []
        if of_workers := self._contributions.next_work():
            return [self._slot.start(*of_workers)]
        for step in steps:
            if step.held_out:
                return [self._start(WorkKind.EVALUATE, step, step.held_out.popleft())]
            task = step.table.next_task(self._peer, self._in_flight_max(self._peer), self._last_kind)
            if task and not self._others_are_sooner(step, self._peer, *task):
                self._last_kind = task[0]
                self._own = step.table.lease(*task, self._peer, now_s)
                return [self._start(WorkKind.FORWARD if self._own.with_forward else self._own.kind, step, task[1])]
        return []

    def _start(self, kind: WorkKind, step: StepUnderWay, m: int) -> ev.Action:
        return self._slot.start(Work(self._stage, kind, m, self._peer, step.number))

    def _grant(self, now_s: float, step: StepUnderWay) -> ev.Actions:
        """Lease what workers can do now. A backward goes at once to the worker that did the forward; other tasks to
        the workers with the fewest, as long as they need more."""
        table, ready = step.table, self._ready(step)
        actions: ev.Actions = []
        for peer in sorted(ready):
            while (m := table.own_backward(peer)) is not None:
                actions += self._lease(now_s, step, (WorkKind.BACKWARD, m), peer)
        queue = [(self._n_unbound(peer), peer) for peer in ready]
        heapq.heapify(queue)
        while queue and table.n_queued:
            n_leases, peer = heapq.heappop(queue)
            task = table.next_task(peer, self._in_flight_max(peer)) if n_leases < self._n_leases_max(peer) else None
            if task and not self._others_are_sooner(step, peer, *task):
                actions += self._lease(now_s, step, task, peer)
                heapq.heappush(queue, (n_leases + 1, peer))
        return actions

    def _ready(self, step: StepUnderWay) -> list[int]:
        """The workers that could do tasks of a step."""
        version = self._place.delay.version_of(step.number)
        return [p for p, worker in self._workers.items() if version in worker.versions and p not in step.asked]

    def _n_leases(self, peer: int) -> int:
        return sum(len(step.table.leases_of(peer)) for step in self._steps.values())

    def _n_unbound(self, peer: int) -> int:
        return sum(step.table.n_unbound(peer) for step in self._steps.values())

    def _n_leases_max(self, worker: int) -> int:
        n_leases = self._task_times.n_leases(worker, WorkKind.BACKWARD if self._is_last else WorkKind.FORWARD)
        return min(n_leases, self._workers[worker].n_tasks)

    def _in_flight_max(self, peer: int) -> int:
        """Forwards without their backward at a client: as under 1F1B, where one of them runs, and besides those that
        wait for it or are on their way. A server with workers has as many as a worker beside it; else it would have a
        smaller part of what comes back than of what it could do."""
        if peer != self._peer:
            return self._place.depth + max(1, self._n_leases_max(peer)) - 1
        return self._place.depth + (LEASES_MIN - 1 if self._workers else 0)

    def _others_are_sooner(self, step: StepUnderWay, peer: int, kind: WorkKind, m: int) -> bool:
        """Whether a task is better left to others, of those who may have it and are not late with another one."""
        table = step.table
        if m in table.held(peer):
            return False
        in_time = [p for p in self._ready(step) if not self._workers[p].is_late]
        clients = {peer, *(p for p in (self._peer, *in_time) if table.may_have(p, kind, m))}
        held = {p: sum(len(one.table.held(p)) for one in self._steps.values()) for p in clients}
        microbatch_s = {p: self._task_times.microbatch_s(p) for p in clients}
        return others_are_sooner(peer, held, microbatch_s, table.n_left)

    def _ask_others(self, now_s: float, step: StepUnderWay) -> ev.Actions:
        """Ask the other servers of the stage for tasks if each client has at most one more of this one's."""
        steals, n_max = step.steals, self._n_may_take(step)
        if not steals.others or not self._task_times.is_known or n_max <= 0:
            return []
        if step.n_more > 1 + len(self._workers) or step.n_more > len(clients := self._clients(step)):
            steals.asks_at_s = steals.pause_s = 0.0
            return []
        if steals.awaited or now_s < steals.asks_at_s:
            return []
        steals.pause_s += min(self._task_times.microbatch_s(peer) for peer in clients)
        steals.asks_at_s = now_s + steals.pause_s
        request = ev.StealRequest(step.number, n_max, self._loads(clients, step.n_left))
        return [ev.Send(peer, request) for peer in steals.others]

    def _clients(self, step: StepUnderWay) -> list[int]:
        """This server and those of its workers that do tasks of a step in time."""
        return [self._peer, *(p for p in self._ready(step) if not self._workers[p].is_late)]

    def _n_may_take(self, step: StepUnderWay) -> int:
        """How many microbatches of other servers this one may yet take; none once its part of the step is over."""
        return 0 if step.is_drained else len(self._own_cut(step.number)) - len(step.steals.stolen)

    def _loads(self, clients: Sequence[int], n_more: int) -> Loads:
        """The work that each client has yet to do, if `n_more` microbatches go to the clients that are done first."""
        loads = [(self._busy_s(peer), self._task_times.microbatch_s(peer)) for peer in clients]
        for _ in range(n_more):
            first = min(range(len(loads)), key=lambda i: sum(loads[i]))
            loads[first] = (sum(loads[first]), loads[first][1])
        return tuple(loads)

    def _busy_s(self, peer: int) -> float:
        """Seconds of work that a client has yet to do for the microbatches that it holds: of those that wait for their
        gradient the backward alone."""
        tables = [step.table for step in self._steps.values()]
        n_forwards = sum(lease.kind == WorkKind.FORWARD for table in tables for lease in table.leases_of(peer))
        n_backwards = sum(len(table.held(peer)) for table in tables) - n_forwards
        times = self._task_times
        return n_forwards * times.microbatch_s(peer) + n_backwards * times.task_s(peer, WorkKind.BACKWARD)

    def _lease(self, now_s: float, step: StepUnderWay, task: tuple[WorkKind, int], peer: int) -> ev.Actions:
        """Grant a task, and send what the worker needs for it: the input for a forward, or for Work that contains one,
        and the gradient for a backward. The last stage has no gradient, and the first one has tokens for input."""
        (kind, m), table, number = task, step.table, step.number
        timeout_s = self._times.timeout_s(peer, kind, table.n_failures(kind, m))
        lease = table.lease(kind, m, peer, now_s, now_s + timeout_s)
        admission = self._workers[peer].admission
        told = ev.TaskLease(admission, lease.number, number, kind, m, lease.with_forward, lease.is_redo)
        actions: ev.Actions = [ev.Send(peer, told)]
        reads_input = kind == WorkKind.FORWARD or lease.with_forward or self._is_last
        activation_bytes, gradient_bytes = self._shape.received_bytes
        if reads_input and not self._is_first:
            actions.append(ev.Send(peer, ev.Boundary(ev.Key("act", number, self._stage, m)), activation_bytes, ev.BULK))
        if kind == WorkKind.BACKWARD and not self._is_last:
            actions.append(
                ev.Send(peer, ev.Boundary(ev.Key("grad", number, self._stage + 1, m)), gradient_bytes, ev.BULK)
            )
        return actions

    def _expire(self, now_s: float) -> ev.Actions:
        """Leases that have run out go to others; a worker that has not contributed in time is void."""
        late: set[int] = set()
        for step in self._steps.values():
            for lease in step.table.expire(now_s):
                self._workers[lease.client].is_late = True
            late |= {peer for peer, asked in step.asked.items() if asked.until_s <= now_s}
        return [action for peer in sorted(late) for action in self._lose(peer, "no contribution in time", readmit=True)]

    # ------------------------------------------------------------------------------------------------------- results

    def _on_computed(self, now_s: float, step: StepUnderWay, work: Work, values: dict[str, float]) -> ev.Actions:
        _, m = work.place
        n_samples, loss_sum = int(values.get("n_samples", 0)), values.get("loss_sum")
        if work.kind == WorkKind.EVALUATE:
            return self._on_evaluated(step, m, n_samples, loss_sum)
        lease = self._own
        assert lease is not None  # the Work was its, or a step of it
        if work.kind != lease.kind:
            return [*self._fallback_of(step.number).recovery.made(work), self._start(lease.kind, step, m)]
        self._own = None
        step.table.finish(lease.number)
        if not lease.with_forward:
            self._task_times.computed(self._peer, lease.kind, now_s - lease.granted_s)
        if lease.kind == WorkKind.FORWARD:
            return self._pass_on(step, lease)
        step.losses[m] = (n_samples, loss_sum)
        step.table.commit(self._peer, step.table.contribution(self._peer))
        return [*self._pass_on(step, lease), *self._count(step, m)]

    def _on_evaluated(self, step: StepUnderWay, m: int, n_samples: int, loss_sum: float | None) -> ev.Actions:
        step.n_held_out -= 1
        if not self._is_last:
            key = ev.Key("eval", step.number, self._stage + 1, m)
            owner = self._owner(step.number, self._stage + 1, WorkKind.EVALUATE, m)
            return [ev.Send(owner, ev.Boundary(key), self._shape.sent_bytes[0][0])]
        assert loss_sum is not None  # the last stage measures it
        self._fallback_of(step.number).recovery.count(WorkKind.EVALUATE, m)
        return [ev.Evaluated(step.number, m, n_samples, loss_sum)]

    def _count(self, step: StepUnderWay, m: int) -> ev.Actions:
        """A microbatch's gradient is in this server's accumulator."""
        n_samples, loss_sum = step.losses[m]
        self._fallback_of(step.number).recovery.count(WorkKind.BACKWARD, m)
        return [ev.Accumulated(step.number, self._stage, m, n_samples, loss_sum)]

    def _pass_on(self, step: StepUnderWay, lease: Lease) -> ev.Actions:
        """The output of a task is here: it goes to the neighbour stage, if that waits for it."""
        m, number, stage = lease.microbatch, step.number, self._stage
        actions: ev.Actions = []
        lacks_output = lease.is_redo or (not self._is_last and step.steals.lacks_output(m))
        if lease.client == self._peer or not lacks_output:  # a worker that does it again sends nothing to be kept
            actions += self._fallback_of(number).recovery.made(Work(stage, lease.kind, m, self._peer, number))
        activation_bytes, gradient_bytes = self._shape.sent_bytes[0]
        if lease.kind == WorkKind.FORWARD:
            key = ev.Key("act", number, stage + 1, m)
            actions.append(
                ev.Send(self._owner(number, stage + 1, WorkKind.FORWARD, m), ev.Boundary(key), activation_bytes)
            )
        elif not self._is_first and not lease.is_redo:
            key = ev.Key("grad", number, stage, m)
            actions.append(
                ev.Send(self._owner(number, stage - 1, WorkKind.BACKWARD, m), ev.Boundary(key), gradient_bytes)
            )
        return actions

    def _on_result(
        self, now_s: float, step: StepUnderWay, src: int, body: ev.TaskDone | ev.TaskOutput, tensor: object
    ) -> ev.Actions:
        """A worker says that it has done a task. One that was late with a backward has counted what another client may
        count too, so it is void."""
        table, number = step.table, body.number
        lease = table.lease_of(number)
        if lease and lease.client != src:
            return []
        verdict = table.finish(number)
        if verdict is Verdict.STALE:
            is_backward = isinstance(body, ev.TaskDone) or body.key.kind == "grad"
            return self._lose(src, "a backward came too late", readmit=True) if is_backward else []
        if verdict is Verdict.DUPLICATE or not lease:
            return []
        took_s = now_s - lease.granted_s
        self._times.took(src, lease.kind, took_s)
        self._workers[src].is_late = False
        if not lease.with_forward:
            self._task_times.computed(src, lease.kind, body.work_s)
            self._task_times.travelled(src, lease.kind, took_s - body.held_s)
        if lease.kind == WorkKind.BACKWARD:
            step.losses[lease.microbatch] = (body.n_samples, body.loss_sum)
        keep = [] if tensor is None else [ev.StoreTensor(src, body, tensor)]
        return [*keep, *self._pass_on(step, lease)]

    # ------------------------------------------------------------------------------------------------- contributions

    def _end_step(self, now_s: float, step: StepUnderWay) -> ev.Actions:
        """A worker for whom nothing is left is asked for its contribution, so that it is sent while others compute. All
        is here: the step is over at this server."""
        table = step.table
        if step.is_drained:
            return []
        if table.is_committed and not step.n_held_out:
            if self._contributions.are_waiting(step) or step.steals.is_open:
                return []
            step.is_drained = True
            return self._shape.drained(step.number)
        if table.n_left:
            return []
        missing = [peer for peer in table.contributors if peer not in step.asked and not table.held(peer)]
        admissions = {peer: self._workers[peer].admission for peer in missing}
        return [action for peer in missing for action in self._contributions.ask(now_s, step, peer, admissions[peer])]

    def _on_contribution(self, now_s: float, received: ev.ContributionReceived) -> ev.Actions:
        """All of a contribution is here. It is added, or its worker is void if it may not be."""
        step = self._steps.get(received.rounds[0].number)
        if not step or not self._contributions.arrived(now_s, step, received):
            return forget(received.rounds)
        rejection = self._contributions.look_at(step, received)
        if rejection is None:
            return []
        if rejection.is_suspicious:
            return self._refuse(step, received.worker, rejection.reason)
        return self._lose(received.worker, rejection.reason, readmit=True)

    def _on_contributed(self) -> ev.Actions:
        """The oldest contribution that waited is in this server's accumulator. If a view came meanwhile, others wait to
        hear what is in it."""
        added = self._contributions.added()
        if added is None:
            return []  # it was of a generation that was rolled back
        self._roster.count(added.worker, len(added.items))
        counted = [action for m, _ in added.items for action in self._count(added.step, m)]
        return [*forget(added.rounds), *counted]

    def _refuse(self, step: StepUnderWay, peer: int, problem: str) -> ev.Actions:
        """A gradient that cannot be right may be the worker's fault or the run's. This server computes it again, and so
        decides."""
        step.table.distrust(peer)
        process = self._workers[peer].process
        eviction = self._roster.refuse(peer, problem)
        actions = self._lose(peer, f"its contribution is refused: {problem}", readmit=not eviction)
        return [*actions, ev.Send(peer, ev.Ended(ExitCode.LOST, eviction, process))] if eviction else actions

    # ------------------------------------------------------------------------------------------------------- workers

    def _enlist(self, now_s: float, peer: int, body: ev.Enlist) -> ev.Actions:
        process = body.process
        if body.fingerprint != self._place.fingerprint:
            reason = f"worker {peer}: runs {body.fingerprint}, not {self._place.fingerprint}"
            return [ev.Send(peer, ev.Ended(ExitCode.BAD_INPUT, reason, process))]
        if eviction := self._roster.hear(now_s, peer, process, body.cpu_s):
            return [ev.Send(peer, ev.Ended(ExitCode.LOST, eviction, process))]
        actions: ev.Actions = []
        if self._roster.is_another(peer, process):
            actions += self._lose(peer, "it was started again", readmit=False)
        if self._view is None or self._version < 0:
            self._roster.wait(peer, process)
            return actions
        if peer not in self._workers:
            actions += self._join(peer, process)
        return [*actions, self._welcome(peer)]

    def _join(self, peer: int, process: int) -> ev.Actions:
        self._admit(peer, process)
        return [WorkerJoinedReport(self._stage, peer, self._version), ev.Send(ev.COORDINATOR, ev.WorkerHere(peer))]

    def _admit(self, peer: int, process: int) -> None:
        assert self._view is not None
        self._roster.admit(peer, process, self._view.by_peer[self._peer].admission)

    def _welcome(self, peer: int) -> ev.Send:
        assert self._view is not None
        worker = self._workers[peer]
        return ev.Send(peer, ev.Enlisted(worker.admission, self._version, self._view.n_reseeds, worker.process))

    def _tell_workers(self) -> ev.Actions:
        """A version is here. Those who have asked before there was one are admitted."""
        if self._view is None:
            return []
        joins = [action for peer, process in self._roster.take_waiting() for action in self._join(peer, process)]
        return [*joins, *(self._welcome(peer) for peer in sorted(self._workers))]

    def _lose(self, peer: int, reason: str, readmit: bool) -> ev.Actions:
        """Gradients that the worker has not contributed are void. A worker that may still be there starts again."""
        worker = self._workers[peer]
        self._roster.remove(peer)
        actions: ev.Actions = []
        n_redone = 0
        for step in self._steps.values():
            n_redone += len(step.table.void(peer))
            if asked := step.asked.pop(peer, None):
                actions += [*forget(asked.rounds), ev.ContributionVoid(asked.rounds)]
        actions.append(WorkerLostReport(self._stage, peer, reason, n_redone, begins_anew=readmit))
        if readmit:
            self._admit(peer, worker.process)
            actions.append(self._welcome(peer))
        else:
            actions.append(ev.Send(ev.COORDINATOR, ev.WorkerGone(peer, reason, n_redone)))
            self._times.forget(peer)
            self._task_times.forget(peer)
        return actions


def _step_of(body: ev.Message) -> int | None:
    """The step that a message between servers is about; None for one that the fallbacks do not read."""
    if isinstance(body, ev.Committed):
        return body.record.step
    if isinstance(body, ev.Boundary | ev.Resend):
        return body.key.step
    return body.step if isinstance(body, ev.Grant | ev.Inventory | ev.Progress | ev.Reroute) else None
