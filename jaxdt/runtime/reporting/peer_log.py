"""A peer's or worker's own log: one line a report, and now and then one for a step."""

import time

from jaxdt.protocol.reports import (
    KeptReport,
    PullReport,
    PushReport,
    Report,
    SnapshotReport,
    StillReadyReport,
    TasksStolenReport,
    UnreachedReport,
    UsageReport,
    WorkerBeginsReport,
    WorkerProgressReport,
)
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.reporting.console import print_line

STEP_EVERY_S = 10.0


class PeerLog:
    """Writes reports of a peer or worker to standard output; each line begins with its name (`peer 3`, `worker 4`),
    since several processes may share a terminal. `coordinator`: its address, for the line that the peer waits for it.
    `n_steps`: of the run; None where the steps of a peer are its pipeline's own."""

    def __init__(self, name: str, coordinator: Address, n_steps: int | None):
        self._name = name
        self._coordinator = coordinator
        self._n_steps = n_steps
        self._step_s = -STEP_EVERY_S
        self._works = False  # a worker that has got a microbatch

    def report(self, report: Report) -> None:
        match report:
            case UsageReport(step):
                of_all = "" if self._n_steps is None else f" of {self._n_steps}"
                self._now_and_then(f"{'step' if of_all else 'local step'} {step + 1}{of_all} is applied here")
            case WorkerBeginsReport():
                self._works = True
                self._print(report.line)
            case WorkerProgressReport(version, stage, n_handed_in, n_of_stage) if n_of_stage and self._works:
                share = f"{n_handed_in} of {n_of_stage} microbatches of stage {stage} ({n_handed_in / n_of_stage:.0%})"
                self._now_and_then(f"step {version} of {self._n_steps} is done; has handed in {share} since it came")
            case UnreachedReport(left_s):
                where = format_address(self._coordinator)
                self._print(f"waiting for the coordinator at {where}, for another {left_s:.0f} s at most")
            case StillReadyReport(waited_s, is_heard=False):
                silence = f"no process answers at {format_address(self._coordinator)}, where the coordinator was"
                self._print(f"has waited {waited_s:.0f} s until the run takes it in; {silence}")
            case PushReport() | PullReport() | SnapshotReport() | KeptReport():
                pass  # there are many; the trace has them
            case TasksStolenReport() | WorkerProgressReport():
                pass  # there are many, or those before its first microbatch; the trace has them
            case _:
                self._print(report.line)

    def _now_and_then(self, line: str) -> None:
        """There is such a line for each step."""
        if time.monotonic() - self._step_s >= STEP_EVERY_S:
            self._step_s = time.monotonic()
            self._print(line)

    def _print(self, line: str) -> None:
        print_line(named(self._name, f"{time.strftime('%H:%M:%S')} {line}"))


def named(name: str, line: str) -> str:
    """The line with the name of its process at its beginning, unless it is there already."""
    return line if line.startswith((f"{name}:", f"{name} (")) else f"{name}: {line}"
