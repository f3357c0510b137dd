"""Stochastic wiring (SWARM Sec. 3.2): any peer of a stage may get any microbatch, routers choose by measured speed.

A router is a peer that also steers its share of the microbatches, as many at a time as its window allows. It chooses
the whole route when a microbatch begins and sends it along, so no hop waits for a choice; boundary tensors go from peer
to peer, and backward retraces the route. Each peer keeps a queue of what has arrived: a backward goes before a forward,
then the oldest, so a device stays busy while others or the network are slow. The replicas of a stage tell one another
which microbatches they counted: a stage's step is over when all are.
A view in mid-step voids all routes (messages of old views are dropped): each member says what it has counted, and the
routers have the rest done again, from tensors that their makers keep until the step is committed. A microbatch that a
live member counted is never given out again; what a lost one counted left with its accumulator. Who joins computes from
the next step on.
"""

import heapq
from collections.abc import Sequence

from jaxdt.protocol.events import (
    NOBODY,
    Accumulated,
    Action,
    Boundary,
    Drained,
    Evaluated,
    Event,
    Evicted,
    Grant,
    Inventory,
    Key,
    Message,
    Progress,
    Ran,
    Received,
    Resend,
    Run,
    Send,
    Updated,
    View,
    ViewChanged,
)
from jaxdt.spec.eval_schedule import n_held_out
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, REGENERATE, Work
from jaxdt.wiring.dispatcher import Dispatcher, whole_step
from jaxdt.wiring.recovery import RecoveryState
from jaxdt.wiring.retention import Retention
from jaxdt.wiring.route_policy import RoutePolicy
from jaxdt.wiring.service_time import ServiceTime

Counted = tuple[str, int]
COMPUTING = (FORWARD, BACKWARD, REGENERATE, EVALUATE)
WORK_OF = {"act": FORWARD, "grad": BACKWARD, "eval": EVALUATE}


