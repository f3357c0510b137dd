"""Stochastic wiring (SWARM Sec. 3.2): any peer of a stage may get any microbatch, routers choose by measured speed.

A router is a peer that also steers its share of the microbatches, as many at a time as its window allows. It chooses
the whole route when a microbatch begins and sends it along, so no hop waits for a choice; boundary tensors go from peer
to peer, and backward retraces the route. Each peer keeps a queue of what has arrived: a backward goes before a forward,
then the oldest, so a device stays busy while others or the network are slow. The replicas of a stage tell one another
which microbatches they counted: a stage's step is over when all are.
"""

import heapq

from jaxdt.core.events import (
    BACKWARD,
    EVALUATE,
    FORWARD,
    Accumulated,
    Action,
    Boundary,
    Drained,
    Evaluated,
    Event,
    Grant,
    Key,
    Progress,
    Ran,
    Received,
    Run,
    Send,
    Updated,
    View,
    ViewChanged,
    Work,
)
from jaxdt.wiring.router import Router

Microbatch = tuple[str, int]


class Steering:
    """One router's side of a step: which of its microbatches wait, and which are on their way, on what route."""

    def __init__(self, n_stages: int, seed: str, window: int):
        self._router, self._window = Router(n_stages, seed), window
        self._n_stages = n_stages
        self._waiting: list[Microbatch] = []
        self._open: dict[Microbatch, tuple[tuple[int, ...], float]] = {}

    def adopt(self, view: View) -> None:
        """The peers of a view; one who left is not chosen any more."""
        for stage, queue in enumerate(self._router.stages):
            here, known = set(view.stage_peers(stage)), set(queue.priorities)
            for peer in sorted(here - known):
                queue.add(peer)
            for peer in known - here:
                queue.ban(peer)

    def begin(self, microbatches: list[Microbatch]) -> None:
        """A step's microbatches of this router; what was under way is forgotten."""
        self._waiting, self._open = list(reversed(microbatches)), {}

    def grants(self, now_s: float, step: int) -> list[Grant]:
        """Begin as many as the window allows."""
        granted = []
        while self._waiting and len(self._open) < self._window:
            route = self._router.route()
            if route is None:
                break
            kind, m = microbatch = self._waiting.pop()
            self._open[microbatch] = route, now_s
            granted.append(Grant(step, kind, m, route))
        return granted

    def progress(self, now_s: float, kind: str, stage: int, m: int) -> None:
        """A Work of one of the microbatches is done: it measures the peer, and the last one makes room for another."""
        microbatch = (EVALUATE if kind == EVALUATE else FORWARD, m)
        if microbatch not in self._open:
            return
        route, since_s = self._open[microbatch]
        if kind != EVALUATE:
            self._router.stages[stage].measured(route[stage], kind, since_s, now_s)
        if (kind, stage) in ((BACKWARD, 0), (EVALUATE, self._n_stages - 1)):
            del self._open[microbatch]
        else:
            self._open[microbatch] = route, now_s


