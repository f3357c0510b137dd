"""configs/prediction/README.md, from the raw data beside it: the errors of two predictors, the simulator's and a naive
one that knows one number for each cut of the model.

A line has `case`, `predicted_s` and `measured_s`. The second word of a case is its cut, such as 2x1. In a line of a
whole case, whose runs were not kept, the seconds are medians and `errors` holds predicted / measured - 1 of each of its
runs.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison import Line, comparison_of, told
from page import ROOT, filled, markdown_table

from prediction_error.network_hosts import CITIES_GBPS, NETWORKS

EMULATED, HOSTS = "emulated.jsonl", "hosts.jsonl"
FIELDS = ("case", "predicted_s", "measured_s")


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


def cases_of(lines: Sequence[Line]) -> list[CaseRuns]:
    """The runs of each case, in the order of the lines."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(line["case"], []).append(line)
    return [_case_runs(case, own) for case, own in found.items()]


def _case_runs(case: str, lines: list[Line]) -> CaseRuns:
    predicted_s, measured_s = (
        statistics.median(line[name] for line in lines) for name in ("predicted_s", "measured_s")
    )
    errors = [error for line in lines for error in line.get("errors", [line["predicted_s"] / line["measured_s"] - 1])]
    return CaseRuns(case, predicted_s, measured_s, tuple(errors))


@dataclass(frozen=True)
class CutErrors:
    """Absolute errors of the cases with one cut, medians and maxima, as fractions. `constant_s`: the naive prediction
    of all of them."""

    cut: str
    n_cases: int
    ours: float
    ours_max: float
    constant_s: float
    naive: float
    naive_max: float


def by_cut(cases: Sequence[CaseRuns]) -> list[CutErrors]:
    """For each cut, in the order of the cases. The naive prediction is the median of the measured seconds of all cases
    with this cut: a constant that is chosen after the fact and knows neither links nor codec nor schedule."""
    found = []
    for cut in dict.fromkeys(case.cut for case in cases):
        those = [case for case in cases if case.cut == cut]
        constant_s = statistics.median(case.measured_s for case in those)
        ours = [abs(case.error) for case in those]
        naive = [abs(constant_s / case.measured_s - 1) for case in those]
        medians = statistics.median(ours), statistics.median(naive)
        found.append(CutErrors(cut, len(those), medians[0], max(ours), constant_s, medians[1], max(naive)))
    return found


