"""Local steps of a replica that may differ from the others: when one begins, its norm, its update, and the last one.

The gradient is clipped by the norm over the own pipeline, whose members tell one another theirs, or each stage's by its
own. With a tied head over several stages the last one computes with the first one's token table
(jaxdt.sync.shared_table). The first stage begins the pipeline's steps, so it decides how many there are, when the
coordinator says that the run has enough of them. What a coordinator has not counted durably yet is kept, and said again
to one that was started again. A part of a sync's machine, which says when the next step may begin.
"""

# It matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.membership.member import OF_GROUPS
from jaxdt.protocol import events as ev
from jaxdt.protocol.ledger import Ledger
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.exchange import update_scale
from jaxdt.sync.shared_table import SharedTable

# Messages of a pipeline's own steps count as long as it is whole, whatever views come.
OF_OWN_STEPS = OF_GROUPS | {ev.Boundary, ev.StepNorm, ev.LastStep}


@dataclass(frozen=True)
class PipelinePlace:
    """One replica's place. `pipeline`: the members of its pipeline, in the order of stages. It does `n_steps` local
    steps if all pipelines are equally fast. `clip_norm`: of the mean gradient over the pipeline, or with `clips_alone`
    over the stage; 0 for no clipping. `n_ahead`: steps whose forwards run before a step's backward (Plan.n_ahead), at
    the first stage `n_ahead_first`. `number`: of the pipeline. `table_elements`: numbers of the token table that its
    first and its last stage share, 0 for none, which go in slices of `slice_bytes`."""

    peer: int
    stage: int
    pipeline: Sequence[int]
    n_steps: int
    clip_norm: float
    n_ahead: int = 0
    clips_alone: bool = False
    number: int = 0
    table_elements: int = 0
    slice_bytes: int = 1
    n_ahead_first: int = 0

    @property
    def waits_for_norms(self) -> bool:
        """Whether a local step needs the norms of the other stages."""
        return self.clip_norm > 0 and not self.clips_alone

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == len(self.pipeline) - 1

    @property
    def others(self) -> list[int]:
        """The other members of the pipeline."""
        return [peer for peer in self.pipeline if peer != self.peer]


