"""Independent pipelines: each does local steps of its own, in the order of the plan's schedule, and waits for no other.

A step's order is the schedule's. Under "stash" (PipeDream, Narayanan et al. 2019, Sec. 3.2) a step is one microbatch,
and pipelines are never flushed: n_ahead(stage) further steps are forwarded before a step's backward, so a stage's order
is F0..Fd B0 F(d+1) B1 ... without an end. The forward of step n runs when n - d local steps are done, and its backward
computes with the same parameters (jaxdt.runtime.storage.parameter_versions).

As in fixed wiring the next Work runs as soon as its input is here, and a boundary tensor goes to the neighbour in the
same pipeline. But there is no step of the run: a step begins when the own replica's sync says so, and a tensor of a
step that is ahead of this peer's waits for it. A step's tensors count as long as their pipeline is whole, whatever
views come. Nothing is kept to be sent again, since the Work of a pipeline that has lost a peer is not done.
"""

from collections import deque
from collections.abc import Iterable

from jaxdt.protocol import events as ev
from jaxdt.protocol.schedule import stage_order
from jaxdt.run.config import STAGE, RunConfig
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import STASH, Plan
from jaxdt.run.work import Work, WorkKind
from jaxdt.wiring.base import PeerLoad, StepShape, WiringEntry, step_shape
from jaxdt.wiring.compute_slot import ComputeSlot


class IndependentWiring:
    """One peer's side. `pipeline` is its own in the plan."""

    READS = frozenset({ev.ViewChanged, ev.Evicted, ev.Stepped, ev.StepsEnd, ev.Boundary, ev.Ran})

    def __init__(self, plan: Plan, pipeline: int, shape: StepShape):
        self._shape = shape
        self._stage = shape.stage
        self._order = stage_order(plan, shape.stage, pipeline)
        self._n_ahead = plan.n_ahead(shape.stage)
        activation_bytes, gradient_bytes = shape.sent_bytes[pipeline]
        is_first, is_last = shape.stage == 0, shape.is_last_stage
        self._next = None if is_last else (plan.placement[shape.stage + 1][pipeline], activation_bytes)
        self._previous = None if is_first else (plan.placement[shape.stage - 1][pipeline], gradient_bytes)
        self._slot = ComputeSlot()
        self._is_member = False
        self._step = -1  # whose backwards come next
        self._n_opened = 0  # the first step whose forwards are not among the Work yet
        self._n_steps: int | None = None  # of the pipeline in all, once that is known
        self._work: deque[Work] = deque()
        self._arrived: set[ev.Key] = set()

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        if type(event) is ev.Ran:
            work = event.work
            if self._work and work == self._work[0]:
                self._slot.free()
                self._work.popleft()
                return [*self._finished(work, event.values), *self._begin_next()]
        elif type(event) is ev.Received:
            body = event.body
            if type(body) is ev.Boundary and body.key.kind != "eval" and body.key.step >= self._step:
                self._arrived.add(body.key)
                return self._begin_next()
        elif type(event) is ev.Stepped:
            self._open(event.n_steps)
            return self._begin_next()
        elif type(event) is ev.StepsEnd:
            self._end_after(event.n_steps)
            return self._begin_next()
        elif type(event) is ev.ViewChanged:
            self._is_member = True
        elif type(event) is ev.Evicted:
            self._is_member = False
            self._work.clear()
            self._arrived.clear()
        return []

    @property
    def queue(self) -> tuple[int, bool]:
        return len(self._work), self._slot.is_busy

    def cancel_run(self) -> None:
        self._slot.free()

    def _open(self, step: int) -> None:
        """The step's backwards may run, and before them the forwards of the steps that run ahead of it."""
        self._step = step
        if not self._n_ahead:
            self._work = deque(self._of_step(step, self._order))
            return
        forwards, backwards = (
            [work for work in self._order if work.kind == kind] for kind in (WorkKind.FORWARD, WorkKind.BACKWARD)
        )
        for ahead in range(max(step, self._n_opened), step + self._n_ahead + 1):
            if self._n_steps is None or ahead < self._n_steps:
                self._work += self._of_step(ahead, forwards)
        self._n_opened = step + self._n_ahead + 1
        self._work += self._of_step(step, backwards)

    def _of_step(self, step: int, works: Iterable[Work]) -> list[Work]:
        return [Work(self._stage, work.kind, work.microbatch, self._shape.peer, step) for work in works]

    def _end_after(self, n_steps: int) -> None:
        """No forward of a later step comes any more. None of them runs: its input would be a forward of the stage
        before."""
        self._n_steps = n_steps
        self._work = deque(work for work in self._work if work.step is None or work.step < n_steps)

    def _begin_next(self) -> ev.Actions:
        if self._slot.is_busy or not self._work or not self._is_member:
            return []
        work = self._work[0]
        key = self._needs(work)
        if key is not None:
            if key not in self._arrived:
                return []
            self._arrived.remove(key)
        return [self._slot.start(work)]

    def _needs(self, work: Work) -> ev.Key | None:
        """The tensor that must have come over a link before this Work may run."""
        step, m = work.step, work.microbatch
        assert step is not None and m is not None  # as in all Work of a wiring
        if work.kind == WorkKind.BACKWARD:
            return None if self._next is None else ev.Key("grad", step, self._stage + 1, m)
        return None if self._previous is None else ev.Key("act", step, self._stage, m)

    def _finished(self, work: Work, values: dict[str, float]) -> ev.Actions:
        step, stage, m = work.step, self._stage, work.microbatch
        assert step is not None and m is not None  # as in all Work of a wiring
        if work.kind == WorkKind.FORWARD:
            return [] if self._next is None else [_send(ev.Key("act", step, stage + 1, m), self._next)]
        n_samples = int(values.get("n_samples", 0))
        actions: ev.Actions = [ev.Accumulated(step, stage, m, n_samples, values.get("loss_sum"))]
        if self._previous is not None:
            actions.append(_send(ev.Key("grad", step, stage, m), self._previous))
        return actions if self._work else [*actions, ev.Drained(step)]


def _send(key: ev.Key, neighbour: tuple[int, int]) -> ev.Send:
    peer, n_bytes = neighbour
    return ev.Send(peer, ev.Boundary(key), n_bytes)


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup, n_under_way: int) -> list[IndependentWiring]:
    _, pipeline = setup.plan.seat(setup.peer)
    return [IndependentWiring(setup.plan, pipeline, step_shape(setup)) for _ in range(n_under_way)]


def _check(config: RunConfig, plan: Plan) -> str:
    if not plan.is_even:
        return (
            f"plan.placement: got {plan.shape}, expected equally many with wiring {config.wiring.kind}, whose "
            "microbatches stay in a pipeline"
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


ENTRY = WiringEntry(
    _build,
    _check,
    _peer_load,
    follows_plan=True,
    may_change_stages=False,
    is_independent=True,
    outlives_views=frozenset({ev.Boundary}),
)
