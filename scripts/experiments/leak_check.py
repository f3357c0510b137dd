"""The leak check: by how much the resources of a process grow with time, apart from those for its connections."""

import itertools
import statistics
from collections.abc import Sequence

WARM_UP_FRAC = 0.25  # of the time; it is not counted
FIGURES = ("rss", "fds", "threads")
SAMPLES_MIN = 5  # a number of members counts if each half has so many samples with it

Sample = tuple[float, int, int, int, int]  # seconds, resident bytes, file descriptors, threads, members


def growth(samples: Sequence[Sample], period_s: float) -> dict[str, float]:
    """By figure, the growth over the time after the warm-up, as a fraction.

    rss: the slope of a straight line through the smallest value of each period, times the duration, divided by the
    mean. fds and threads follow the number of members, so they are compared at equal numbers only: the median of the
    second half divided by that of the first half, less one, of the number of members for which this is largest. Medians
    are used because a killed member has no connections for a moment, a joining one has some before it is a member, and
    checkpoints have threads of their own."""
    counted = [sample for sample in samples if sample[0] > WARM_UP_FRAC * samples[-1][0]]
    grown = {"rss": _growth_of_minima(counted, period_s)}
    return grown | {figure: _growth_at_equal_members(counted, at) for at, figure in enumerate(FIGURES[1:], start=2)}


def _growth_of_minima(samples: Sequence[Sample], period_s: float) -> float:
    periods = [list(group) for _, group in itertools.groupby(samples, key=lambda sample: sample[0] // period_s)]
    seconds = [period[0][0] for period in periods]
    values = [min(sample[1] for sample in period) for period in periods]
    slope = statistics.linear_regression(seconds, values).slope
    return slope * (seconds[-1] - seconds[0]) / statistics.mean(values)


def _growth_at_equal_members(samples: Sequence[Sample], at: int) -> float:
    """Growth of element `at` of the samples; infinite if no number of members can be compared."""
    middle_s = (samples[0][0] + samples[-1][0]) / 2
    first: dict[int, list[int]] = {}
    second: dict[int, list[int]] = {}
    for sample in samples:
        half = second if sample[0] > middle_s else first
        half.setdefault(sample[4], []).append(sample[at])
    comparable = [n for n in first if min(len(first[n]), len(second.get(n, ()))) >= SAMPLES_MIN]
    ratios = (statistics.median(second[n]) / statistics.median(first[n]) - 1.0 for n in comparable)
    return max(ratios, default=float("inf"))
