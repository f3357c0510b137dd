"""Cores in virtual time: k peers that compute at once on a host of c cores each go at min(1, c / k)."""

from collections.abc import Callable

At = Callable[..., None]  # at(when_s, happen, args=()): see Calendar


def host_of(n_cores: float, n_peers: int, at: At) -> "SimulatedHost | OwnCores":
    """The host of so many peers."""
    return OwnCores(at) if n_cores >= n_peers else SimulatedHost(n_cores, at)


class OwnCores:
    """A host on which no peer ever waits for a core."""

    def __init__(self, at: At):
        self._at = at

    def start(self, now_s: float, peer: int, seconds: float, finished: Callable[..., None], args: tuple = ()) -> None:
        """Call finished(*args) after `seconds`."""
        self._at(now_s + seconds, finished, args)


class SimulatedHost:
    """Shares its cores evenly among the Works that run on it. A Work uses at most one core."""

    def __init__(self, n_cores: float, at: At):
        self._n_cores, self._at = n_cores, at
        self._left_s: dict[int, float] = {}
        self._finished: dict[int, tuple[Callable[..., None], tuple]] = {}
        self._since_s = 0.0
        self._plan = 0

    def start(self, now_s: float, peer: int, seconds: float, finished: Callable[..., None], args: tuple = ()) -> None:
        """Call finished(*args) after `seconds` of one core's work for `peer`."""
        self._progress(now_s)
        self._left_s[peer], self._finished[peer] = seconds, (finished, args)
        self._schedule(now_s)

    @property
    def _rate(self) -> float:
        return min(1.0, self._n_cores / len(self._left_s))

    def _progress(self, now_s: float) -> None:
        if self._left_s:
            done_s = (now_s - self._since_s) * self._rate
            self._left_s = {peer: left_s - done_s for peer, left_s in self._left_s.items()}
        self._since_s = now_s

    def _schedule(self, now_s: float) -> None:
        """One pending wake-up at a time; older ones are stale."""
        self._plan += 1
        if self._left_s:
            peer = min(self._left_s, key=lambda p: (self._left_s[p], p))
            when_s = now_s + max(0.0, self._left_s[peer]) / self._rate
            plan = self._plan
            self._at(when_s, lambda: self._complete(when_s, peer) if plan == self._plan else None)

    def _complete(self, now_s: float, peer: int) -> None:
        self._progress(now_s)
        del self._left_s[peer]
        finished, args = self._finished.pop(peer)
        self._schedule(now_s)
        finished(*args)
