"""Errors of two predictors: the simulator's, and a naive one that knows one number for each cut of the model."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from prediction_error.raw import CaseRuns


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
