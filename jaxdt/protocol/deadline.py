"""Deadlines that follow what was observed: median + k * MAD of past intervals, never below a floor."""

import statistics
from collections import deque
from collections.abc import Collection

WINDOW = 64
SPREADS = 8.0
FIRST_CONTACT_S = 120.0  # for so long a process looks for the coordinator when it starts
RECONNECT_S = 1.5  # a broken connection that does not come back within it is a fault


def spread_s(values_s: Collection[float], factor: float = 1.0) -> float:
    """factor * median + k * MAD of durations; all but a few of their like are shorter."""
    median_s = statistics.median(values_s)
    return factor * median_s + SPREADS * statistics.median(abs(value_s - median_s) for value_s in values_s)


class Deadline:
    """How long a silence may last before it means something, learned from the intervals between arrivals."""

    def __init__(self, floor_s: float):
        self._floor_s = floor_s
        self._intervals_s: deque[float] = deque(maxlen=WINDOW)
        self._last_s: float | None = None

    def arrived(self, now_s: float) -> None:
        """Something came at now_s."""
        if self._last_s is not None:
            self._intervals_s.append(now_s - self._last_s)
        self._last_s = now_s

    @property
    def timeout_s(self) -> float:
        if not self._intervals_s:
            return self._floor_s
        return max(self._floor_s, spread_s(self._intervals_s))

    def silence_s(self, now_s: float) -> float:
        """Seconds since the last arrival; 0 before the first."""
        return 0.0 if self._last_s is None else now_s - self._last_s

    def passed(self, now_s: float) -> bool:
        silence_s = self.silence_s(now_s)
        return silence_s > self._floor_s and silence_s > self.timeout_s  # the floor first: medians take time
