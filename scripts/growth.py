"""By how much what a process takes grows with time, apart from what it takes for those it is connected to."""

import itertools
from collections.abc import Sequence

import numpy as np

WARM_UP = 0.25  # of the time
WHAT = ("rss", "fds", "threads")
BY_MEMBERS = ("fds", "threads")  # so many for each member; memory is kept for the next one when a member goes

Sample = tuple[float, int, int, int, int]  # seconds, then resident bytes, file descriptors, threads, and members


def growth(samples: Sequence[Sample], period_s: float) -> dict[str, float]:
    """What a straight line gains over the time after the warm-up, as a fraction of the mean.

    It goes through the least of each period, since connections to those who come and go are open for moments. File
    descriptors and threads follow the number of members, so they are compared with those at an equal number of members:
    the least of each period and number, and of figure = a + b * members + c * seconds only c counts."""
    settled = [sample for sample in samples if sample[0] > WARM_UP * samples[-1][0]]
    return {what: _grown(settled, at, period_s, what in BY_MEMBERS) for at, what in enumerate(WHAT, start=1)}


def _grown(samples: Sequence[Sample], at: int, period_s: float, by_members: bool) -> float:
    def alike(sample: Sample) -> tuple[float, int]:
        return sample[0] // period_s, sample[4] if by_members else 0

    groups = [list(group) for _, group in itertools.groupby(sorted(samples, key=alike), key=alike)]
    values = np.array([min(sample[at] for sample in group) for group in groups], float)
    seconds = np.array([group[0][0] for group in groups])
    members = np.array([alike(group[0])[1] for group in groups], float)
    columns = np.stack([np.ones_like(seconds), members - members.mean(), seconds - seconds.mean()], axis=1)
    slope = np.linalg.lstsq(columns, values, rcond=None)[0][2]
    return float(slope * np.ptp(seconds) / values.mean())
