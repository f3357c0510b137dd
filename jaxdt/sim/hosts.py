"""Cores in virtual time: k computations at once on a host of c cores each go at the rate min(1, c / k)."""

from collections.abc import Callable

At = Callable[..., None]  # at(when_s, callback, args=()): see EventQueue


def make_host(n_cores: float, n_at_once: int, at: At) -> "SimulatedHost | OwnCores":
    """The host of peers that want at most n_at_once cores at the same time."""
    return OwnCores(at) if n_cores >= n_at_once else SimulatedHost(n_cores, at)


class OwnCores:
    """A host on which nothing ever waits for a core."""

    def __init__(self, at: At):
        self._at = at

    def start(self, now_s: float, peer: int, seconds: float, finished: Callable[..., None], args: tuple = ()) -> None:
        """Call finished(*args) after `seconds`."""
        self._at(now_s + seconds, finished, args)


class SimulatedHost:
    """Shares its cores evenly among its computations (Work and the handling of messages), each on at most one core."""

    def __init__(self, n_cores: float, at: At):
        self._n_cores = n_cores
        self._at = at
        self._remaining_s: dict[tuple[int, int], float] = {}  # by (peer, number of the computation)
        self._finished: dict[tuple[int, int], tuple[Callable[..., None], tuple]] = {}
        self._n_started = 0
        self._updated_s = 0.0
        self._wake_up_number = 0

    def start(self, now_s: float, peer: int, seconds: float, finished: Callable[..., None], args: tuple = ()) -> None:
        """Call finished(*args) after `seconds` of one core's work for `peer`."""
        self._advance(now_s)
        self._n_started += 1
        computation = peer, self._n_started
        self._remaining_s[computation] = seconds
        self._finished[computation] = (finished, args)
        self._schedule(now_s)

    @property
    def _rate(self) -> float:
        return min(1.0, self._n_cores / len(self._remaining_s))

    def _advance(self, now_s: float) -> None:
        if self._remaining_s:
            done_s = (now_s - self._updated_s) * self._rate
            self._remaining_s = {
                computation: remaining_s - done_s for computation, remaining_s in self._remaining_s.items()
            }
        self._updated_s = now_s

    def _schedule(self, now_s: float) -> None:
        """Register a wake-up for the computation that ends first; earlier wake-ups become stale."""
        self._wake_up_number += 1
        if self._remaining_s:
            first = min(self._remaining_s, key=lambda computation: (self._remaining_s[computation], computation))
            when_s = now_s + max(0.0, self._remaining_s[first]) / self._rate
            number = self._wake_up_number
            self._at(when_s, lambda: self._complete(when_s, first) if number == self._wake_up_number else None)

    def _complete(self, now_s: float, computation: tuple[int, int]) -> None:
        self._advance(now_s)
        del self._remaining_s[computation]
        finished, args = self._finished.pop(computation)
        self._schedule(now_s)
        finished(*args)
