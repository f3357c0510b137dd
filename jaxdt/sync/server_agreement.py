"""The coordinator's part where servers hold the parameters: rows of the metrics, and the end of the run.

Workers and servers agree among themselves on what is pushed and pulled (jaxdt.sync.server). As many steps of pipelines
as there are pipelines make one row, and the run has enough of them when it has train.steps rows. A pipeline that has
done its share goes on while others are slower.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxdt.membership.agreement import CommittedStep, Decision, EndRun, Results
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol.events import (
    Action,
    Continue,
    EndOfSteps,
    Finished,
    Message,
    NotFinite,
    Record,
    Send,
    ShareDone,
    StepDone,
    View,
)
from jaxdt.protocol.reports import PipelineEndReport
from jaxdt.spec.plan import Plan
from jaxdt.sync.rows import Rows

NOT_YET = "with sync.kind server a run cannot go on without one of its peers yet"


class ServerAgreement:
    """The agreement of `sync.kind = "server"`. `n_committed`: rows of the metrics."""

    READS = frozenset({StepDone, NotFinite, ShareDone, Finished})

    def __init__(self, config: CoordinatorConfig, plan: Plan):
        self.n_committed = config.start_version
        self._config = config
        self._plan = plan
        self._rows = Rows(plan.n_pipelines, config.tokens_per_sample)
        self._n_missing = plan.n_pipelines * (config.n_steps - config.start_version)  # steps of pipelines
        self._ended: set[int] = set()  # pipelines that begin no further step
        self._end: EndRun | None = None

    # --------------------------------------------------------------------------------------------------- what it hears

    def hear(self, now_s: float, src: int, message: Message, admissions: Mapping[int, int]) -> list[Action]:
        stage, pipeline = self._plan.seat(src)
        match message:
            case StepDone():
                return self._step_done(now_s, message)
            case NotFinite(step):
                return self._not_finite(pipeline, step)
            case ShareDone(step):
                return self._share_done(src, pipeline, step)
            case Finished(n_steps):
                return [PipelineEndReport(pipeline, n_steps)] if stage == 0 else []
            case _:
                raise AssertionError(f"{type(message).__name__} is not among READS")

    def woke(self, now_s: float, tag: str) -> list[Action]:
        raise AssertionError("it sets no timer")

    def _not_finite(self, pipeline: int, step: int) -> list[Action]:
        self._rows.has_skipped = True
        if self._config.on_nonfinite == "stop":
            self._end = EndRun(4, f"pipeline {pipeline}, local step {step}: the gradient is not finite")
        return []

    def _step_done(self, now_s: float, done: StepDone) -> list[Action]:
        self._n_missing -= 1
        report = None
        if self.n_committed < self._config.n_steps:
            report = self._rows.add(now_s, self.n_committed, done)
        if report:
            self.n_committed += 1
        reports: list[Action] = [report] if report else []
        return reports if self._n_missing > 0 else [*reports, *self._end_of_steps()]

    def _share_done(self, src: int, pipeline: int, step: int) -> list[Action]:
        """A pipeline has done its share. It goes on if others are slower by more than a step each: what they have not
        done by then is done by it."""
        if pipeline not in self._ended and self._n_missing > self._plan.n_pipelines:
            return [Send(src, Continue(step + self._n_missing))]
        return self._end_pipeline(pipeline)

    def _end_of_steps(self) -> list[Action]:
        """The run has done enough steps."""
        return [action for pipeline in range(self._plan.n_pipelines) for action in self._end_pipeline(pipeline)]

    def _end_pipeline(self, pipeline: int) -> list[Action]:
        if pipeline in self._ended:
            return []
        self._ended.add(pipeline)
        return [Send(self._plan.placement[0][pipeline], EndOfSteps())]

    # ---------------------------------------------------------------------------------------- the rest of an Agreement

    def start(self, now_s: float) -> list[Action]:
        return []

    def restore(self, steps: Sequence[CommittedStep], n_committed: int) -> None:
        """What an earlier coordinator knew of the pipelines' steps is lost with it."""
        self._end = EndRun(3, "coordinator: started anew, and with sync.kind server it cannot take a run over yet")

    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        return self._end

    def cannot_lose(self, peer: int) -> str:
        return NOT_YET

    def refusal(self, command: str) -> str:
        if command == "status":
            return ""
        return f"{command}: with sync.kind server a run cannot do this yet"

    def durable_form(self, record: Record) -> Any:
        raise AssertionError("no step of the run is recorded")

    def committed(self, now_s: float, record: Record) -> tuple[Message, list[Action]]:
        raise AssertionError("no step of the run is recorded")

    @property
    def records(self) -> tuple[Record, ...]:
        return ()

    def missed(self) -> list[Message]:
        return []

    def leave_view(self, members: Collection[int]) -> Results:
        return ()

    def adopt_view(self, now_s: float, view: View) -> None:
        self._rows.begin(now_s)

    def roll_back(self) -> None:
        """Not reached: a run that would have to go back ends (`cannot_lose`)."""

    def checkpoint_complete(self) -> None:
        """Nothing depends on it."""
