"""SWARM's Algorithm 2 as its listing says it, to compare jaxdt.wiring.rebalance with.

Each period the peer with the shortest queue of the stage with the least load (the sum of its peers' queues) moves to
the stage with the greatest load. Nothing else is asked: not how far the loads differ, nor whether the stage that gives
a peer is then the slowest one. A newcomer joins the stage with the greatest load. Not in the listing, but without it
the run would end: a stage keeps its last peer.
"""

from collections.abc import Collection

from jaxdt.membership.rebalance_api import ByNumber, Move, Stages
from jaxdt.protocol.events import Load


class LiteralRule:
    """A Balance (jaxdt.membership.rebalance_api) with the newest report of each peer."""

    def __init__(self, period_s: float):
        self._period_s = period_s
        self._due_s: float | None = None
        self._queues: dict[int, float] = {}

    def report(self, now_s: float, peer: int, load: Load) -> None:
        """A peer's measured queue; the share of time in which it computes does not count."""
        self._queues[peer] = load.queue

    def moves(self, now_s: float, stages: Stages, may_move: Collection[int]) -> list[Move]:
        """The move that is due now, if there is one."""
        if self._due_s is None:
            self._due_s = now_s + self._period_s
        if now_s < self._due_s:
            return []
        self._due_s = now_s + self._period_s
        loads = self._loads(stages)
        src, dst = (pick(range(len(loads)), key=loads.__getitem__) for pick in (min, max))
        candidates = [peer for peer in sorted(stages[src]) if peer in may_move and peer in self._queues]
        if src == dst or not candidates:
            return []
        return [Move(min(candidates, key=self._queues.__getitem__), src, dst)]

    def stage_for(self, stages: Stages) -> int:
        """The stage with the greatest load; without reports the smallest."""
        loads = self._loads(stages)
        return max(range(len(loads)), key=loads.__getitem__) if any(loads) else ByNumber().stage_for(stages)

    def better(self, stages: Stages, peer: int) -> int | None:
        """A newcomer stays with the stage that it was given."""

    def _loads(self, stages: Stages) -> list[float]:
        return [sum(self._queues.get(peer, 0.0) for peer in sorted(peers)) for peers in stages]
