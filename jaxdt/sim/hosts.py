"""Cores in virtual time: k computations at once on a host of c cores each go at min(1, c / k)."""

from collections.abc import Callable

At = Callable[..., None]  # at(when_s, happen, args=()): see EventQueue


def host_of(n_cores: float, n_at_once: int, at: At) -> "SimulatedHost | OwnCores":
    """The host of peers that want so many cores at once, at the most."""
    return OwnCores(at) if n_cores >= n_at_once else SimulatedHost(n_cores, at)


class OwnCores:
    """A host on which nobody ever waits for a core."""

    def __init__(self, at: At):
        self._at = at

    def start(self, now_s: float, peer: int, seconds: float, finished: Callable[..., None], args: tuple = ()) -> None:
        """Call finished(*args) after `seconds`."""
        self._at(now_s + seconds, finished, args)


class SimulatedHost:
    """Shares its cores evenly among what runs on it: Works, and the handling of messages, each on at most one core."""

    def __init__(self, n_cores: float, at: At):
        self._n_cores, self._at = n_cores, at
        self._left_s: dict[tuple[int, int], float] = {}  # by peer and number
        self._finished: dict[tuple[int, int], tuple[Callable[..., None], tuple]] = {}
        self._n_started = 0
        self._since_s = 0.0
        self._plan = 0

    def start(self, now_s: float, peer: int, seconds: float, finished: Callable[..., None], args: tuple = ()) -> None:
        """Call finished(*args) after `seconds` of one core's work for `peer`."""
        self._progress(now_s)
        self._n_started += 1
        one = peer, self._n_started
        self._left_s[one], self._finished[one] = seconds, (finished, args)
        self._schedule(now_s)

    @property
    def _rate(self) -> float:
        return min(1.0, self._n_cores / len(self._left_s))

    def _progress(self, now_s: float) -> None:
        if self._left_s:
            done_s = (now_s - self._since_s) * self._rate
            self._left_s = {one: left_s - done_s for one, left_s in self._left_s.items()}
        self._since_s = now_s

    def _schedule(self, now_s: float) -> None:
        """One pending wake-up at a time; older ones are stale."""
        self._plan += 1
        if self._left_s:
            first = min(self._left_s, key=lambda one: (self._left_s[one], one))
            when_s = now_s + max(0.0, self._left_s[first]) / self._rate
            plan = self._plan
            self._at(when_s, lambda: self._complete(when_s, first) if plan == self._plan else None)

    def _complete(self, now_s: float, one: tuple[int, int]) -> None:
        self._progress(now_s)
        del self._left_s[one]
        finished, args = self._finished.pop(one)
        self._schedule(now_s)
        finished(*args)
