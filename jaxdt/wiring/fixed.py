"""Fixed wiring: the plan's pipelines, each peer following its schedule strictly.

A step's order is the schedule's (GPipe or 1F1B), preceded in some steps by the held-out microbatches. After the last
step these come alone. The next Work
runs as soon as its input is here; nothing is ever done out of turn. A boundary tensor goes to the neighbour in the same
pipeline, and no other message is sent.

This holds while every place of the plan is taken. A step in which a view comes, and every step while a place is open,
are done by a RoutedWiring with PlannedRoutes: each microbatch goes through its own pipeline, and past an open place by
way of another pipeline's replica. Which of the two does a step follows from the view, so all members agree. FixedWiring
does a step from its start or not at all. If a view changes in mid-step, recovery takes over what was counted and kept.
"""

from collections import deque

from jaxdt.protocol import events as ev
from jaxdt.protocol.schedule import Order, stage_order
from jaxdt.run.config import RunConfig
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import COMPUTING, PeerLoad, StepShape, WiringEntry, step_shape
from jaxdt.wiring.compute_slot import ComputeSlot, ServiceTime
from jaxdt.wiring.pipeline_assignment import Places, PlannedRoutes, pipeline_assignment
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring

NEVER = float("inf")


class FixedWiring:
    """One peer's side."""

    READS = RoutedWiring.READS | {ev.ViewChanged, ev.Evicted, ev.Updated, ev.Boundary, ev.Ran}

    def __init__(self, plan: Plan, shape: StepShape):
        self._plan = plan
        self._shape = shape
        self._peer = shape.peer
        self._stage = shape.stage
        self._is_first = shape.stage == 0
        self._is_last = shape.is_last_stage
        self._recovery = Recovery(shape)
        self._slot = ComputeSlot()
        routes = PlannedRoutes(plan, shape.peer)
        self._routed = RoutedWiring(shape, routes, self._recovery, self._slot, ServiceTime())
        self._pipeline: int | None = None  # None: in reserve
        self._order: Order = ()
        self._next_peer: tuple[int | None, int] = (None, 0)  # gets our activations, each of so many bytes
        self._previous_peer: tuple[int | None, int] = (None, 0)  # gets our gradients
        self._strict_from = NEVER  # the first step of the view that is done here
        self._step = -1
        self._work: deque[Work] = deque()
        self._arrived: set[tuple[str, int, int, int]] = set()  # fields of keys, which are quicker to compare

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        if type(event) is ev.Ran:
            work = event.work
            if self._work and work.step == self._step and work.kind in COMPUTING:
                self._slot.free()
                self._work.popleft()
                return self._finished(work, event.values) + self._next()
        elif type(event) is ev.Received:
            body = event.body
            if type(body) is ev.Boundary and body.key.step >= self._strict_from:
                key = body.key
                self._arrived.add((key.kind, key.step, key.stage, key.microbatch))
                return self._next()
        elif type(event) is ev.Updated:
            if event.version >= self._strict_from:
                return self._begin(event.version)
        elif type(event) is ev.ViewChanged:
            return self._adopt(now_s, event.view)
        elif type(event) is ev.WorkOverdue:
            return [ev.StepBlocked()]  # only this peer does what the plan gives to it
        elif type(event) is ev.Evicted:
            self._stop()
        return self._routed.handle(now_s, event) + self._next()

    @property
    def queue(self) -> tuple[int, bool]:
        n_waiting, is_busy = self._routed.queue
        return n_waiting + len(self._work), is_busy

    def cancel_run(self) -> None:
        self._slot.free()

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        """Adopt a view. In the first view all steps are strict; in a later one those after the step under way."""
        self._stop()
        assignment = pipeline_assignment(self._plan, view, [member.peer for member in view.members])
        self._pipeline = assignment.pipeline_of(self._stage, self._peer)
        if self._pipeline is not None:
            self._order = stage_order(self._plan, self._stage, self._pipeline)
            self._find_neighbours(assignment.places, self._pipeline)
        if assignment.is_whole:
            self._strict_from = view.n_committed + (view.number > 1)
        if view.n_committed < self._strict_from:
            return self._routed.handle(now_s, ev.ViewChanged(view))
        self._routed.void_routes(view)
        return []

    def _find_neighbours(self, places: Places, pipeline: int) -> None:
        activation_bytes, gradient_bytes = self._shape.sent_bytes[pipeline]
        if not self._is_last:
            self._next_peer = places[self._stage + 1][pipeline], activation_bytes
        if not self._is_first:
            self._previous_peer = places[self._stage - 1][pipeline], gradient_bytes

    def _stop(self) -> None:
        """The rest of the step is not done here."""
        self._strict_from = NEVER
        self._arrived.clear()
        self._work.clear()

    def _begin(self, step: int) -> ev.Actions:
        if not self._shape.has_work(step):
            return []
        self._step = step
        self._routed.enter_without_tasks(step)
        if self._pipeline is None:
            return self._shape.drained(step)  # in reserve
        order = self._order if self._shape.n_trained(step) else ()
        self._work = deque((*self._evaluations(step, self._pipeline), *order))
        return self._next()

    def _evaluations(self, step: int, pipeline: int) -> list[Work]:
        """Held-out microbatches are dealt over the pipelines."""
        held_out = range(pipeline, self._shape.n_held_out(step), self._plan.n_pipelines)
        return [Work(self._stage, WorkKind.EVALUATE, m) for m in held_out]

    def _next(self) -> ev.Actions:
        if self._slot.is_busy or not self._work:
            return []
        work = self._work[0]
        key = self._needs(work)
        if key is not None:
            if key not in self._arrived:
                return []
            self._arrived.remove(key)
        return [self._slot.start(Work(self._stage, work.kind, work.microbatch, self._peer, self._step))]

    def _needs(self, work: Work) -> tuple[str, int, int, int] | None:
        """The fields of the tensor's key that must have come over a link before this Work may run."""
        m = work.microbatch
        assert m is not None  # as in all Work of a wiring
        if work.kind == WorkKind.BACKWARD:
            return None if self._is_last else ("grad", self._step, self._stage + 1, m)
        kind = "act" if work.kind == WorkKind.FORWARD else "eval"
        return None if self._is_first else (kind, self._step, self._stage, m)

    def _finished(self, work: Work, values: dict[str, float]) -> ev.Actions:
        step = self._step
        stage = self._stage
        m = work.microbatch
        assert m is not None  # as in all Work of a wiring
        n_samples = int(values.get("n_samples", 0))
        loss_sum = values.get("loss_sum")
        actions: ev.Actions = [*self._recovery.made(work)]
        if work.kind == WorkKind.BACKWARD:
            self._recovery.count(WorkKind.BACKWARD, m)
            actions.append(ev.Accumulated(step, stage, m, n_samples, loss_sum))
            if not self._is_first:
                actions.append(self._send(ev.Key("grad", step, stage, m), self._previous_peer))
            if not self._work:
                actions.append(ev.Drained(step))
        elif not self._is_last:
            key = ev.Key("act" if work.kind == WorkKind.FORWARD else "eval", step, stage + 1, m)
            actions.append(self._send(key, self._next_peer))
        elif work.kind == WorkKind.EVALUATE:
            assert loss_sum is not None  # the last stage measures it
            self._recovery.count(WorkKind.EVALUATE, m)
            actions.append(ev.Evaluated(step, m, n_samples, loss_sum))
        return actions

    def _send(self, key: ev.Key, neighbour: tuple[int | None, int]) -> ev.Send:
        peer, n_bytes = neighbour
        assert peer is not None  # no place is open in a step that is done here
        return ev.Send(peer, ev.Boundary(key), n_bytes)


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup, n_under_way: int) -> list[FixedWiring]:
    return [FixedWiring(setup.plan, step_shape(setup)) for _ in range(n_under_way)]


def _check(config: RunConfig, plan: Plan) -> str:
    if plan.is_even:
        return ""
    return (
        f"plan.placement: got {plan.shape}, expected equally many with wiring {config.wiring.kind}, whose microbatches "
        "stay in a pipeline (wiring.kind=swarm takes unequal numbers)"
    )


def _peer_load(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> PeerLoad:
    share = plan.shares[pipeline]
    return PeerLoad(share if plan.schedule == "gpipe" else min(share, plan.depth(stage)), share)


ENTRY = WiringEntry(_build, _check, _peer_load, follows_plan=True, may_change_stages=False)
