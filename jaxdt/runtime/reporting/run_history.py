"""The history of a run since it was begun or resumed: its prediction, how often it went back, how long it stood still.
The history lies in the coordinator's folder, so a restarted coordinator continues it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from jaxdt.protocol.reports import (
    OperatorReport,
    PipelineEndReport,
    PredictionReport,
    Report,
    RestartedReport,
    VacantReport,
)
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.runtime.storage.durable import FileStore, refusal

HISTORY = "history"


@dataclass(frozen=True)
class History:
    """The history of the run of this name. `resumes`: the steps at which the run or an earlier one in its folder was
    resumed, as far as its steps go back to them. `run_s`: seconds from the first view until this was written; None
    before the first view.
    `n_steps_again`: steps that were committed and had to be done again. `stood_still_s`: see RunHistory. The predicted
    seconds are None until they are known. `pipeline_ends`: pipelines that have done their last step, each with its
    number of steps."""

    run: str = ""
    resumes: tuple[int, ...] = ()
    run_s: float | None = None
    n_rollbacks: int = 0
    n_steps_again: int = 0
    stood_still_s: float = 0.0
    step_s_predicted: float | None = None
    step_s_predicted_uncompressed: float | None = None
    pipeline_ends: tuple[tuple[int, int], ...] = ()


class RunHistory:
    """The run stands still from its last step before a stage was vacant, an operator paused the run, or there was no
    coordinator, to the first step after. Time comes in as an argument; between two coordinators it is that of
    the file system, by the ages of files.

    failed: called with the reason when the disk refuses; the run continues."""

    def __init__(self, durable: FileStore, run: str, failed: Callable[[str], None]):
        self.history = History(run)
        self._durable = durable
        self._failed = failed
        self._begun_s: float | None = None
        self._last_step_s: float | None = None
        self._stands_still = False

    def load(self, now_s: float, start_version: int, last_row_s: float | None) -> str:
        """Go on from what an earlier coordinator of this run has left, or begin at `start_version`. last_row_s: the
        file system's time at which the last step was written, None if there is none. Returns a line about a damaged
        file, with which the run's history begins now."""
        written_s = self._durable.written_s(HISTORY)
        try:
            stored = serialize.read(History, self._durable.get(HISTORY) or {}, HISTORY)
        except BadInput as problem:
            self._begun_s = self._last_step_s = now_s
            self._save(now_s, replace(self.history, resumes=(start_version,) if start_version else ()))
            return f"{problem}; the summary will count times and interruptions from now on"
        if stored.run != self.history.run:
            earlier = tuple(step for step in stored.resumes if step < start_version)
            self._save(now_s, replace(self.history, resumes=(*earlier, start_version) if start_version else ()))
            return ""
        self._put(stored)
        if stored.run_s is not None:
            disk_now_s = self._durable.written_s(HISTORY)
            self._begun_s = now_s - stored.run_s - (disk_now_s - written_s)
            self._last_step_s = self._begun_s if last_row_s is None else now_s - (disk_now_s - last_row_s)
            self._stands_still = True
        return ""

    def begun(self, now_s: float) -> None:
        """The first view is there."""
        self._begun_s = self._last_step_s = now_s
        self._save(now_s, self.history)

    def hear(self, report: Report) -> None:
        """A report that may say why the run stands still."""
        match report:
            case VacantReport() | RestartedReport() | OperatorReport(command="pause"):
                self._stands_still = True
            case _:
                pass

    def step(self, now_s: float) -> None:
        """A step is committed."""
        if self._stands_still:
            self.ended(now_s)
        self._last_step_s = now_s

    def ended(self, now_s: float) -> None:
        """The run is over, or continues: it stands still no more."""
        if self._stands_still and self._last_step_s is not None:
            still_s = max(0.0, now_s - self._last_step_s)
            self._save(now_s, replace(self.history, stood_still_s=self.history.stood_still_s + still_s))
        self._stands_still = False

    def went_back(self, now_s: float, n_steps: int) -> None:
        """The run went back to a checkpoint; n_steps have to be done again."""
        n_rollbacks, n_steps_again = self.history.n_rollbacks + 1, self.history.n_steps_again + n_steps
        self._save(now_s, replace(self.history, n_rollbacks=n_rollbacks, n_steps_again=n_steps_again))

    def predicted(self, now_s: float, report: PredictionReport) -> None:
        """The prediction is there, or the reason why there is none."""
        predicted = {"step_s_predicted": report.step_s, "step_s_predicted_uncompressed": report.step_s_uncompressed}
        self._save(now_s, replace(self.history, **predicted))

    def pipeline_ended(self, now_s: float, report: PipelineEndReport) -> bool:
        """A pipeline has done its last step. False if an earlier coordinator has said so."""
        end = (report.pipeline, report.n_steps)
        if end in self.history.pipeline_ends:
            return False
        self._save(now_s, replace(self.history, pipeline_ends=(*self.history.pipeline_ends, end)))
        return True

    @property
    def prediction(self) -> PredictionReport:
        """The one that was made at the run's beginning; without seconds if there is none."""
        return PredictionReport(self.history.step_s_predicted, self.history.step_s_predicted_uncompressed)

    def run_s(self, now_s: float) -> float | None:
        """Seconds from the first view until now, None before it."""
        return None if self._begun_s is None else now_s - self._begun_s

    def _save(self, now_s: float, history: History) -> None:
        self._put(replace(history, run_s=self.run_s(now_s)))

    def _put(self, history: History) -> None:
        self.history = history
        try:
            self._durable.put(HISTORY, serialize.write(history))
        except OSError as error:
            self._failed(refusal(error, "run_dir"))
