"""The plan's pipelines as a view fills them, and the routes through them while some places are open.

A peer of the plan has its own place. Other peers of its stage take the open places, in the order of their ids; a peer
that finds none is in reserve. For an open place a pipeline borrows the other replicas of the stage, one microbatch from
each in turn, so that the load is shared. All of it follows from the view, so all members agree without a message.
"""

import functools
from collections.abc import Collection, Iterator, Sequence

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import NO_PEER
from jaxdt.run.plan import Plan
from jaxdt.run.work import WorkKind
from jaxdt.wiring.route_policy import Route

Places = Sequence[Sequence[int | None]]  # [stage][pipeline]: a peer, or None for an open place


class PipelineAssignment:
    """`replicas[stage]` are the peers that are there; `is_whole`: every place is taken. Not to be written to: all peers
    of a simulation share it."""

    def __init__(self, placement: Sequence[Sequence[int]], replicas: tuple[tuple[int, ...], ...]):
        self.replicas = replicas
        self.places: Places = [list(_fill(row, peers)) for row, peers in zip(placement, replicas, strict=True)]
        self.is_whole = all(None not in row for row in self.places)

    def pipeline_of(self, stage: int, peer: int) -> int | None:
        """The pipeline of a peer; None for a peer in reserve."""
        return self.places[stage].index(peer) if peer in self.places[stage] else None


def _fill(planned: Sequence[int], present: tuple[int, ...]) -> Iterator[int | None]:
    own, there = set(planned), set(present)
    others = (peer for peer in present if peer not in own)
    return (peer if peer in there else next(others, None) for peer in planned)


def pipeline_assignment(plan: Plan, view: ev.View, members: Collection[int]) -> PipelineAssignment:
    """The assignment of the `members` of a view that compute to the places of the plan."""
    replicas: list[list[int]] = [[] for _ in plan.placement]
    computing = set(members)
    for member in view.members:
        if member.peer in computing:
            replicas[member.stage].append(member.peer)
    return _pipeline_assignment(plan.placement, tuple(map(tuple, replicas)))


_pipeline_assignment = functools.lru_cache(maxsize=16)(PipelineAssignment)


class PlannedRoutes:
    """Each microbatch travels its own pipeline, and passes open places by way of borrowed replicas. The first peer of
    its route owns it. A peer lets as many be on their way as the schedule has in flight in the pipelines that it
    begins.
    """

    def __init__(self, plan: Plan, peer: int):
        self._plan, self._peer = plan, peer
        self._depth = max(plan.shares) if plan.schedule == "gpipe" else plan.depth(0)
        self._assignment: PipelineAssignment | None = None
        self.in_flight_limit = self._depth

    def adopt(self, view: ev.View, members: Sequence[int]) -> None:
        self._assignment = pipeline_assignment(self._plan, view, members)
        first = self._assignment.places[0]
        n_borrowed = first.count(None) if self._peer in first else 0
        self.in_flight_limit = self._depth * (1 + n_borrowed)

    def begin_step(self, view: ev.View) -> None:
        self.adopt(view, [member.peer for member in view.members])

    def owning_router(self, kind: str, microbatch: int) -> int:
        return self._peer_of(0, kind, microbatch)

    def priority(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Held-out microbatches first, as in every step; then the pipelines in turn."""
        pipeline, rank = self._place(kind, microbatch)
        return (kind != WorkKind.EVALUATE, rank, pipeline)

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        return self._place(kind, microbatch)[0]

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[Route]:
        return [self._route(kind, microbatch, lo, hi) for microbatch in microbatches]

    def _route(self, kind: str, microbatch: int, lo: int, hi: int) -> Route:
        stages = range(self._plan.n_stages)
        return tuple(self._peer_of(s, kind, microbatch) if lo <= s <= hi else NO_PEER for s in stages)

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
        """The plan knows no speeds."""

    def reroute(self, stage: int, peer: int) -> None:
        """The plan has one peer for each microbatch."""

    def _place(self, kind: str, microbatch: int) -> tuple[int, int]:
        """A microbatch's pipeline, and its number in it."""
        pipeline = self._plan.pipeline_of(microbatch, held_out=kind == WorkKind.EVALUATE)
        if kind == WorkKind.EVALUATE:
            return pipeline, microbatch // self._plan.n_pipelines
        return pipeline, microbatch - self._plan.microbatches(pipeline).start

    def _peer_of(self, stage: int, kind: str, microbatch: int) -> int:
        assert self._assignment is not None
        pipeline, rank = self._place(kind, microbatch)
        own, replicas = self._assignment.places[stage][pipeline], self._assignment.replicas[stage]
        return replicas[(pipeline + rank) % len(replicas)] if own is None else own
