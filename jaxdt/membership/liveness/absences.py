"""Silent peers that may live, and may hold what a stage has committed last.

Silence is no proof of death. The last replica of a stage that falls silent stays a member, and the run waits for it. So
does a replica that was evicted just before: it holds the committed version until the next step is committed without it.
Going back to a checkpoint would give up that state, so the run goes back only when no such peer is left (step protocol,
Sec. 6.1, 6.2). A peer is no longer awaited once its process is known to have ended, once it is back and says what
it holds, or when it has been silent for the grace period.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Absence:
    """The absence of one peer. `version`: updates that the peer's state has seen; None for a member, whose state
    follows the committed steps."""

    stage: int
    since_s: float
    version: int | None = None


class Absences:
    """Time comes in as an argument."""

    def __init__(self, grace_s: float):
        self._grace_s = grace_s
        self._by_peer: dict[int, Absence] = {}

    def __contains__(self, peer: object) -> bool:
        return peer in self._by_peer

    def add(self, now_s: float, peer: int, stage: int, version: int | None = None) -> None:
        """A peer that held its stage's state is silent from now on."""
        self._by_peer[peer] = Absence(stage, now_s, version)

    def end(self, peer: int) -> None:
        """The peer is back, or its process has ended."""
        self._by_peer.pop(peer, None)

    def expire(self, now_s: float) -> bool:
        """Stop to wait for peers that have been silent for the grace period; whether there were some."""
        over = [peer for peer, absence in self._by_peer.items() if now_s - absence.since_s >= self._grace_s]
        for peer in over:
            del self._by_peer[peer]
        return bool(over)

    def of_stage(self, stage: int) -> list[int]:
        """The absent peers that may hold the stage's committed state."""
        return sorted(peer for peer, absence in self._by_peer.items() if absence.stage == stage)

    def waits_s(self, now_s: float, peers: Collection[int]) -> float:
        """The seconds from now on for which the run waits for these peers."""
        return max((self._by_peer[peer].since_s + self._grace_s - now_s for peer in peers), default=0.0)

    def on_evicted(self, peers: Collection[int], n_committed: int) -> None:
        """A view continues without these peers; by then `n_committed` steps were committed, as the view tells them."""
        for peer in peers:
            if peer in self._by_peer:
                self._by_peer[peer] = replace(self._by_peer[peer], version=n_committed)

    def on_committed(self, n_committed: int) -> None:
        """The states of evicted peers are outdated."""
        self._by_peer = {
            peer: absence
            for peer, absence in self._by_peer.items()
            if absence.version is None or absence.version >= n_committed
        }

    def on_rolled_back(self, members: Collection[int]) -> None:
        """A new generation: what others than its members hold is void."""
        self._by_peer = {peer: absence for peer, absence in self._by_peer.items() if peer in members}
