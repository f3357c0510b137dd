"""The recent evictions of peers: a peer that comes and goes waits before it is admitted again."""

from collections.abc import Iterable

FORGIVEN_STEPS = 128  # after so many steps without another eviction a peer is like any other
BACKOFF_STEPS_MAX = 64


class EvictionHistory:
    """Counted in steps of the run."""

    def __init__(self):
        self._evicted: dict[int, tuple[int, int]] = {}  # peer -> how often, and the step of the last time

    def add(self, peers: Iterable[int], n_committed: int) -> None:
        """These peers were evicted after so many steps."""
        recent = {p: (n, at) for p, (n, at) in self._evicted.items() if n_committed - at < FORGIVEN_STEPS}
        for peer in peers:
            recent[peer] = (recent.get(peer, (0, 0))[0] + 1, n_committed)
        self._evicted = recent

    def clear(self) -> None:
        """The run has gone back to a checkpoint: steps are counted from there."""
        self._evicted.clear()

    def forget(self, peer: int) -> None:
        self._evicted.pop(peer, None)

    def may_return(self, peer: int, n_committed: int) -> bool:
        """A peer that was evicted once may come back at once. After more evictions it waits 2, 4, 8, ... steps, because
        each one costs the others a deadline."""
        n_evictions, last_step = self._evicted.get(peer, (0, 0))
        return n_evictions < 2 or n_committed - last_step >= min(2 ** (n_evictions - 1), BACKOFF_STEPS_MAX)
