"""Who steers a microbatch, and along which peers: what SwarmWiring asks, and its answer by measured speed."""

from collections.abc import Sequence
from typing import Protocol

from jaxdt.core.events import View
from jaxdt.wiring.router import Router


class Routes(Protocol):
    """A microbatch or held-out microbatch is named by `kind` (FORWARD or EVALUATE) and number. All peers of a view know
    who steers which; only that one chooses its route."""

    window: int  # tasks on their way at a time, of those that this peer steers

    def adopt(self, view: View, members: Sequence[int]) -> None:
        """Those members of a view that compute in the step under way; others are not chosen any more."""

    def welcome(self, view: View) -> None:
        """The step after: now those compute too who joined with the view."""

    def steersman(self, kind: str, microbatch: int) -> int:
        """The peer that begins it."""

    def turn(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Lower ones begin first, equal ones as they come."""

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        """The pipeline whose codecs it travels with."""

    def route(self, kind: str, microbatch: int, lo: int, hi: int) -> tuple[int, ...] | None:
        """One peer for each of the stages lo..hi, NOBODY for the others; None while one of them has nobody."""

    def measured(self, stage: int, peer: int, kind: str, began_s: float, now_s: float) -> None:
        """A Work was done there."""


class MeasuredRoutes:
    """The `n_routers` members with the least ids steer, with `window` microbatches on their way in all; `seed` breaks
    the router's ties."""

    def __init__(self, n_stages: int, n_routers: int, window: int, seed: str):
        self.window = max(1, window // n_routers)
        self._router, self._n_routers = Router(n_stages, seed), n_routers
        self._steersmen: Sequence[int] = ()

    def adopt(self, view: View, members: Sequence[int]) -> None:
        self._steersmen = members[: self._n_routers]
        self._open(view, set(members))

    def welcome(self, view: View) -> None:
        self._open(view, {member.peer for member in view.members})

    def _open(self, view: View, members: set[int]) -> None:
        for stage, queue in enumerate(self._router.stages):
            here, open_to = set(view.stage_peers(stage)) & members, set(queue.open)
            for peer in sorted(here - open_to):
                queue.add(peer)
            for peer in open_to - here:
                queue.ban(peer)

    def steersman(self, kind: str, microbatch: int) -> int:
        return self._steersmen[microbatch % len(self._steersmen)]

    def turn(self, kind: str, microbatch: int) -> tuple[int, ...]:
        return ()

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        return 0

    def route(self, kind: str, microbatch: int, lo: int, hi: int) -> tuple[int, ...] | None:
        return self._router.route(lo, hi)

    def measured(self, stage: int, peer: int, kind: str, began_s: float, now_s: float) -> None:
        self._router.stages[stage].measured(peer, kind, began_s, now_s)
