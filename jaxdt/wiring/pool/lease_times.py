"""How long a worker may take for what it was asked for, learned from what took how long before.

The time counts from the request to the answer, so it contains the link and the worker's queue. A worker of which
nothing is known yet is measured by the others. After each failure of the same task the time doubles: what is slow for
everybody gets done in the end.
"""

from collections import defaultdict, deque

from jaxdt.protocol.deadline import FIRST_CONTACT_S, WINDOW, spread_s

FACTOR = 3.0  # of the median (hybrid parameter servers give no number)


class LeaseTimes:
    """The deadlines of the workers of one server. `floor_s`: the shortest one."""

    def __init__(self, floor_s: float):
        self._floor_s = floor_s
        self._of_worker: defaultdict[tuple[int, str], deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._of_all: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def took(self, worker: int, what: str, seconds: float) -> None:
        """The worker has answered in time."""
        self._of_worker[worker, what].append(seconds)
        self._of_all[what].append(seconds)

    def forget(self, worker: int) -> None:
        """The worker is gone; should it come again, it is measured by the others first."""
        for key in [key for key in self._of_worker if key[0] == worker]:
            del self._of_worker[key]

    def timeout_s(self, worker: int, what: str, n_failures: int = 0) -> float:
        """How long the worker may take, after so many failures of others or its own. Nothing of the kind was ever
        done: as long as a process may take to begin, since it may have to compile."""
        seconds = self._of_worker.get((worker, what)) or self._of_all.get(what)
        timeout_s = spread_s(seconds, FACTOR) if seconds else FIRST_CONTACT_S
        return max(self._floor_s, timeout_s) * 2**n_failures
