"""By how much what a process takes grows with time, apart from what it takes for those it is connected to."""

import itertools
import statistics
from collections.abc import Sequence

WARM_UP = 0.25  # of the time
WHAT = ("rss", "fds", "threads")
SEEN_MIN = 5  # samples of a number of members in each half, for it to count

Sample = tuple[float, int, int, int, int]  # seconds, then resident bytes, file descriptors, threads, and members


def growth(samples: Sequence[Sample], period_s: float) -> dict[str, float]:
    """Of each figure, what it has gained in the time after the warm-up, as a fraction.

    rss: a straight line through the least of each period, over the mean. fds, threads: they follow the number of
    members, so they are compared at an equal number only: the median of the second half less that of the first, over
    the latter, of the number of members at which it is most. The median, since for moments a member that was killed has
    no connections any more or one that comes has some already, and checkpoints have threads of their own."""
    settled = [sample for sample in samples if sample[0] > WARM_UP * samples[-1][0]]
    found = {"rss": _of_line(settled, period_s)}
    return found | {what: _at_equal_members(settled, at) for at, what in enumerate(WHAT[1:], start=2)}


def _of_line(samples: Sequence[Sample], period_s: float) -> float:
    periods = [list(group) for _, group in itertools.groupby(samples, key=lambda one: one[0] // period_s)]
    seconds = [period[0][0] for period in periods]
    values = [min(sample[1] for sample in period) for period in periods]
    slope = statistics.linear_regression(seconds, values).slope
    return slope * (seconds[-1] - seconds[0]) / statistics.mean(values)


def _at_equal_members(samples: Sequence[Sample], at: int) -> float:
    middle_s = (samples[0][0] + samples[-1][0]) / 2
    halves: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for sample in samples:
        halves[sample[0] > middle_s].setdefault(sample[4], []).append(sample[at])
    median = statistics.median
    both = [n for n in halves[0] if min(len(half.get(n, ())) for half in halves) >= SEEN_MIN]
    return max((median(halves[1][n]) / median(halves[0][n]) - 1.0 for n in both), default=float("inf"))
