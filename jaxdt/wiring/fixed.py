"""Fixed wiring: the plan's pipelines, each peer following its printed order strictly.

A step's order is the schedule's (GPipe or 1F1B), preceded in some steps by the held-out microbatches. The next Work
runs as soon as its input is here; nothing is ever done out of turn. A boundary tensor goes to the neighbour in the
same pipeline, and nobody is told anything else.

That is so while every place of the plan is taken. A view in mid-step, and every step while a place is open, are
SwarmWiring's: it finds out who has counted what and has the rest done, with PlannedRoutes, which lead each microbatch
through its own pipeline and past an open place by way of another pipeline's replica. Which of the two does a step
follows from the view, so that all members agree; this machine does a step from its start or not at all, and what it has
counted and kept when a view comes in between is the other's to go on with.
"""

from collections import deque
from collections.abc import Sequence

from jaxdt.protocol.events import (
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
from jaxdt.protocol.schedule import Order, stage_order
from jaxdt.spec.eval_schedule import n_held_out
from jaxdt.spec.plan import Plan
from jaxdt.spec.work import BACKWARD, EVALUATE, FORWARD, Work
from jaxdt.wiring.pipeline_assignment import PlannedRoutes, Seats, lineup
from jaxdt.wiring.retention import Retention
from jaxdt.wiring.service_time import ServiceTime
from jaxdt.wiring.swarm import COMPUTING, SwarmWiring

NEVER = float("inf")


class FixedWiring:
    """One peer's side. `boundary_bytes`: payload of an activation that it sends and of a gradient, for each pipeline;
    `evals`: measure the held-out loss every so many steps, on so many microbatches; `retain_bytes`: see Retention."""

    READS = frozenset({ViewChanged, Evicted, Updated, Boundary, Ran, Grant, Resend, Inventory, Progress})

    def __init__(
        self,
        plan: Plan,
        peer: int,
        stage: int,
        n_steps: int,
        boundary_bytes: Sequence[tuple[int, int]],
        evals: tuple[int, int],
        retain_bytes: int,
    ):
        self._plan, self._peer, self._stage, self._n_steps = plan, peer, stage, n_steps
        self._first, self._last = stage == 0, stage == plan.n_stages - 1
        self._boundary_bytes = boundary_bytes
        self._evals = evals
        most_bytes = (max(forth for forth, _ in boundary_bytes), max(back for _, back in boundary_bytes))
        self._retention = Retention(stage, plan.n_stages, most_bytes, retain_bytes)
        sizes, routes = (plan.n_stages, plan.n_microbatches, n_steps), PlannedRoutes(plan, peer)
        self._detour = SwarmWiring(peer, stage, *sizes, boundary_bytes, evals, routes, self._retention, ServiceTime())
        self._pipeline: int | None = None
        self._order: Order = ()
        self._next_to: dict[bool, tuple[int | None, int]] = {}
        self._strict_from = NEVER  # the first step of the view that is done here
        self._step = -1
        self._work: deque[Work] = deque()
        self._arrived: set[tuple[str, int, int, int]] = set()  # fields of keys, which are quicker to compare
        self._counted: set[tuple[str, int]] = set()

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        kind = type(event)
        if kind is Ran:
            work = event.work
            if self._work and work.step == self._step and work.kind in COMPUTING:
                self._detour.running = None
                self._work.popleft()
                return self._finished(work, event.values) + self._next()
        elif kind is Received:
            if type(event.body) is Boundary and event.body.key.step >= self._strict_from:
                key = event.body.key
                self._arrived.add((key.kind, key.step, key.stage, key.microbatch))
                return self._next()
        elif kind is Updated:
            if event.version >= self._strict_from:
                return self._begin(event.version)
        elif kind is ViewChanged:
            return self._adopt(now_s, event.view)
        elif kind is Evicted:
            self._stop()
        return self._detour.handle(now_s, event) + self._next()

    def _adopt(self, now_s: float, view: View) -> list[Action | Event]:
        """All steps of the first view are strict, and of later ones those that begin after the one under way."""
        self._stop()
        now = lineup(self._plan, view, [member.peer for member in view.members])
        self._pipeline = now.pipeline_of(self._stage, self._peer)
        if self._pipeline is not None:
            self._order = stage_order(self._plan, self._stage, self._pipeline)
            self._next_to = self._neighbours(now.seats)
        if now.whole:
            self._strict_from = view.n_committed + (view.number > 1)
        if view.n_committed < self._strict_from:
            return self._detour.handle(now_s, ViewChanged(view))
        self._detour.see(view)
        return []

    def let_go(self) -> None:
        """The Work that should run now will not be done."""
        self._detour.let_go()

    def _stop(self) -> None:
        """What is left of a step is not done here."""
        self._strict_from = NEVER
        self._arrived.clear()
        self._work.clear()

    def _begin(self, step: int) -> list[Action | Event]:
        if step >= self._n_steps:
            return []
        self._step, self._counted = step, self._detour.stand_by(step)
        if self._pipeline is None:
            return [Drained(step)]  # in reserve
        self._work = deque((*self._evaluations(step), *self._order))
        return self._next()

    def _evaluations(self, step: int) -> list[Work]:
        """Held-out microbatches are dealt over the pipelines; measured every n steps and in the last one."""
        n_evals = n_held_out(self._evals, step, self._n_steps)
        return [Work(self._stage, EVALUATE, m) for m in range(self._pipeline, n_evals, self._plan.n_pipelines)]

    def _next(self) -> list[Action]:
        if self._detour.running or not self._work:
            return []
        work = self._work[0]
        key = self._need(work)
        if key is not None:
            if key not in self._arrived:
                return []
            self._arrived.remove(key)
        self._detour.running = work = Work(self._stage, work.kind, work.microbatch, self._peer, self._step)
        return [Run(work)]

    def _need(self, work: Work) -> tuple[str, int, int, int] | None:
        """The fields of the tensor's key that must have come over a link before this Work may run."""
        if work.kind == BACKWARD:
            return None if self._last else ("grad", self._step, self._stage + 1, work.microbatch)
        kind = "act" if work.kind == FORWARD else "eval"
        return None if self._first else (kind, self._step, self._stage, work.microbatch)

    def _finished(self, work: Work, values: dict[str, float]) -> list[Action | Event]:
        step, stage, m = self._step, self._stage, work.microbatch
        told: list[Action | Event] = self._retention.made(work)
        if work.kind == BACKWARD:
            self._counted.add((BACKWARD, m))
            told.append(Accumulated(step, stage, m, int(values.get("n_samples", 0)), values.get("loss_sum")))
            if not self._first:
                told.append(self._send(Key("grad", step, stage, m), back=True))
            if not self._work:
                told.append(Drained(step))
        elif not self._last:
            told.append(self._send(Key("act" if work.kind == FORWARD else "eval", step, stage + 1, m), back=False))
        elif work.kind == EVALUATE:
            self._counted.add((EVALUATE, m))
            told.append(Evaluated(step, int(values.get("n_samples", 0)), values.get("loss_sum")))
        return told

    def _send(self, key: Key, back: bool) -> Send:
        peer, n_bytes = self._next_to[back]
        return Send(peer, Boundary(key), n_bytes)

    def _neighbours(self, seats: Seats) -> dict[bool, tuple[int | None, int]]:
        """Who gets our activations and (True) our gradients, and the bytes of one."""
        n_bytes = self._boundary_bytes[self._pipeline]
        stages = {back: self._stage - 1 if back else self._stage + 1 for back in (False, True)}
        there = {back: seats[stage][self._pipeline] for back, stage in stages.items() if 0 <= stage < len(seats)}
        return {back: (peer, n_bytes[back]) for back, peer in there.items()}