def absolute_runs(cases: Sequence[CaseRuns]) -> list[float]:
    """Absolute errors of all single runs."""
    return [abs(error) for case in cases for error in case.errors]


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval of a median by the sign test, for any distribution: the k-th smallest to the k-th largest value,
    with the largest k that gives the confidence. Fewer than six values give their whole range."""
    ordered = sorted(values)
    n, k, tail = len(ordered), 0, 0.5 ** len(ordered)
    while tail + math.comb(n, k + 1) * 0.5**n <= (1 - confidence) / 2:
        k += 1
        tail += math.comb(n, k) * 0.5**n
    return ordered[k], ordered[n - 1 - k]


def values(folder: Path, out: Path) -> dict[str, Any] | None:
    """What the page shows. The tables of real hosts are there once their data are."""
    (about, lines), (about_hosts, lines_hosts) = (comparison_of(name).read(folder) for name in ("emulated", "hosts"))
    if not lines:
        return None
    hosts = NO_HOSTS_TEXT
    if lines_hosts:
        shown = dict(about=told(about_hosts), lines=lines_hosts, cases=cases_of(lines_hosts))
        hosts = filled((ROOT / "configs/prediction/hosts.md").read_text(), sys.modules[__name__], shown)
    return dict(about=told(about), cases=cases_of(lines), hosts=hosts)


def result(lines: Sequence[Line]) -> dict[str, Any]:
    """The median and the largest error of the cases."""
    errors = [abs(case.error) for case in cases_of(lines)]
    found = dict(error_median=statistics.median(errors), error_max=max(errors)) if errors else {}
    return {"cases": len(errors)} | found


def load_sentence(lines: Sequence[Line]) -> str:
    """How busy the machine was before each round of all cases; the load contains the run before."""
    loads: dict[int, list[float]] = {}
    for line in lines:
        loads.setdefault(line["seed"], []).append(line["load_before"])
    told = [f"{statistics.median(values):.1f} (at most {max(values):.1f})" for _, values in sorted(loads.items())]
    return (
        f"Load of the machine before the runs of each round, median: {', '.join(told)}; the run before, with its five "
        "processes, is part of it.\n"
    )


def summary(cases: list[CaseRuns]) -> str:
    errors = [100 * abs(case.error) for case in cases]
    runs = [100 * error for error in absolute_runs(cases)]
    low, high = median_interval(errors)
    return (
        f"Cases differ by {statistics.median(errors):.1f} % in the median (95 % interval {low:.1f} to {high:.1f} %) "
        f"and by {max(errors):.1f} % at the worst. "
        f"Single runs differ by {statistics.median(runs):.1f} % in the median and by {max(runs):.1f} % at the worst.\n"
    )


def errors_table(cases: list[CaseRuns]) -> str:
    """Both predictors by cut."""
    rows = []
    for cut in by_cut(cases):
        ours, naive = (
            [f"{100 * error:.1f} %" for error in pair]
            for pair in ((cut.ours, cut.ours_max), (cut.naive, cut.naive_max))
        )
        rows.append([cut.cut, cut.n_cases, *ours, f"{cut.constant_s:.3f}", *naive])
    head = ["cut", "cases", "ours, median", "ours, worst", "one constant, s", "its median", "its worst"]
    return markdown_table(head, rows) + "\n"


def naive_sentence(cases: list[CaseRuns]) -> str:
    """Where the simulator beats the constant, and where it hardly does."""
    told = [f"{cut.cut} {cut.naive / cut.ours:.1f}" for cut in by_cut(cases)]
    return f"The constant's median error over ours: {', '.join(told)}.\n"


def systems_sentence(cases: list[CaseRuns]) -> str:
    """Swarm wiring against 1F1B, as measured and as predicted."""
    by_name = {case.case: case for case in cases}
    told = []
    for network in NETWORKS:
        pair = [by_name.get(f"{network} 2x2 {system}") for system in ("swarm", "1f1b")]
        if pair[0] and pair[1]:
            measured, predicted = pair[0].measured_s / pair[1].measured_s, pair[0].predicted_s / pair[1].predicted_s
            told.append(f"{measured:.3f} on {network} (predicted {predicted:.3f})")
    return f"Measured seconds of swarm wiring over those of 1F1B at equal depth: {'; '.join(told)}.\n"


def cases_rows(cases: list[CaseRuns]) -> list[list]:
    rows = []
    for case in cases:
        runs = ", ".join(f"{100 * error:+.1f}" for error in case.errors)
        seconds = f"{case.predicted_s:.3f}", f"{case.measured_s:.3f}"
        rows.append([case.case, *seconds, f"{100 * case.error:+.1f} %", runs])
    return rows


def links_text() -> list[str]:
    """The router's settings on each network."""
    told = []
    for name, link in NETWORKS.items():
        one = link(0, 1)
        if name.startswith("four_cities"):
            told.append(
                f"`{name}`: [four_cities.json](../networks/four_cities.json), at most {CITIES_GBPS:g} Gb/s, jitter "
                f"{1e3 * one.jitter_s:g} ms, loss {100 * one.drop_prob:g} %"
            )
        else:
            told.append(
                f"`{name}`: {1e3 * one.latency_s:g} ms one way, {one.gbps:g} Gb/s, jitter {1e3 * one.jitter_s:g} ms, "
                f"loss {100 * one.drop_prob:g} %"
            )
    return told


NO_HOSTS_TEXT = """## Over real TCP between hosts

No data yet:
`python scripts/experiments/compare.py hosts --run_dir=runs/hosts --page=configs/prediction`
takes a quarter of an hour, as root.
"""
