"""The plan's pipelines as a view fills them, and the routes through them while some places are open.

A peer of the plan has its own place; others of its stage take the open places, in the order of their ids, and who finds
none is in reserve. For an open place a pipeline borrows the other replicas of the stage, one microbatch from each in
turn, so that the load is shared. It all follows from the view, so all members agree without a word.
"""

import functools
from collections.abc import Collection, Iterator, Sequence

from jaxdt.protocol.events import NOBODY, View
from jaxdt.spec.plan import Plan
from jaxdt.spec.work import EVALUATE

Seats = Sequence[Sequence[int | None]]


class PipelineAssignment:
    """seats[stage][pipeline] is a peer, or None for an open place; replicas[stage] are those who are there; `whole`:
    every place is taken. Not to be written to: all peers of a simulation share it."""

    def __init__(self, placement: Sequence[Sequence[int]], replicas: tuple[tuple[int, ...], ...]):
        self.replicas = replicas
        self.seats = [list(_seats(planned, here)) for planned, here in zip(placement, replicas, strict=True)]
        self.whole = all(None not in row for row in self.seats)

    def pipeline_of(self, stage: int, peer: int) -> int | None:
        """Where a peer sits; None for one in reserve."""
        return self.seats[stage].index(peer) if peer in self.seats[stage] else None


def _seats(planned: Sequence[int], here: tuple[int, ...]) -> Iterator[int | None]:
    there, own = set(here), set(planned)
    others = (peer for peer in here if peer not in own)
    return (peer if peer in there else next(others, None) for peer in planned)


def lineup(plan: Plan, view: View, members: Collection[int]) -> PipelineAssignment:
    """Of those `members` of a view that compute."""
    replicas, compute = [[] for _ in plan.placement], set(members)
    for member in view.members:
        if member.peer in compute:
            replicas[member.stage].append(member.peer)
    return _lineup(plan.placement, tuple(map(tuple, replicas)))


_lineup = functools.lru_cache(maxsize=16)(PipelineAssignment)


class PlannedRoutes:
    """Each microbatch along its own pipeline, from which only open places are left out. Whoever is its first peer
    steers it; as many are on their way as the schedule has in flight in the pipelines that a peer steers for."""

    def __init__(self, plan: Plan, peer: int):
        self._plan, self._peer = plan, peer
        self._depth = max(plan.shares) if plan.schedule == "gpipe" else plan.depth(0)
        self._lineup: PipelineAssignment | None = None
        self.window = self._depth

    def adopt(self, view: View, members: Sequence[int]) -> None:
        self._lineup = lineup(self._plan, view, members)
        first = self._lineup.seats[0]
        borrowed = first.count(None) if self._peer in first else 0
        self.window = self._depth * (1 + borrowed)

    def welcome(self, view: View) -> None:
        self.adopt(view, [member.peer for member in view.members])

    def owning_router(self, kind: str, microbatch: int) -> int:
        return self._peer_of(0, kind, microbatch)

    def turn(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Held-out microbatches first, as ever; then the pipelines in turn."""
        pipeline, rank = self._place(kind, microbatch)
        return (kind != EVALUATE, rank, pipeline)

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        return self._place(kind, microbatch)[0]

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[tuple[int, ...]]:
        stages = range(self._plan.n_stages)
        peer = lambda stage, m: self._peer_of(stage, kind, m) if lo <= stage <= hi else NOBODY  # noqa: E731
        return [tuple(peer(stage, m) for stage in stages) for m in microbatches]

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
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
