"""Fixed wiring: the plan's pipelines, each peer following its schedule strictly.

A step's order is the schedule's. The next Work runs as soon as its input is here; nothing is ever done out of turn. A
boundary tensor goes to the neighbour in the same pipeline, and no other message is sent. When a step begins, the sync
says:

- Where replicas stay equal, a step begins for all of them at once (Updated), in some steps with the held-out
  microbatches. After the last step these come alone. This holds while every place of the plan is taken. A RoutedWiring
  with PlannedRoutes does a step in which a view comes, and every step while a place is open: each microbatch goes
  through its own pipeline, and past an open place by way of another pipeline's replica. Which of the two does a step
  follows from the view, so all members agree. FixedWiring does a step from its start or not at all. If a view changes
  in mid-step, recovery takes over what was counted and kept.
- Where replicas may differ, a pipeline's steps are its own: one begins when its replica says so (Stepped), and a tensor
  of a step that is ahead of this peer's waits for it. A step's tensors count as long as their pipeline is whole,
  whatever views come. Nothing is kept to be sent again, since the Work of a pipeline that has lost a peer is not done.

How a view fills the places of the plan follows from the view, too. A peer of the plan has its own place. Other peers of
its stage take the open places, in the order of their ids; a peer that finds none is in reserve. For an open place a
pipeline borrows the other replicas of the stage, one microbatch from each in turn, so that the load is shared.

Under "stash" (PipeDream, Narayanan et al. 2019, Sec. 3.2) a step is one microbatch of the pipeline's own, and pipelines
are never flushed: n_ahead(stage) further steps are forwarded before a step's backward, so a stage's order is F0..Fd B0
F(d+1) B1 ... without an end. The forward of step n runs when n - d local steps are done, and its backward computes with
the same parameters (jaxdt.runtime.storage.parameter_versions).
"""

import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import NO_PEER
from jaxdt.protocol.schedule import Order, stage_order
from jaxdt.run.config import STAGE, RunConfig
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import STASH, Plan
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import COMPUTING, PeerLoad, StepShape, WiringEntry, step_shape
from jaxdt.wiring.compute_slot import ComputeSlot, ServiceTime
from jaxdt.wiring.dispatcher import Route, RoutePolicy
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring

NEVER = float("inf")
Places = Sequence[Sequence[int | None]]  # [stage][pipeline]: a peer, or None for an open place


class PipelineAssignment:
    """`replicas[stage]` are the peers that are there; `is_whole`: every place is taken. Not to be written to: all peers
    of a simulation share it."""

    def __init__(self, placement: Sequence[Sequence[int]], replicas: tuple[tuple[int, ...], ...]):
        self.replicas = replicas
        self.places: Places = [list(_fill(row, peers)) for row, peers in zip(placement, replicas, strict=True)]
        self.is_whole = all(None not in row for row in self.places)

    def pipeline_of(self, stage: int, peer: int) -> int | None:
        """The pipeline of a peer; None for a peer in reserve."""
        return self.places[stage].index(peer) if peer in self.places[stage] else None


def _fill(planned: Sequence[int], present: tuple[int, ...]) -> Iterator[int | None]:
    own, there = set(planned), set(present)
    others = (peer for peer in present if peer not in own)
    return (peer if peer in there else next(others, None) for peer in planned)


def pipeline_assignment(plan: Plan, view: ev.View, members: Collection[int]) -> PipelineAssignment:
    """The assignment of the `members` of a view that compute to the places of the plan."""
    computing = set(members)
    of_stages = map(view.stage_peers, range(plan.n_stages))
    replicas = tuple([tuple([peer for peer in peers if peer in computing]) for peers in of_stages])
    return _pipeline_assignment(plan.placement, replicas)


_pipeline_assignment = functools.lru_cache(maxsize=16)(PipelineAssignment)

KeyFields = tuple[str, int | None, int, int | None]  # kind, step, stage and microbatch of a tensor


