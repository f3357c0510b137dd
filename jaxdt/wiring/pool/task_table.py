"""A server's tasks of one step as data: who computes which microbatch, under which lease, and who holds its gradient.

A client is the server itself or one of its workers. A microbatch has two tasks:

    forward    ABSENT -> QUEUED -> LEASED -> DONE
    backward   ABSENT -> QUEUED -> LEASED -> DONE -> COMMITTED
                           ^---------'---------'       a lease that has run out, or a client that is lost

A forward is queued when its input is here, a backward when its forward is done and the gradient of its output is here.
On the last stage the backward contains the forward, so there is no other task and it is queued with the input.

DONE means that the microbatch's gradient is in the accumulator of the client that did it; COMMITTED that the server has
added it to its own. A gradient cannot be taken out of a sum. So a client is lost whole: all that it has done and not
contributed is queued again, and what it still sends changes nothing. That holds for a client that vanished, and for one
whose backward came after its lease had run out, when another client may have done it too. Until then that client does
not get the same backward again: it may hold its gradient already, and would have it twice.

A lease has a number, which grows and never repeats, and a deadline. The number is a fencing token: a result counts only
if its lease is the task's present one. A contribution counts only if it holds exactly what the table has as done by its
client, each under the lease of the table. The table has no clock; deadlines and the present time are arguments.

Only the backward is done again, with its forward before it where the client lacks the forward's result. The
gradient of the input was passed on the first time, and is not sent again.
"""

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from jaxdt.run.work import WorkKind

FAILURES_MAX = 3  # leases of a task that workers have not kept; then only the server may have it


class State(enum.Enum):
    ABSENT = enum.auto()
    QUEUED = enum.auto()
    LEASED = enum.auto()
    DONE = enum.auto()
    COMMITTED = enum.auto()


class Verdict(enum.Enum):
    """The fate of a result. DUPLICATE: it came before. STALE: its lease had run out."""

    ACCEPTED = enum.auto()
    DUPLICATE = enum.auto()
    STALE = enum.auto()


@dataclass(frozen=True)
class Lease:
    """A task that `client` may do until deadline_s. `with_forward`: of a backward whose client has to do the forward
    first. `is_redo`: the gradient of the input was passed on before."""

    number: int
    kind: WorkKind
    microbatch: int
    client: int
    deadline_s: float
    granted_s: float
    with_forward: bool = False
    is_redo: bool = False


@dataclass
class _Task:
    state: State = State.ABSENT
    client: int | None = None  # that did it, or has its lease
    lease: int = 0  # the number of the last one
    n_failures: int = 0
    late: set[int] = field(default_factory=set)  # clients whose lease of it ran out, and who may have done it yet


class _Unit:
    """A microbatch. `forward.client` is whoever holds the result that the backward needs; None: it is lost."""

    def __init__(self):
        self.forward = _Task()
        self.backward = _Task()
        self.has_gradient = False
        self.is_redo = False


