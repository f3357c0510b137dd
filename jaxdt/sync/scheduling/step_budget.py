"""The coordinator's count of the local steps that the pipelines of a run do, where replicas may differ.

As many steps of pipelines as there are pipelines make one row of the metrics, and the run has enough steps when it has
train.steps rows. A pipeline that has done its share continues while others are slower, or are lost.

A row is told once it is durable, so a coordinator that is started again knows which steps are in the rows that were
told. Steps in later rows are counted again: members report them again.

A returning pipeline resumes at its donor's step count. It never ran the steps in between, so they are not counted.
"""

import math
from collections import deque
from collections.abc import Iterable

from jaxdt.membership.agreement import CountedRows, EndRun
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import Plan
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.scheduling.rows import Rows


class StepBudget:
    """A part of an agreement. `n_rows`: rows that are done; `n_told`: rows that are durable and told; `n_steps`: local
    steps of each pipeline, the last of which is counted; `end`: why the run ends early."""

    READS = frozenset({ev.StepDone, ev.NotFinite, ev.ShareDone})

    def __init__(self, config: CoordinatorConfig, plan: Plan, pipelines: Pipelines, rows_by_step: bool = False):
        self.n_rows = self.n_told = config.start_version
        self.n_steps = [config.start_version] * plan.n_pipelines
        self._n_counted = plan.n_pipelines * config.start_version
        self.end: EndRun | None = None
        self.rows = Rows(plan.n_pipelines, config.tokens_per_sample, rows_by_step)
        self._config = config
        self._plan = plan
        self._pipelines = pipelines
        self._ended: set[int] = set()  # pipelines that begin no further step
        self._n_steps_in: dict[int, tuple[int, ...]] = {}  # row -> n_steps when it was done, of rows that are not told
        self._untold: deque[StepReport] = deque()
        self._last_told: tuple[StepReport, ...] = ()

    @property
    def n_missing(self) -> int:
        """Steps of pipelines that are not counted yet."""
        return self._plan.n_pipelines * self._config.n_steps - self._n_counted

    def hear(self, now_s: float, src: int, message: ev.Message) -> list[ev.Action]:
        """A member has said something that is among READS."""
        _, pipeline = self._plan.seat(src)
        match message:
            case ev.StepDone():
                return self._on_step_done(now_s, pipeline, message)
            case ev.NotFinite(step):
                return self._not_finite(pipeline, step) if step >= self.n_steps[pipeline] else []
            case ev.ShareDone(step):
                return self._share_done(src, pipeline, step)
            case _:
                raise AssertionError(f"{type(message).__name__} is not among READS")

    def _not_finite(self, pipeline: int, step: int) -> list[ev.Action]:
        self.rows.on_skipped(pipeline, step)
        if self._config.on_nonfinite == "stop":
            self.end = EndRun(ExitCode.DIVERGED, f"pipeline {pipeline}, local step {step}: the gradient is not finite")
        return []

    def _on_step_done(self, now_s: float, pipeline: int, done: ev.StepDone) -> list[ev.Action]:
        """Steps come in order; after a restart some come that are counted already."""
        step, n_steps = done.step, self.n_steps[pipeline]
        if step > n_steps:
            reason = f"coordinator: local step {step} of pipeline {pipeline} is done, and {n_steps} are counted"
            self.end = EndRun(ExitCode.LOST, f"{reason}; its disk lacks rows of the metrics that were told")
        return self._step_done(now_s, pipeline, done) if step == n_steps else []

    def _step_done(self, now_s: float, pipeline: int, done: ev.StepDone) -> list[ev.Action]:
        self.n_steps[pipeline] += 1
        self._n_counted += 1
        self.rows.add(pipeline, done)
        reports = self._complete_rows(now_s)
        return reports if self.n_missing > 0 else [*reports, *self._end_of_steps()]

    def _complete_rows(self, now_s: float) -> list[ev.Action]:
        """The rows that are done. After a loss one step may complete several, and the last step completes all."""
        going_on = [self.n_steps[pipeline] for pipeline in self._pipelines.whole if pipeline not in self._ended]
        first_open = min(going_on, default=math.inf) if self.n_missing > 0 else math.inf
        reports: list[ev.Action] = []
        while self.n_rows < self._config.n_steps and (row := self.rows.next(now_s, self.n_rows, first_open)):
            self._n_steps_in[self.n_rows] = tuple(n - self.rows.n_waiting(p) for p, n in enumerate(self.n_steps))
            self.n_rows += 1
            reports.append(row)
        return reports

    def _share_done(self, src: int, pipeline: int, step: int) -> list[ev.Action]:
        """A pipeline has done its share. It continues if others are slower by more than a step each, and does the steps
        that they have not done by then."""
        whole = self._pipelines.whole
        n_under_way = len(whole) * (1 + self._plan.n_ahead(0))  # where all are equally fast
        if len(whole) < self._plan.n_pipelines and self._ended.issuperset(set(whole) - {pipeline}):
            n_under_way = 0  # no other pipeline does the steps that lost ones left undone
        if pipeline not in self._ended and self.n_missing > n_under_way:
            return [ev.Send(src, ev.Continue(step + self.n_missing))]
        return self._end_pipeline(pipeline)

    def end_if_enough(self) -> list[ev.Action]:
        """A coordinator that was started again does not know whom an earlier one has told that there are enough."""
        return self._end_of_steps() if self.n_missing <= 0 else []

    def _end_of_steps(self) -> list[ev.Action]:
        """The run has done enough steps."""
        return [action for pipeline in self._pipelines.whole for action in self._end_pipeline(pipeline)]

    def _end_pipeline(self, pipeline: int) -> list[ev.Action]:
        if pipeline in self._ended:
            return []
        self._ended.add(pipeline)
        return [ev.Send(self._plan.placement[0][pipeline], ev.EndOfSteps())]

    def on_ended(self, pipeline: int) -> None:
        """An earlier coordinator has told a pipeline to begin no further step."""
        self._ended.add(pipeline)

    def on_joined(self, join: ev.PipelineJoin) -> list[ev.Action]:
        """A pipeline has come back. Rows that are not told yet are told as if it had been there: it has no part in
        them."""
        pipeline = join.pipeline
        self.n_steps[pipeline] = join.step
        self.rows.on_returned(pipeline)
        for row, n_steps in self._n_steps_in.items():
            self._n_steps_in[row] = (*n_steps[:pipeline], join.step, *n_steps[pipeline + 1 :])
        self._ended.discard(pipeline)
        return self._end_pipeline(pipeline) if self.n_missing <= 0 else []

    # ------------------------------------------------------------------------------------------------------------ rows

    def tell(self, reports: Iterable[StepReport]) -> None:
        """These rows are to be told, in order, once they are durable."""
        self._untold += reports

    def untold(self, n_groups: tuple[tuple[int, ...], ...] = ()) -> CountedRows | None:
        """The rows that have to be durable before they are told; None if there are none."""
        if not self._untold:
            return None
        n_rows = self._untold[-1].step + 1
        return CountedRows(n_rows, tuple(self._untold), self._n_steps_in[n_rows - 1], n_groups)

    def on_told(self, rows: CountedRows) -> list[StepReport]:
        """These rows are durable."""
        self.n_told, self._last_told = rows.n_rows, rows.new
        self._n_steps_in = {row: n_steps for row, n_steps in self._n_steps_in.items() if row >= rows.n_rows}
        while self._untold and self._untold[0].step < rows.n_rows:
            self._untold.popleft()
        return list(rows.new)

    def restore(self, rows: CountedRows | None, joins: Iterable[ev.PipelineJoin]) -> None:
        """An earlier coordinator has made these rows durable, and these returns of pipelines. The rows that are told
        after one say how far its pipeline is."""
        if rows:
            self.n_rows, self.n_steps = rows.n_rows, list(rows.n_steps)
            self._n_counted = self._plan.n_pipelines * rows.n_rows
            self.on_told(rows)
        for join in joins:
            if self.n_rows <= join.n_rows:
                self.n_steps[join.pipeline] = join.step

    def start(self, now_s: float) -> list[ev.Action]:
        """The last rows were durable, but the process may have ended before it told them. How long the next one takes
        is not known: it began under an earlier coordinator."""
        self.rows.begin(math.nan)
        return list(self._last_told)
