"""A process that waits for the coordinator ends when the run is over.

The coordinator tells the end of a run to all that are connected. A process that loads jax, compiles or is paused at
that moment hears nothing, and would look for the coordinator for hours, in a folder that no later run may use. So each
time that it says that it waits, it looks into the coordinator's folder, where that is on its disk."""

from collections.abc import Callable

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import OutageReport, Report, StillReadyReport, UnreachedReport
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime.coordinator_folder import check_not_ended
from jaxdt.runtime.run_job import RunJob


class EndWatch:
    """Passes reports on to `report`. `post` hands a Stop to the loop; it is set before the loop runs."""

    def __init__(self, job: RunJob, report: Callable[[Report], None]):
        self._job = job
        self._report = report
        self.post: Callable[[ev.Stop], None]

    def report(self, report: Report) -> None:
        """Pass a report on, or end the process if it waits for a run that has ended."""
        if isinstance(report, StillReadyReport | UnreachedReport | OutageReport) and (end := end_of_run(self._job)):
            self.post(end)
        else:
            self._report(report)


def end_of_run(job: RunJob) -> ev.Stop | None:
    """The end of a process that waits for the coordinator, if the coordinator's folder is here and says that the run is
    over; else None."""
    try:
        check_not_ended(job)
    except BadInput as problem:
        return ev.Stop(ExitCode.NOT_JOINED, str(problem))
    return None
