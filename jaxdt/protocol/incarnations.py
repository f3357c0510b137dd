"""The pipelines of a run's log, where a lost one may come back: each return is another incarnation of its pipeline.

The replicas of an incarnation have nothing of the one before. Incarnations are numbered: first the pipelines of the
plan, then the returns in the order of the log.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jaxdt.protocol.reports import PipelineEndReport, PipelineJoinReport


@dataclass(frozen=True)
class Incarnation:
    """A pipeline since the beginning of the run, or since a return: its peers were admitted with view `admission`, and
    took over the states of incarnation `donor` after `first_step` local steps."""

    pipeline: int
    admission: int = 0
    donor: int | None = None
    first_step: int = 0


class Incarnations:
    """See the module text. `n_steps`: of each incarnation whose end was reported, the local steps in all."""

    def __init__(self, n_pipelines: int, log: Iterable[PipelineJoinReport | PipelineEndReport] = ()):
        self.all: list[Incarnation] = [Incarnation(pipeline) for pipeline in range(n_pipelines)]
        self.n_steps: dict[int, int] = {}
        for report in log:
            self.hear(report)

    def hear(self, report: PipelineJoinReport | PipelineEndReport) -> bool:
        """The next report of the log. Whether it is of another incarnation: a return may be reported again."""
        if isinstance(report, PipelineEndReport):
            number = self.last_of(report.pipeline)
            self.n_steps[number] = max(report.n_steps, self.n_steps.get(number, 0))
            return False
        donor = self.of(report.donor, report.admission)
        found = Incarnation(report.pipeline, report.admission, donor, report.n_steps)
        self.all += [found] if found not in self.all else []
        return self.all[-1] is found

    def last_of(self, pipeline: int) -> int:
        """The number of its last incarnation so far."""
        return max(number for number, known in enumerate(self.all) if known.pipeline == pipeline)

    def of(self, pipeline: int, view: int) -> int:
        """The number of the incarnation of a pipeline in a view."""
        known = [n for n, one in enumerate(self.all) if one.pipeline == pipeline and one.admission <= view]
        return known[-1]