class LocalSteps:
    """See the module text. `version`: local steps done; `n_steps`: those in all, None until that is known; `is_over`:
    that was the last one. `is_held`: no further step begins. `table`: the shared table, at either end of a pipeline
    that has one."""

    READS = SharedTable.READS | frozenset(
        {ev.Accumulated, ev.Drained, ev.Ran, ev.StepNorm, ev.Continue, ev.EndOfSteps, ev.LastStep, ev.StepsCounted}
    )

    def __init__(self, place: PipelinePlace):
        self.version = 0
        self._place = place
        self._ledger = Ledger()
        self._n_begun = 0
        self._sq_norms: dict[int, dict[int, float]] = {}  # local step -> member of the pipeline -> its part
        self._waits_to_begin = False
        self._waits_for_table = False
        self.table: SharedTable | None = None
        if place.table_elements and (place.is_first_stage or place.is_last_stage):
            shared = place.pipeline, place.table_elements, place.slice_bytes, place.n_ahead_first
            self.table = SharedTable(place.peer, *shared)
        self._may_do = place.n_steps  # the first stage begins no step beyond
        self.n_steps: int | None = None
        self.is_held = False
        self._uncounted_steps: deque[ev.StepDone | ev.NotFinite] = deque()  # of steps that are not counted durably yet

    @property
    def is_over(self) -> bool:
        return self.version == self.n_steps

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way. A later stage begins each step at once, and so one too many at the end."""
        return self._n_begun > self.version and not self.is_over

    @property
    def _may_not_begin(self) -> bool:
        """Whether the forwards that come next are those of a step for which the coordinator has to be asked."""
        is_decided = self.n_steps is not None
        return self._place.is_first_stage and not is_decided and self.version + self._place.n_ahead >= self._may_do

    def start(self, version: int, view: ev.View) -> None:
        """The run begins after so many steps, the pipeline with this view."""
        self.version = self._n_begun = version
        self._may_do = max(self._may_do, version)
        if self.table:
            self.table.start(version, view)

    def begin(self) -> ev.Actions:
        """The next local step begins, unless there is none, or the coordinator has to be asked first, or the table of
        the first stage is still to come."""
        self._waits_to_begin = self._waits_for_table = False
        if self.is_over or self.is_held:
            return []
        if self._may_not_begin:
            self._waits_to_begin = True
            return [ev.Send(ev.COORDINATOR, ev.ShareDone(self._may_do))]
        moved = self.table.before_step(self.version) if self.table else []
        self._waits_for_table = self.table is not None and not self.table.may_begin
        if self._waits_for_table:
            return moved
        self._n_begun = self.version + 1
        return [*moved, ev.Stepped(self._place.stage, self.version)]

    def handle(self, event: ev.Event) -> ev.Actions:
        if self.table is None:
            return self._handle(event)
        moved = self.table.handle(event)
        begins = self._waits_for_table and self.table.may_begin
        return [*moved, *self._handle(event), *(self.begin() if begins else [])]

    def _handle(self, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Accumulated():
                self._ledger.add(event.step, (event.stage, event.microbatch), event.n_samples)
                if event.loss_sum is not None:
                    self._ledger.measured(event.step, ev.Tally(event.loss_sum, event.n_samples))
            case ev.Drained(step):
                summed = self.table.on_drained(step) if self.table else []
                is_final = self.table is None or not self.table.is_first  # there the last stage's is still to be added
                return [*summed, *([self._norm(step)] if is_final else [])]
            case ev.Ran(Work(kind=kind, step=int(step))) if kind == WorkKind.CONTRIBUTE:
                return [self._norm(step)]
            case ev.Ran(Work(kind=kind, step=int(step))) if kind == WorkKind.NORM:
                return self._on_norm(step, event.values.get("sq_norm", 0.0))
            case ev.Ran(Work(kind=kind, step=int(step))) if kind == WorkKind.LOCAL_STEP:
                return self._on_stepped(step)
            case ev.Received(header, body):
                return self._on_received(header.src, body)
        return []

    def _on_received(self, src: int, body: ev.Message) -> ev.Actions:
        match body:
            case ev.StepNorm(step, sq_norm) if src in self._place.pipeline:
                self._sq_norms.setdefault(step, {})[src] = sq_norm
                return self._step_if_clipped(step)
            case ev.Continue(until):
                self._may_do = max(self._may_do, until)
                return self.begin() if self._waits_to_begin else []
            case ev.EndOfSteps() if self.n_steps is None:
                return self._end_of_steps()
            case ev.LastStep(n_steps) if src == self._place.pipeline[0]:
                self.n_steps = n_steps
                return [ev.StepsEnd(n_steps)]
            case ev.StepsCounted(n_steps):
                while self._uncounted_steps and self._uncounted_steps[0].step < n_steps[self._place.number]:
                    self._uncounted_steps.popleft()
        return []

    def say_again(self) -> ev.Actions:
        """The messages to the coordinator that it has not answered or counted yet."""
        share = [ev.Send(ev.COORDINATOR, ev.ShareDone(self._may_do))] if self._waits_to_begin else []
        return [*(ev.Send(ev.COORDINATOR, body) for body in self._uncounted_steps), *share]

    def _say(self, body: ev.StepDone | ev.NotFinite) -> ev.Action:
        self._uncounted_steps.append(body)
        return ev.Send(ev.COORDINATOR, body)

    def _norm(self, step: int) -> ev.Action:
        return ev.Run(Work(self._place.stage, WorkKind.NORM, None, self._place.peer, step))

    def _on_norm(self, step: int, sq_norm: float) -> ev.Actions:
        """The norm of the own gradient is known. Where the gradient is clipped the other stages have to know it."""
        self._sq_norms.setdefault(step, {})[self._place.peer] = sq_norm
        others = self._place.others if self._place.waits_for_norms else []
        body = ev.StepNorm(step, sq_norm)
        told = [ev.Post(tuple([(peer, body, 0) for peer in others]))] if others else []
        return [*told, *self._step_if_clipped(step)]

    def _step_if_clipped(self, step: int) -> ev.Actions:
        """The local step, once the norms that clip its gradient are here. A gradient that is not finite changes
        nothing: the factor on it is 0."""
        place = self._place
        sq_norms = self._sq_norms.get(step, {})
        if place.peer not in sq_norms or (place.waits_for_norms and len(sq_norms) < len(place.pipeline)):
            return []
        sq_norm = self._pipeline_sq_norm(step)
        scale = update_scale(sq_norm, self._ledger.n_samples(step), place.clip_norm)
        told = [] if math.isfinite(sq_norm) else [self._say(ev.NotFinite(step))]
        return [*told, ev.Run(Work(place.stage, WorkKind.LOCAL_STEP, None, place.peer, step), scale)]

    def _pipeline_sq_norm(self, step: int) -> float:
        """The squared norm over all stages if the gradient is clipped by that norm, else the one of this stage."""
        sq_norms = self._sq_norms[step]
        return math.fsum(sq_norms[peer] for peer in self._place.pipeline if peer in sq_norms)

    def _on_stepped(self, step: int) -> ev.Actions:
        self.version = step + 1
        actions: ev.Actions = [ev.Free(step)]
        if self._place.is_last_stage:
            is_known = len(self._sq_norms[step]) == len(self._place.pipeline)
            sq_norm = self._pipeline_sq_norm(step) if is_known else None
            done = ev.StepDone(step, self._ledger.n_samples(step), self._ledger.tally(step), sq_norm)
            actions.append(self._say(done))
        self._ledger.free((step,))
        del self._sq_norms[step]
        return actions

    def _end_of_steps(self) -> ev.Actions:
        """The steps that are under way are the pipeline's last ones."""
        self.n_steps = min(self._n_begun + self._place.n_ahead, self._may_do)
        body = ev.LastStep(self.n_steps)
        told = [ev.Post(tuple([(peer, body, 0) for peer in self._place.others]))] if self._place.others else []
        return [*told, ev.StepsEnd(self.n_steps), *(self.begin() if self._waits_to_begin else [])]