class PlannedRoutes(RoutePolicy):
    """Each microbatch travels its own pipeline, and passes open places by way of borrowed replicas. The first peer of
    its route owns it. A peer lets as many be on their way as the schedule has in flight in the pipelines that it
    begins. The plan knows no speeds, and has one peer for each microbatch."""

    def __init__(self, plan: Plan, peer: int):
        self._plan, self._peer = plan, peer
        self._depth = max(plan.shares) if plan.schedule == "gpipe" else plan.depth(0)
        self._assignment: PipelineAssignment | None = None
        self.in_flight_limit = self._depth

    def adopt(self, view: ev.View, members: Sequence[int]) -> None:
        self._assignment = pipeline_assignment(self._plan, view, members)
        first = self._assignment.places[0]
        n_borrowed = first.count(None) if self._peer in first else 0
        self.in_flight_limit = self._depth * (1 + n_borrowed)

    def begin_step(self, view: ev.View) -> None:
        self.adopt(view, [member.peer for member in view.members])

    def owning_router(self, kind: str, microbatch: int) -> int:
        return self._peer_of(0, kind, microbatch)

    def priority(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Held-out microbatches first, as in every step; then the pipelines in turn."""
        pipeline, rank = self._place(kind, microbatch)
        return (kind != WorkKind.EVALUATE, rank, pipeline)

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        return self._place(kind, microbatch)[0]

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[Route]:
        return [self._route(kind, microbatch, lo, hi) for microbatch in microbatches]

    def _route(self, kind: str, microbatch: int, lo: int, hi: int) -> Route:
        stages = range(self._plan.n_stages)
        return tuple(self._peer_of(s, kind, microbatch) if lo <= s <= hi else NO_PEER for s in stages)

    def _place(self, kind: str, microbatch: int) -> tuple[int, int]:
        """A microbatch's pipeline, and its number in it."""
        pipeline = self._plan.pipeline_of(microbatch, held_out=kind == WorkKind.EVALUATE)
        if kind == WorkKind.EVALUATE:
            return pipeline, microbatch // self._plan.n_pipelines
        return pipeline, microbatch - self._plan.microbatches(pipeline).start

    def _peer_of(self, stage: int, kind: str, microbatch: int) -> int:
        assert self._assignment is not None
        pipeline, rank = self._place(kind, microbatch)
        own, replicas = self._assignment.places[stage][pipeline], self._assignment.replicas[stage]
        return replicas[(pipeline + rank) % len(replicas)] if own is None else own


class FixedWiring:
    """One peer's side. `own_pipeline`: its pipeline where the steps of that are its own, else None."""

    READS = RoutedWiring.READS | {ev.ViewChanged, ev.Evicted, ev.Updated, ev.Stepped, ev.StepsEnd, ev.Boundary, ev.Ran}

    def __init__(self, plan: Plan, shape: StepShape, own_pipeline: int | None = None):
        self._plan = plan
        self._shape = shape
        self._peer = shape.peer
        self._stage = shape.stage
        self._is_first = shape.stage == 0
        self._is_last = shape.is_last_stage
        self._recovery = Recovery(shape)
        self._slot = ComputeSlot()
        self._routed: RoutedWiring | None = None  # None: the steps are the pipeline's own
        self._pipeline: int | None = None  # None: in reserve
        self._order: Order = ()
        self._next_peer: tuple[int | None, int] = (None, 0)  # gets our activations, each of so many bytes
        self._previous_peer: tuple[int | None, int] = (None, 0)  # gets our gradients
        self._strict_from = NEVER  # the first step of the view that is done here, or the own step under way
        self._work: deque[Work] = deque()
        self._arrived_keys: set[KeyFields] = set()  # fields of keys, which are quicker to compare
        self._n_ahead = plan.n_ahead(shape.stage)
        self._forwards_ahead: Order = ()  # of a step, which run ahead of its backwards
        self._n_forwarded = 0  # the first step whose forwards ahead are not among the Work yet
        self._n_steps: float = NEVER  # of the own pipeline in all, once that is known
        if own_pipeline is None:
            routes = PlannedRoutes(plan, shape.peer)
            self._routed = RoutedWiring(shape, routes, self._recovery, self._slot, ServiceTime())
        else:
            self._strict_from = 0
            self._take_place(plan.placement, own_pipeline)
            n_forwards = plan.shares[own_pipeline] if self._n_ahead else 0
            self._forwards_ahead, self._order = self._order[:n_forwards], self._order[n_forwards:]

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        if type(event) is ev.Ran:
            work = event.work
            if self._slot.is_void and self._routed is None and work.kind in COMPUTING:
                self._slot.free()
                return self._next()
            if self._work and work == self._work[0] and not self._slot.is_void:
                self._slot.free()
                self._work.popleft()
                return self._on_finished(work, event.values) + self._next()
        elif type(event) is ev.Received:
            body = event.body
            if type(body) is ev.Boundary and body.key.step >= self._strict_from:
                key = body.key
                if self._routed or key.kind != "eval":  # those of own steps are the sync's
                    self._arrived_keys.add((key.kind, key.step, key.stage, key.microbatch))
                return self._next()
        elif type(event) is ev.Stepped:
            return self._begin_own(event.n_steps)
        elif type(event) is ev.StepsEnd:
            return self._end_after(event.n_steps)
        elif type(event) is ev.Evicted:
            self._slot.void()
            self._stop()
        if self._routed is None:
            return []
        if type(event) is ev.Updated:
            if event.version >= self._strict_from:
                return self._begin(self._routed, event.version)
        elif type(event) is ev.ViewChanged:
            return self._adopt(self._routed, now_s, event.view)
        elif type(event) is ev.WorkOverdue:
            return [ev.StepBlocked()]  # only this peer does what the plan gives to it
        return self._routed.handle(now_s, event) + self._next()

    @property
    def queue(self) -> tuple[int, bool]:
        n_routed = self._routed.queue[0] if self._routed else 0
        return n_routed + len(self._work), self._slot.is_busy

    def cancel_run(self) -> None:
        self._slot.free()

    def _adopt(self, routed: RoutedWiring, now_s: float, view: ev.View) -> ev.Actions:
        """Adopt a view. In the first view all steps are strict; in a later one those after the step under way."""
        self._stop()
        assignment = pipeline_assignment(self._plan, view, [member.peer for member in view.members])
        self._take_place(assignment.places, assignment.pipeline_of(self._stage, self._peer))
        if assignment.is_whole:
            self._strict_from = view.n_committed + (view.number > 1)
        if view.n_committed < self._strict_from:
            return routed.handle(now_s, ev.ViewChanged(view))
        routed.void_routes(view)
        return []

    def _take_place(self, places: Places, pipeline: int | None) -> None:
        self._pipeline = pipeline
        if pipeline is None:
            return
        self._order = stage_order(self._plan, self._stage, pipeline)
        activation_bytes, gradient_bytes = self._shape.sent_bytes[pipeline]
        if not self._is_last:
            self._next_peer = places[self._stage + 1][pipeline], activation_bytes
        if not self._is_first:
            self._previous_peer = places[self._stage - 1][pipeline], gradient_bytes

    def _stop(self) -> None:
        """The rest of the step is not done here."""
        self._strict_from = NEVER
        self._arrived_keys.clear()
        self._work.clear()

    def _begin(self, routed: RoutedWiring, step: int) -> ev.Actions:
        if not self._shape.has_work(step):
            return []
        routed.enter_without_tasks(step)
        if self._pipeline is None:
            return self._shape.drained(step)  # in reserve
        order = self._order if self._shape.n_trained(step) else ()
        self._work = deque(self._of_step(step, (*self._evaluations(step, self._pipeline), *order)))
        return self._next()

    def _evaluations(self, step: int, pipeline: int) -> list[Work]:
        """Held-out microbatches are dealt over the pipelines."""
        held_out = range(pipeline, self._shape.n_held_out(step), self._plan.n_pipelines)
        return [Work(self._stage, WorkKind.EVALUATE, m) for m in held_out]

    def _begin_own(self, step: int) -> ev.Actions:
        """The backwards of an own step may run, and before them the forwards of the steps that run ahead of it."""
        self._strict_from = step
        self._recovery.begin_step()
        for ahead in range(max(step, self._n_forwarded), step + self._n_ahead + 1):
            if ahead < self._n_steps:
                self._work += self._of_step(ahead, self._forwards_ahead)
        self._n_forwarded = step + self._n_ahead + 1
        self._work += self._of_step(step, self._order)
        return self._next()

    def _of_step(self, step: int, order: Iterable[Work]) -> list[Work]:
        return [Work(self._stage, work.kind, work.microbatch, self._peer, step) for work in order]

    def _end_after(self, n_steps: int) -> ev.Actions:
        """No forward of a later step comes any more. None of them runs: its input would be a forward of the stage
        before."""
        self._n_steps = n_steps
        self._work = deque(work for work in self._work if work.step is None or work.step < n_steps)
        return self._next()

    def _next(self) -> ev.Actions:
        if self._slot.is_busy or not self._work:
            return []
        work = self._work[0]
        key = self._needs(work)
        if key is not None:
            if key not in self._arrived_keys:
                return []
            self._arrived_keys.remove(key)
        return [self._slot.start(work)]

    def _needs(self, work: Work) -> KeyFields | None:
        """The fields of the tensor's key that must have come over a link before this Work may run."""
        if work.kind == WorkKind.BACKWARD:
            return None if self._is_last else ("grad", work.step, self._stage + 1, work.microbatch)
        kind = "act" if work.kind == WorkKind.FORWARD else "eval"
        return None if self._is_first else (kind, work.step, self._stage, work.microbatch)

    def _on_finished(self, work: Work, values: dict[str, float]) -> ev.Actions:
        (step, m), stage = work.place, self._stage
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
    own_pipeline = setup.plan.seat(setup.peer)[1] if setup.replicas_may_differ else None
    return [FixedWiring(setup.plan, step_shape(setup), own_pipeline) for _ in range(n_under_way)]


def _check(config: RunConfig, plan: Plan) -> str:
    if not plan.is_even:
        return (
            f"plan.placement: got {plan.shape}, expected equally many with wiring {config.wiring.kind}, whose "
            "microbatches stay in a pipeline (wiring.kind=swarm takes unequal numbers, with sync.kind=allreduce)"
        )
    return _stash_problem(config, plan) if plan.schedule == STASH else ""


def _stash_problem(config: RunConfig, plan: Plan) -> str:
    if max(plan.shares) > 1:
        return (
            f"plan.shares: got {list(plan.shares)}, expected one microbatch of each pipeline with plan.schedule stash, "
            "under which each microbatch is a local step"
        )
    if plan.in_flight:
        return (
            f"plan.in_flight: got {list(plan.in_flight)}, expected none with plan.schedule stash, under which a stage "
            "has as many forwards in flight as there are stages from it on"
        )
    if config.optim.clip_norm and config.sync.groups.clip != STAGE:
        return (
            f"optim.clip_norm: got {config.optim.clip_norm}, expected 0 with plan.schedule stash, or sync.groups.clip "
            f"{STAGE}: to clip by the norm over the pipeline each stage would wait for the backward of the first"
        )
    return ""


def _peer_load(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> PeerLoad:
    share = plan.shares[pipeline]
    if plan.schedule == STASH:
        return PeerLoad(1 + plan.n_ahead(stage), share)
    return PeerLoad(share if plan.schedule == "gpipe" else min(share, plan.depth(stage)), share)


ENTRY = WiringEntry(_build, _peer_load, follows_plan=True, may_change_stages=False, check=_check)