class SwarmWiring:
    """One peer's side. `boundary_bytes` and `evals` as in FixedWiring; `n_routers` peers with the least ids steer, with
    `window` microbatches on their way in all."""

    READS = frozenset({ViewChanged, Updated, Grant, Progress, Boundary, Ran})

    def __init__(
        self,
        peer: int,
        stage: int,
        n_stages: int,
        n_microbatches: int,
        n_steps: int,
        boundary_bytes: tuple[int, int],
        evals: tuple[int, int],
        n_routers: int,
        window: int,
        seed: int,
    ):
        self._peer, self._stage, self._n_stages = peer, stage, n_stages
        self._last = stage == n_stages - 1
        self._n_microbatches, self._n_steps = n_microbatches, n_steps
        self._activation_bytes, self._gradient_bytes = boundary_bytes
        self._eval_every_steps, self._n_evals = evals
        self._n_routers = n_routers
        self._steering = Steering(n_stages, f"{seed} {peer}", max(1, window // n_routers))
        self._routers: tuple[int, ...] = ()
        self._replicas: tuple[int, ...] = ()
        self._step = -1
        self._running: Work | None = None
        self._order = 0
        self._ready: list[tuple[int, int, Work]] = []
        self._later: list[Grant | Boundary] = []
        self._routes: dict[tuple[int, Microbatch], tuple[int, ...]] = {}
        self._counted: dict[int, set[Microbatch]] = {}

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case ViewChanged(view):
                return self._adopt(now_s, view)
            case Updated(_, version):
                return self._begin(now_s, version)
            case Received(_, (Grant() | Boundary()) as given):
                self._take(given)
                return self._next()
            case Received(_, Progress() as progress):
                return self._on_progress(now_s, progress)
            case Ran(work, _, _, values) if work.kind in (FORWARD, BACKWARD, EVALUATE):
                self._running = None
                return self._finished(now_s, work, values) + self._next()
        return []

    def _adopt(self, now_s: float, view: View) -> list[Action | Event]:
        self._routers = tuple(sorted(member.peer for member in view.members))[: self._n_routers]
        self._replicas = view.stage_peers(self._stage)
        self._steering.adopt(view)
        self._ready.clear()
        self._later.clear()
        self._routes.clear()
        self._counted.clear()
        if view.rolled_back:
            self._step = -1
            return []
        return self._begin(now_s, view.n_committed)

    def _begin(self, now_s: float, step: int) -> list[Action | Event]:
        if step >= self._n_steps:
            return []
        self._step = step
        self._counted.pop(step - 1, None)
        later, self._later = self._later, []
        for given in later:
            self._take(given)
        started: list[Action | Event] = []
        if self._peer in self._routers:
            rank = self._routers.index(self._peer)
            evals = [(EVALUATE, m) for m in range(self._n_evaluations(step))]
            all_of_step = [*evals, *((FORWARD, m) for m in range(self._n_microbatches))]
            self._steering.begin([(kind, m) for kind, m in all_of_step if m % len(self._routers) == rank])
            started = self._grant(now_s)
        return started + self._next() + self._drained()

    def _n_evaluations(self, step: int) -> int:
        every = self._eval_every_steps
        return self._n_evals if every and (step % every == 0 or step == self._n_steps - 1) else 0

    # --------------------------------------------------------------------------------------------------------- work

    def _take(self, given: Grant | Boundary) -> None:
        """Queue the Work that a grant or a boundary tensor makes possible; of a step to come, keep it."""
        step = given.step if isinstance(given, Grant) else given.key.step
        if step > self._step:
            self._later.append(given)
        elif step == self._step:
            self._order += 1
            work = self._work_of(given)
            heapq.heappush(self._ready, (work.kind != BACKWARD, self._order, work))

    def _work_of(self, given: Grant | Boundary) -> Work:
        if isinstance(given, Grant):
            kind, m, step = given.kind, given.microbatch, given.step
        else:
            kind, m, step = given.key.kind, given.key.microbatch, given.key.step
            kind = {"act": FORWARD, "grad": BACKWARD, "eval": EVALUATE}[kind]
        if kind != BACKWARD:
            self._routes[step, (kind, m)] = given.route
        if kind == FORWARD and self._last:
            kind = BACKWARD  # which computes forward, loss and backward in one
        return Work(self._stage, kind, m, self._peer, step)

    def _next(self) -> list[Action]:
        if self._running or not self._ready:
            return []
        self._running = heapq.heappop(self._ready)[2]
        return [Run(self._running)]

    def _finished(self, now_s: float, work: Work, values: dict[str, float]) -> list[Action | Event]:
        step, stage, kind, m = work.step, work.stage, work.kind, work.microbatch
        if step != self._step:
            return []  # of a lineage that was rolled back
        route = self._routes[step, (EVALUATE if kind == EVALUATE else FORWARD, m)]
        told: list[Action | Event] = []
        n_samples, loss_sum = int(values.get("n_samples", 0)), values.get("loss_sum")
        if kind == BACKWARD:
            told.append(Accumulated(step, stage, m, n_samples, loss_sum))
            if stage > 0:
                told.append(self._send(route, Key("grad", step, stage, m), stage - 1))
        elif not self._last:
            name = "act" if kind == FORWARD else "eval"
            told.append(self._send(route, Key(name, step, stage + 1, m), stage + 1))
        else:
            told.append(Evaluated(step, n_samples, loss_sum))
        return told + self._tell_progress(now_s, Progress(step, kind, stage, m))

    def _send(self, route: tuple[int, ...], key: Key, stage: int) -> Send:
        n_bytes = self._activation_bytes if stage > self._stage else self._gradient_bytes
        return Send(route[stage], Boundary(key, route), n_bytes)

    # ----------------------------------------------------------------------------------------------------- progress

    def _counts(self, kind: str) -> bool:
        """Whether the replicas of a stage wait for such a Work before the step is over there."""
        return kind == BACKWARD or (kind == EVALUATE and self._last)

    def _tell_progress(self, now_s: float, progress: Progress) -> list[Action | Event]:
        to = {self._routers[progress.microbatch % len(self._routers)]}
        if self._counts(progress.kind):
            to.update(self._replicas)
        own = self._on_progress(now_s, progress)
        return [Send(peer, progress) for peer in sorted(to - {self._peer})] + own

    def _on_progress(self, now_s: float, progress: Progress) -> list[Action | Event]:
        step, kind, stage, m = progress.step, progress.kind, progress.stage, progress.microbatch
        told: list[Action | Event] = []
        if step == self._step and self._peer in self._routers:
            self._steering.progress(now_s, kind, stage, m)
            told += self._grant(now_s)
        if stage == self._stage and self._counts(kind):
            self._counted.setdefault(step, set()).add((kind, m))
            told += self._drained() if step == self._step else []
        return told

    def _drained(self) -> list[Event]:
        """Our stage's step is over when every microbatch is counted at one of its replicas."""
        n_expected = self._n_microbatches + (self._n_evaluations(self._step) if self._last else 0)
        return [Drained(self._step)] if len(self._counted.get(self._step, ())) == n_expected else []

    def _grant(self, now_s: float) -> list[Action]:
        """Send the grants; one to ourselves is taken at once."""
        sends: list[Action] = []
        for grant in self._steering.grants(now_s, self._step):
            if grant.route[0] == self._peer:
                self._take(grant)
                sends += self._next()
            else:
                sends.append(Send(grant.route[0], grant))
        return sends