class SwarmWiring:
    """One peer's side. `boundary_bytes`: payload of an activation that it sends and of a gradient, for each pipeline of
    `routes`; `evals`: measure the held-out loss every so many steps, on so many microbatches. `running` is the Work
    under way."""

    READS = frozenset({ViewChanged, Evicted, Updated, Grant, Resend, Inventory, Progress, Boundary, Ran})

    def __init__(
        self,
        peer: int,
        stage: int,
        n_stages: int,
        n_microbatches: int,
        n_steps: int,
        boundary_bytes: Sequence[tuple[int, int]],
        evals: tuple[int, int],
        routes: RoutePolicy,
        retention: Retention,
        pace: ServiceTime,
    ):
        self._peer, self._stage, self._n_stages = peer, stage, n_stages
        self._n_microbatches, self._n_steps, self._last = n_microbatches, n_steps, stage == n_stages - 1
        self._boundary_bytes = boundary_bytes
        self._evals = evals
        self._routes, self._steering, self._retention, self._pace = routes, Dispatcher(routes), retention, pace
        self._view: View | None = None
        self._members = self._replicas = ()
        self._step, self._order = -1, 0
        self.running: Work | None = None
        self._gap_s = 0.0
        self._ready: list[tuple[bool, int, Work]] = []
        self._later: list[Grant | Boundary] = []
        self._paths: dict[Counted, Grant | Boundary] = {}
        self._forwarded: set[int] = set()
        self._gradients: set[int] = set()
        self._own: set[Counted] = set()
        self._counted: dict[int, set[Counted]] = {}
        self._inventory: RecoveryState | None = None
        self._told = True

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case ViewChanged(view):
                return self._adopt(now_s, view)
            case Evicted():
                self._forget()
                self._view = None
            case Updated(_, version) if self._view:
                return self._begin(now_s, version)
            case Received(header, body) if self._view:
                return self._received(now_s, header.src, body)
            case Ran(work, started_s, seconds, values) if work.kind in COMPUTING:
                self.running, self._gap_s = None, self._pace.gap_s(started_s + seconds)
                return self._finished(now_s, work, values) + self._next() + self._tell(now_s)
        return []

    @property
    def queue(self) -> tuple[int, bool]:
        """How much Work waits here, and whether some runs."""
        return len(self._ready), self.running is not None

    def _received(self, now_s: float, src: int, body: Message) -> list[Action | Event]:
        match body:
            case Grant() | Boundary():
                self._take(body)
                return self._next()
            case Resend(key, route, regenerate):
                return [self._send(Boundary(key, route, regenerate))]
            case Inventory():
                return self._on_have(now_s, src, body)
            case Progress():
                return self._on_progress(now_s, body)
        return []

    # -------------------------------------------------------------------------------------------------------- steps

    def see(self, view: View) -> None:
        """A view; what was under way is void."""
        self._view = view
        self._members = tuple(member.peer for member in view.members if member.first_step <= view.n_committed)
        self._replicas = view.stage_peers(self._stage)
        self._routes.adopt(view, self._members)
        self._steering.begin([])
        for kept in (self._ready, self._later, self._paths, self._forwarded, self._gradients, self._counted):
            kept.clear()

    def _adopt(self, now_s: float, view: View) -> list[Action | Event]:
        self.see(view)
        if view.rolled_back or self._peer not in self._members:
            self._forget()
        if view.number > 1 and self._peer in self._members:  # also of a rollback: nobody sends before all have let go
            self._inventory, self._told = RecoveryState(view), False
        return self._tell(now_s)

    def _forget(self) -> None:
        """Nothing is under way here until the next step begins."""
        self._step, self._inventory, self._told = -1, None, True
        self._own.clear()
        self._ready.clear()

    def _begin(self, now_s: float, step: int) -> list[Action | Event]:
        if self._peer not in self._view.working(self._stage, step):
            return []
        self._enter(step)
        if step >= self._n_steps:
            return []
        later, self._later = self._later, []
        for given in later:
            self._take(given)
        if self._inventory:
            return self._tell(now_s)
        self._routes.welcome(self._view)
        tasks = whole_step(self._n_stages, self._n_microbatches, self._n_evaluations(step))
        self._steering.begin([task for task in tasks if self._mine(task.kind, task.microbatch)])
        return self._grant(now_s) + self._next() + self._drained()

    def _enter(self, step: int) -> None:
        """A step begins; nothing is left of the one before."""
        self._step = step
        for kept in (self._ready, self._own, self._forwarded, self._gradients, self._paths):
            kept.clear()
        self._retention.begin()
        self._counted = {of: counted for of, counted in self._counted.items() if of >= step}
        if self._view.n_committed < step:
            self._inventory = None  # what a view in mid-step asked for was of an earlier step

    def let_go(self) -> None:
        """The Work that should run now will not be done."""
        self.running = None

    def stand_by(self, step: int) -> set[Counted]:
        """Another machine of this peer works through a step; what it counts it is to add to the answer, so that the
        step can be finished here if a view asks for that."""
        self._enter(step)
        self._steering.begin([])
        return self._own

    def _mine(self, kind: str, microbatch: int) -> bool:
        return self._routes.owning_router(kind, microbatch) == self._peer

    def _n_evaluations(self, step: int) -> int:
        return n_held_out(self._evals, step, self._n_steps)

    # --------------------------------------------------------------------------------------------------------- work

    def _take(self, given: Grant | Boundary) -> None:
        """Queue the Work that a grant or a boundary tensor makes possible; of a step to come, keep it."""
        what = given if isinstance(given, Grant) else given.key
        kind, m = WORK_OF.get(what.kind, what.kind), what.microbatch
        if what.step > self._step:
            self._later.append(given)
        elif what.step == self._step:
            if kind == BACKWARD and m not in self._forwarded:
                self._gradients.add(m)  # the forward is being made again, and not here yet
                return
            if kind != BACKWARD:
                self._paths[kind, m] = given
            if kind == FORWARD and self._last:
                kind = BACKWARD  # which computes forward, loss and backward in one
            self._queue(kind, m)

    def _queue(self, kind: str, m: int) -> None:
        if kind == BACKWARD and self._stage in self._paths[FORWARD, m].regenerate:
            kind = REGENERATE
        self._order += 1
        work = Work(self._stage, kind, m, self._peer, self._step)
        heapq.heappush(self._ready, (kind in (FORWARD, EVALUATE), self._order, work))

    def _next(self) -> list[Action]:
        if self.running or not self._ready:
            return []
        self.running = heapq.heappop(self._ready)[2]
        return [Run(self.running)]

    def _finished(self, now_s: float, work: Work, values: dict[str, float]) -> list[Action | Event]:
        if work.step != self._step:
            return []  # of a generation that was rolled back
        step, kind, m = work.step, work.kind, work.microbatch
        n_samples, loss_sum = int(values.get("n_samples", 0)), values.get("loss_sum")
        told: list[Action | Event] = [*self._retention.made(work)]
        if kind == BACKWARD:
            told.append(Accumulated(step, self._stage, m, n_samples, loss_sum))
        if kind == EVALUATE and self._last:
            told.append(Evaluated(step, n_samples, loss_sum))
        if self._counts(kind):
            self._own.add((kind, m))
        path = self._paths.get((_task_kind(kind), m))
        if path is None:
            return told  # of a view that is over; what it counted we shall say
        if kind == FORWARD:
            self._forwarded.add(m)
            if m in self._gradients:
                self._queue(BACKWARD, m)
        return told + self._pass_on(work, path) + self._tell_progress(now_s, work)

    def _pass_on(self, work: Work, path: Grant | Boundary) -> list[Action]:
        """The result goes to the next peer of the route, if there is one."""
        stage, m = self._stage, work.microbatch
        if work.kind in (BACKWARD, REGENERATE):
            key, to = Key("grad", work.step, stage, m), stage - 1
        else:
            key, to = Key("act" if work.kind == FORWARD else "eval", work.step, stage + 1, m), stage + 1
        if not 0 <= to < self._n_stages or path.route[to] == NOBODY:
            return []
        return [self._send(Boundary(key, path.route, path.regenerate))]

    def _send(self, boundary: Boundary) -> Send:
        key = boundary.key
        back = key.kind == "grad"
        pipeline = self._routes.pipeline_of(EVALUATE if key.kind == "eval" else FORWARD, key.microbatch)
        return Send(boundary.route[key.stage - back], boundary, self._boundary_bytes[pipeline][back])

    # ----------------------------------------------------------------------------------------------------- progress

    def _counts(self, kind: str) -> bool:
        """Whether the replicas of a stage wait for such a Work before the step is over there."""
        return kind == BACKWARD or (kind == EVALUATE and self._last)

    def _tell_progress(self, now_s: float, work: Work) -> list[Action | Event]:
        progress = Progress(work.step, work.kind, work.stage, work.microbatch, self._gap_s)
        to = {self._routes.owning_router(_task_kind(work.kind), work.microbatch)}
        if self._counts(work.kind):
            to.update(self._replicas)
        own = self._on_progress(now_s, progress)
        return [Send(peer, progress) for peer in sorted(to - {self._peer})] + own

    def _on_progress(self, now_s: float, progress: Progress) -> list[Action | Event]:
        step, kind, stage, m = progress.step, progress.kind, progress.stage, progress.microbatch
        told: list[Action | Event] = []
        if step == self._step and self._mine(_task_kind(kind), m):
            self._steering.progress(now_s, progress)
            told += self._grant(now_s)
        if stage == self._stage and self._counts(kind):
            self._counted.setdefault(step, set()).add((kind, m))
            told += self._drained() if step == self._step else []
        return told

    def _drained(self) -> list[Event]:
        """Our stage's step is over when every microbatch is counted at one of its replicas."""
        if self._inventory and not self._inventory.has_all(set(self._replicas) & set(self._members)):
            return []
        n_expected = self._n_microbatches + (self._n_evaluations(self._step) if self._last else 0)
        return [Drained(self._step)] if len(self._counted.get(self._step, ())) == n_expected else []

    def _grant(self, now_s: float) -> list[Action]:
        """Begin tasks: the first stage needs a grant, others the tensors that their neighbours keep."""
        sends: list[Action] = []
        for task, route in self._steering.next(now_s):
            kind, m, regenerate = task.kind, task.microbatch, task.regenerate
            if task.lo == 0:
                sends += self._post(route[0], Grant(self._step, kind, m, route, regenerate))
            else:
                key = Key("act", self._step, task.lo, m)
                sends += self._post(self._inventory.keepers(m)[task.lo - 1], Resend(key, route, regenerate))
            if task.hi < self._n_stages - 1:
                key = Key("grad", self._step, task.hi + 1, m)
                sends += self._post(self._inventory.keepers(m)[task.hi + 1], Resend(key, route, regenerate))
        return sends

    def _post(self, dst: int, body: Grant | Resend) -> list[Action]:
        """To another peer, or to ourselves at once."""
        return [Send(dst, body)] if dst != self._peer else self._received(0.0, self._peer, body)

    # ------------------------------------------------------------------------------------- after a view in mid-step

    def _tell(self, now_s: float) -> list[Action | Event]:
        """Say what we counted, as soon as we are in the view's step and nothing runs that might still be counted."""
        if self._told or self.running or not self._step == self._view.n_committed < self._n_steps:
            return []
        self._told = True
        have = Inventory(self._step, tuple(sorted(self._own)), self._retention.promise())
        sends = [Send(peer, have) for peer in self._members if peer != self._peer]
        return sends + self._on_have(now_s, self._peer, have)

    def _on_have(self, now_s: float, src: int, have: Inventory) -> list[Action | Event]:
        if self._inventory is None or have.step != self._view.n_committed:
            return []
        self._inventory.add(src, have)
        if src in self._replicas:
            self._counted.setdefault(have.step, set()).update(have.counted)
        told: list[Action | Event] = []
        if self._step == have.step:
            if self._inventory.has_all(self._members):
                n, n_evals = self._n_microbatches, self._n_evaluations(have.step)
                tasks = [task for m in range(max(n, n_evals)) for task in self._inventory.missing(m, n, n_evals)]
                self._steering.begin([task for task in tasks if self._mine(task.kind, task.microbatch)])
                told += self._grant(now_s)
            told += self._next() + self._drained()
        return told


def _task_kind(kind: str) -> str:
    """Of the task that a Work belongs to."""
    return EVALUATE if kind == EVALUATE else FORWARD