class TaskTable:
    """The tasks of the microbatches `numbers` at `server`; see the module text. The methods that change a state say so
    by their name, and are without effect when called twice."""

    def __init__(self, numbers: Iterable[int], server: int, is_last_stage: bool, lease_numbers: Iterator[int]):
        self._units = {m: _Unit() for m in numbers}
        self._server = server
        self._is_last_stage = is_last_stage
        self._lease_numbers = lease_numbers
        self._leases: dict[int, Lease] = {}
        self._accepted: set[int] = set()  # leases whose result came
        self._queued: dict[WorkKind, set[int]] = {WorkKind.FORWARD: set(), WorkKind.BACKWARD: set()}
        self._in_flight: defaultdict[int, set[int]] = defaultdict(set)  # client -> its forwards before their backward
        self._uncommitted: defaultdict[int, dict[int, int]] = defaultdict(dict)  # client -> microbatch -> lease
        self._n_committed = 0

    def __contains__(self, m: int) -> bool:
        return m in self._units

    # -------------------------------------------------------------------------------------------------- what is here

    def input_arrived(self, m: int) -> None:
        unit = self._units[m]
        kind = WorkKind.BACKWARD if self._is_last_stage else WorkKind.FORWARD
        if self._task(unit, kind).state is State.ABSENT:
            self._queue(m, kind)

    def gradient_arrived(self, m: int) -> None:
        """The gradient of a microbatch's output is here."""
        unit = self._units[m]
        unit.has_gradient = True
        self._queue_backward_if_ready(m, unit)

    # -------------------------------------------------------------------------------------------------------- leases

    def next_task(
        self, client: int, in_flight_max: int, last: WorkKind = WorkKind.FORWARD
    ) -> tuple[WorkKind, int] | None:
        """The kind and microbatch that the client should have next: the other kind than the `last` one if there is one,
        then the oldest. A forward only while the client has fewer than `in_flight_max` of them without their backward.
        A backward is for the client that did the forward, as long as that one has the result."""
        for kind in (
            (WorkKind.BACKWARD, WorkKind.FORWARD) if last == WorkKind.FORWARD else (WorkKind.FORWARD, WorkKind.BACKWARD)
        ):
            if kind == WorkKind.FORWARD and len(self._in_flight[client]) >= in_flight_max:
                continue
            allowed = [m for m in self._queued[kind] if self.may_have(client, kind, m)]
            if allowed:
                return kind, min(allowed)
        return None

    def may_have(self, client: int, kind: WorkKind, m: int) -> bool:
        """Whether a task may be the client's. Not if workers have failed at it too often, if another client has the
        forward's result, or if the client may have the gradient in its accumulator from a lease that has run out."""
        unit = self._units[m]
        task = self._task(unit, kind)
        if client != self._server and task.n_failures >= FAILURES_MAX:
            return False
        return kind == WorkKind.FORWARD or (unit.forward.client in (None, client) and client not in task.late)

    def own_backward(self, client: int) -> int | None:
        """The oldest microbatch whose queued backward is for this client alone."""
        return min(
            (m for m in self._queued[WorkKind.BACKWARD] if self._units[m].forward.client == client), default=None
        )

    def lease(self, kind: WorkKind, m: int, client: int, now_s: float, deadline_s: float = math.inf) -> Lease:
        """Grant a queued task."""
        unit = self._units[m]
        task = self._task(unit, kind)
        assert task.state is State.QUEUED and self.may_have(client, kind, m)
        with_forward = kind == WorkKind.BACKWARD and not self._is_last_stage and unit.forward.client != client
        is_redo = kind == WorkKind.BACKWARD and unit.is_redo
        lease = Lease(next(self._lease_numbers), kind, m, client, deadline_s, now_s, with_forward, is_redo)
        self._leases[lease.number] = lease
        self._queued[kind].discard(m)
        task.state, task.client, task.lease = State.LEASED, client, lease.number
        if kind == WorkKind.FORWARD:
            self._in_flight[client].add(m)
        return lease

    def n_failures(self, kind: WorkKind, m: int) -> int:
        """How many leases of a task were not kept."""
        return self._task(self._units[m], kind).n_failures

    def leases_of(self, client: int) -> list[Lease]:
        """The client's present leases, the oldest first."""
        return [lease for lease in self._leases.values() if lease.client == client]

    def n_unbound(self, client: int) -> int:
        """The client's present leases of tasks that another client might have got: not the backward of its forward."""
        return sum(
            lease.kind == WorkKind.FORWARD or lease.with_forward or self._is_last_stage
            for lease in self.leases_of(client)
        )

    def held(self, client: int) -> set[int]:
        """The microbatches that the client has yet to do something for."""
        return self._in_flight[client] | {lease.microbatch for lease in self.leases_of(client)}

    @property
    def n_left(self) -> int:
        """Microbatches of which no client has done anything, or would have to do anything."""
        clients = self._in_flight.keys() | {lease.client for lease in self._leases.values()}
        n_held = sum(len(self.held(client)) for client in clients)
        return len(self._units) - self._n_committed - sum(map(len, self._uncommitted.values())) - n_held

    def lease_of(self, number: int) -> Lease | None:
        """A present lease; None if it has run out, or its result has come."""
        return self._leases.get(number)

    @property
    def next_deadline_s(self) -> float:
        """When the next lease runs out; inf if none does."""
        return min((lease.deadline_s for lease in self._leases.values()), default=math.inf)

    def finish(self, number: int) -> Verdict:
        """The result of a lease has come: its task is done, if the lease is a present one."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return Verdict.DUPLICATE if number in self._accepted else Verdict.STALE
        self._accepted.add(number)
        m, client = lease.microbatch, lease.client
        unit = self._units[m]
        task = self._task(unit, lease.kind)
        task.state = State.DONE
        if lease.kind == WorkKind.FORWARD:
            self._queue_backward_if_ready(m, unit)
            return Verdict.ACCEPTED
        unit.is_redo = True  # from now on: its input gradient is passed on
        self._end_flight(m, unit)
        self._uncommitted[client][m] = number
        return Verdict.ACCEPTED

    @property
    def n_queued(self) -> int:
        """Tasks that could be done and are not leased."""
        return sum(map(len, self._queued.values()))

    def expire(self, now_s: float) -> list[Lease]:
        """The leases that have run out; their tasks are queued again, for anybody."""
        expired = [lease for lease in self._leases.values() if lease.deadline_s <= now_s]
        for lease in expired:
            self._task(self._units[lease.microbatch], lease.kind).late.add(lease.client)
            self._requeue(lease)
        return expired

    def distrust(self, client: int) -> None:
        """Only the server may do again the tasks that the client has done and not contributed."""
        for m in self._uncommitted[client]:
            self._units[m].backward.n_failures = FAILURES_MAX

    def void(self, client: int) -> list[int]:
        """The client is lost, with all that it has not contributed; the microbatches whose backward has to be done
        again."""
        for lease in self.leases_of(client):
            self._requeue(lease)
        for m in list(self._in_flight[client]):
            self._end_flight(m, self._units[m])
        for unit in self._units.values():
            unit.backward.late.discard(client)  # its accumulator starts again
        lost = sorted(self._uncommitted.pop(client, ()))
        for m in lost:
            self._units[m].backward.client = None
            self._queue(m, WorkKind.BACKWARD)
        return lost

    # ------------------------------------------------------------------------- tasks that go from server to server

    @property
    def spare(self) -> list[tuple[WorkKind, int]]:
        """The tasks that clients of any server could do, as kind and microbatch, the newest first. Not those of which
        some client may yet hold the gradient, and not those that are for the server alone."""
        spare: list[tuple[WorkKind, int]] = []
        for kind, numbers in self._queued.items():
            for m in numbers:
                unit = self._units[m]
                task = self._task(unit, kind)
                if unit.forward.client is None and not task.late and task.n_failures < FAILURES_MAX:
                    spare.append((kind, m))
        return sorted(spare, key=lambda task: -task[1])

    def give(self, kind: WorkKind, m: int) -> bool:
        """A queued task goes to another server, and with it the microbatch. Whether the gradient of its input was
        passed on before."""
        self._queued[kind].remove(m)
        return self._units.pop(m).is_redo

    def take(self, kind: WorkKind, m: int, is_redo: bool) -> None:
        """A task comes from another server, or comes back. All that it reads is here."""
        unit = self._units[m] = _Unit()
        unit.is_redo = is_redo
        if kind == WorkKind.BACKWARD and not self._is_last_stage:
            unit.forward.state = State.DONE
            unit.has_gradient = True
        self._queue(m, kind)

    # ------------------------------------------------------------------------------------------------- contributions

    @property
    def is_done(self) -> bool:
        """Whether the gradient of every microbatch is in some client's accumulator."""
        return self._n_committed + sum(map(len, self._uncommitted.values())) == len(self._units)

    @property
    def is_committed(self) -> bool:
        """Whether the gradient of every microbatch is in the server's accumulator."""
        return self._n_committed == len(self._units)

    @property
    def contributors(self) -> list[int]:
        """The clients that have done something and not contributed it."""
        return sorted(client for client, done in self._uncommitted.items() if done)

    def contribution(self, client: int) -> tuple[tuple[int, int], ...]:
        """The tasks that the client has done and not contributed, as (microbatch, lease)."""
        return tuple(sorted(self._uncommitted[client].items()))

    def commit(self, client: int, items: tuple[tuple[int, int], ...]) -> bool:
        """The server adds the client's contribution, if it holds exactly what the client has done."""
        if not items or items != self.contribution(client):
            return False
        for m, _ in items:
            self._units[m].backward.state = State.COMMITTED
        self._n_committed += len(items)
        del self._uncommitted[client]
        return True

    # ------------------------------------------------------------------------------------------------------- details

    @staticmethod
    def _task(unit: _Unit, kind: WorkKind) -> _Task:
        return unit.forward if kind == WorkKind.FORWARD else unit.backward

    def _queue(self, m: int, kind: WorkKind) -> None:
        self._task(self._units[m], kind).state = State.QUEUED
        self._queued[kind].add(m)

    def _queue_backward_if_ready(self, m: int, unit: _Unit) -> None:
        if unit.has_gradient and unit.forward.state is State.DONE and unit.backward.state is State.ABSENT:
            self._queue(m, WorkKind.BACKWARD)

    def _end_flight(self, m: int, unit: _Unit) -> None:
        """The result of the forward is lost, or not needed."""
        if unit.forward.client is not None:
            self._in_flight[unit.forward.client].discard(m)
            unit.forward.client = None

    def _requeue(self, lease: Lease) -> None:
        del self._leases[lease.number]
        unit = self._units[lease.microbatch]
        task = self._task(unit, lease.kind)
        self._end_flight(lease.microbatch, unit)
        task.client = None
        task.n_failures += 1
        self._queue(lease.microbatch, lease.kind)
