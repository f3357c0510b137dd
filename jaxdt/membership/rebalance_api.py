"""Which stage needs a peer: what the coordinator asks of whoever decides it (jaxdt.wiring.rebalance does, if asked to).

`stages[s]` are the peers of stage s: members, and those on their way to it.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxdt.protocol.events import Load

Stages = Sequence[Collection[int]]


@dataclass(frozen=True, order=True)
class Move:
    """`peer` leaves stage `src` for stage `dst`."""

    peer: int
    src: int
    dst: int


class Balance(Protocol):
    """Decides from what it is told; time comes in as an argument."""

    def report(self, now_s: float, peer: int, load: Load) -> None:
        """What a peer says of its queue."""

    def moves(self, now_s: float, stages: Stages, at_work: Collection[int]) -> list[Move]:
        """Those that are due now, of peers `at_work`."""

    def stage_for(self, stages: Stages) -> int:
        """The stage that a joiner is for."""

    def better(self, stages: Stages, peer: int) -> int | None:
        """Another stage that a joiner, on its way to one of `stages`, had better be for."""


class ByNumber:
    """The fewer peers, the more a stage needs one. Nobody changes stages."""

    def report(self, now_s: float, peer: int, load: Load) -> None:
        """Queues do not count."""

    def moves(self, now_s: float, stages: Stages, at_work: Collection[int]) -> list[Move]:
        return []

    def stage_for(self, stages: Stages) -> int:
        return min(range(len(stages)), key=lambda stage: (len(stages[stage]), stage))

    def better(self, stages: Stages, peer: int) -> int | None:
        own = next(stage for stage, peers in enumerate(stages) if peer in peers)
        best = self.stage_for(stages)
        return best if len(stages[own]) - 1 > len(stages[best]) else None
