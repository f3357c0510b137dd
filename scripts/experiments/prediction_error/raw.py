"""Raw data of predictions: a file of JSON lines, one for each run, or for each case where the runs were not kept.

A line has `case`, `predicted_s` and `measured_s`. The second word of a case is its cut, such as 2x1. In a line of a
whole case the seconds are medians and `errors` holds predicted / measured - 1 of each of its runs. A line with `about`
instead says where the series was made.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdt.run.errors import BadInput

EMULATED, HOSTS = "emulated.jsonl", "hosts.jsonl"


@dataclass(frozen=True)
class CaseRuns:
    """The runs of one case: medians of predicted and measured seconds, and the error of each run."""

    case: str
    predicted_s: float
    measured_s: float
    errors: tuple[float, ...]

    @property
    def cut(self) -> str:
        return self.case.split()[1]

    @property
    def error(self) -> float:
        """The median of the runs' errors."""
        return statistics.median(self.errors)


@dataclass(frozen=True)
class Series:
    """All that one file holds. `lines`: of runs or cases, as they stand there."""

    about: dict[str, Any]
    lines: tuple[dict[str, Any], ...]

    @property
    def cases(self) -> list[CaseRuns]:
        """The runs of each case, in the order of the file."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.lines:
            found.setdefault(line["case"], []).append(line)
        return [_case_runs(case, lines) for case, lines in found.items()]


def _case_runs(case: str, lines: list[dict[str, Any]]) -> CaseRuns:
    predicted_s, measured_s = (
        statistics.median(line[name] for line in lines) for name in ("predicted_s", "measured_s")
    )
    errors = [error for line in lines for error in line.get("errors", [line["predicted_s"] / line["measured_s"] - 1])]
    return CaseRuns(case, predicted_s, measured_s, tuple(errors))


def read(path: Path) -> Series:
    """A series from its file. BadInput for a line that is not of one."""
    about: dict[str, Any] = {}
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        line = json.loads(text)
        if "about" in line:
            about = line["about"]
        elif not {"case", "predicted_s", "measured_s"} <= set(line):
            raise BadInput(f"{path}: line {number}: got {text:.40}, expected case, predicted_s and measured_s")
        else:
            lines.append(line)
    return Series(about, tuple(lines))
