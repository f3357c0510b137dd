"""How many local steps the pipelines of a run do, where replicas may differ: the coordinator's count.

As many steps of pipelines as there are pipelines make one row of the metrics, and the run has enough of them when it
has train.steps rows. A pipeline that has done its share goes on while others are slower, or are lost.
"""

from jaxdt.membership.agreement import EndRun
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol.events import Action, Continue, EndOfSteps, Message, NotFinite, Send, ShareDone, StepDone
from jaxdt.spec.plan import Plan
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.scheduling.rows import Rows


class StepBudget:
    """A part of an agreement. `n_rows`: those that are done; `end`: why the run ends before that."""

    READS = frozenset({StepDone, NotFinite, ShareDone})

    def __init__(self, config: CoordinatorConfig, plan: Plan, pipelines: Pipelines):
        self.n_rows = config.start_version
        self.end: EndRun | None = None
        self.rows = Rows(plan.n_pipelines, config.tokens_per_sample)
        self._config = config
        self._plan = plan
        self._pipelines = pipelines
        self._n_missing = plan.n_pipelines * (config.n_steps - config.start_version)  # steps of pipelines
        self._ended: set[int] = set()  # pipelines that begin no further step

    def hear(self, now_s: float, src: int, message: Message) -> list[Action]:
        """A member has said something that is among READS."""
        _, pipeline = self._plan.seat(src)
        match message:
            case StepDone():
                return self._step_done(now_s, message)
            case NotFinite(step):
                return self._not_finite(pipeline, step)
            case ShareDone(step):
                return self._share_done(src, pipeline, step)
            case _:
                raise AssertionError(f"{type(message).__name__} is not among READS")

    def _not_finite(self, pipeline: int, step: int) -> list[Action]:
        self.rows.has_skipped = True
        if self._config.on_nonfinite == "stop":
            self.end = EndRun(4, f"pipeline {pipeline}, local step {step}: the gradient is not finite")
        return []

    def _step_done(self, now_s: float, done: StepDone) -> list[Action]:
        self._n_missing -= 1
        report = self.rows.add(now_s, self.n_rows, done) if self.n_rows < self._config.n_steps else None
        if report:
            self.n_rows += 1
        reports: list[Action] = [report] if report else []
        return reports if self._n_missing > 0 else [*reports, *self._end_of_steps()]

    def _share_done(self, src: int, pipeline: int, step: int) -> list[Action]:
        """A pipeline has begun its share. It goes on if others are slower by more than a step each: what they have not
        done by then is done by it."""
        whole = self._pipelines.whole
        n_under_way = len(whole) * (1 + self._plan.n_ahead(0))  # where all are equally fast
        if len(whole) < self._plan.n_pipelines and self._ended.issuperset(set(whole) - {pipeline}):
            n_under_way = 0  # what lost pipelines have left undone nobody else does
        if pipeline not in self._ended and self._n_missing > n_under_way:
            return [Send(src, Continue(step + self._n_missing))]
        return self._end_pipeline(pipeline)

    def _end_of_steps(self) -> list[Action]:
        """The run has done enough steps."""
        return [action for pipeline in self._pipelines.whole for action in self._end_pipeline(pipeline)]

    def _end_pipeline(self, pipeline: int) -> list[Action]:
        if pipeline in self._ended:
            return []
        self._ended.add(pipeline)
        return [Send(self._plan.placement[0][pipeline], EndOfSteps())]
