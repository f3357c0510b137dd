"""The part that decides which stage needs a peer; the coordinator asks it.

`stages[s]` are the peers of stage s: its members, and the peers on their way to it. jaxdt.build gives the coordinator
jaxdt.wiring.rebalance where the config asks for it, else ByNumber.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxdt.protocol import events as ev

Stages = Sequence[Collection[int]]


@dataclass(frozen=True, order=True)
class Move:
    """`peer` leaves stage `src` for stage `dst`."""

    peer: int
    src: int
    dst: int


class ByNumber:
    """A stage needs a peer the more, the fewer peers it has. No peer changes stages. Other rules are subclasses. Time
    comes in as an argument."""

    def report(self, now_s: float, peer: int, load: ev.Load) -> None:
        """A peer's measured queue and busy time."""
        return

    def moves(self, now_s: float, stages: Stages, may_move: Collection[int]) -> list[Move]:
        """The moves that are due now, of peers in `may_move`."""
        return []

    def stage_for(self, stages: Stages) -> int:
        """The stage for a newcomer."""
        return min(range(len(stages)), key=lambda stage: (len(stages[stage]), stage))

    def better(self, stages: Stages, peer: int) -> int | None:
        """Another stage that needs a newcomer more than the one of `stages` that it is on its way to."""
        own = next(stage for stage, peers in enumerate(stages) if peer in peers)
        best = self.stage_for(stages)
        return best if len(stages[own]) - 1 > len(stages[best]) else None
