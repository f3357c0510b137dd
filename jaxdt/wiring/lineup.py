"""The plan's pipelines as a view fills them, and the routes through them while some places are open.

A peer of the plan has its own place; others of its stage take the open places, in the order of their ids, and who finds
none is in reserve. For an open place a pipeline borrows the other replicas of the stage, one microbatch from each in
turn, so that the load is shared. It all follows from the view, so all members agree without a word.
"""

from collections.abc import Collection, Sequence

from jaxdt.core.events import EVALUATE, NOBODY, View
from jaxdt.core.plan import Plan

Seats = Sequence[Sequence[int | None]]


class Lineup:
    """Of those `members` of a view that compute. seats[stage][pipeline] is a peer, or None for an open place."""

    def __init__(self, plan: Plan, view: View, members: Collection[int]):
        self.seats: list[list[int | None]] = []
        self.replicas: list[tuple[int, ...]] = []
        for stage, planned in enumerate(plan.placement):
            here = tuple(peer for peer in view.stage_peers(stage) if peer in members)
            others = iter([peer for peer in here if peer not in planned])
            self.seats.append([peer if peer in here else next(others, None) for peer in planned])
            self.replicas.append(here)

    @property
    def whole(self) -> bool:
        """Whether every place is taken."""
        return all(None not in row for row in self.seats)

    def pipeline_of(self, stage: int, peer: int) -> int | None:
        """Where a peer sits; None for one in reserve."""
        return self.seats[stage].index(peer) if peer in self.seats[stage] else None


class PlannedRoutes:
    """Each microbatch along its own pipeline, from which only open places are left out. Whoever is its first peer
    steers it; as many are on their way as the schedule has in flight in the pipelines that a peer steers for."""

    def __init__(self, plan: Plan, peer: int):
        self._plan, self._peer = plan, peer
        self._depth = max(plan.shares) if plan.schedule == "gpipe" else plan.depth(0)
        self._lineup: Lineup | None = None
        self.window = self._depth

    def adopt(self, view: View, members: Sequence[int]) -> None:
        self._lineup = Lineup(self._plan, view, members)
        first = self._lineup.seats[0]
        borrowed = first.count(None) if self._peer in first else 0
        self.window = self._depth * (1 + borrowed)

    def welcome(self, view: View) -> None:
        self.adopt(view, [member.peer for member in view.members])

    def steersman(self, kind: str, microbatch: int) -> int:
        return self._peer_of(0, kind, microbatch)

    def turn(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Held-out microbatches first, as ever; then the pipelines in turn."""
        pipeline, rank = self._place(kind, microbatch)
        return (kind != EVALUATE, rank, pipeline)

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        return self._place(kind, microbatch)[0]

    def route(self, kind: str, microbatch: int, lo: int, hi: int) -> tuple[int, ...] | None:
        stages = range(self._plan.n_stages)
        return tuple(self._peer_of(s, kind, microbatch) if lo <= s <= hi else NOBODY for s in stages)

    def measured(self, stage: int, peer: int, kind: str, began_s: float, now_s: float) -> None:
        """The plan knows no speeds."""

    def _place(self, kind: str, microbatch: int) -> tuple[int, int]:
        """A microbatch's pipeline, and its number in it."""
        pipeline = self._plan.pipeline_of(microbatch, held_out=kind == EVALUATE)
        if kind == EVALUATE:
            return pipeline, microbatch // self._plan.n_pipelines
        return pipeline, microbatch - self._plan.microbatches(pipeline).start

    def _peer_of(self, stage: int, kind: str, microbatch: int) -> int:
        pipeline, rank = self._place(kind, microbatch)
        own, replicas = self._lineup.seats[stage][pipeline], self._lineup.replicas[stage]
        return replicas[(pipeline + rank) % len(replicas)] if own is None else own
