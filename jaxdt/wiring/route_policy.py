"""The policy that a routed wiring asks which router owns a microbatch, and along which peers the microbatch travels."""

from collections.abc import Sequence
from typing import Protocol

from jaxdt.protocol import events as ev

Route = tuple[int, ...]  # one peer per stage, NO_PEER where nothing has to be done


class RoutePolicy(Protocol):
    """A microbatch or held-out microbatch is named by `kind` (FORWARD or EVALUATE) and number. All peers of a view know
    which router owns which microbatch; only that router chooses the route. `in_flight_limit`: how many tasks this
    peer's router has on their way at a time."""

    in_flight_limit: int

    def adopt(self, view: ev.View, members: Sequence[int]) -> None:
        """The members of a view that compute in the step under way; no others are chosen any more."""

    def begin_step(self, view: ev.View) -> None:
        """The step after that of the view: members that joined with the view compute too."""

    def owning_router(self, kind: str, microbatch: int) -> int:
        """The peer that begins it."""
        ...

    def priority(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Lower ones begin first, equal ones as they come."""
        ...

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        """The pipeline whose codecs it travels with."""
        ...

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[Route]:
        """Routes through the stages lo..hi for the first of these microbatches, which begin together. None while one of
        the stages is empty."""
        ...

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
        """A peer has done a Work (FORWARD or BACKWARD) in so many seconds."""

    def reroute(self, stage: int, peer: int) -> int | None:
        """Another peer for a forward that is stuck at `peer`; None if there is no other peer now. `peer` is chosen
        again only once it has done a Work, or if there is no other."""
        ...
