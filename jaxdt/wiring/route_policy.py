"""Who steers a microbatch, and along which peers: what SwarmWiring asks, and its answer by measured speed."""

import math
from collections.abc import Sequence
from typing import Protocol

from jaxdt.protocol.events import View
from jaxdt.wiring.router import Router


class RoutePolicy(Protocol):
    """A microbatch or held-out microbatch is named by `kind` (FORWARD or EVALUATE) and number. All peers of a view know
    who steers which; only that one chooses its route."""

    window: int  # tasks on their way at a time, of those that this peer steers

    def adopt(self, view: View, members: Sequence[int]) -> None:
        """Those members of a view that compute in the step under way; others are not chosen any more."""

    def welcome(self, view: View) -> None:
        """The step after: now those compute too who joined with the view."""

    def owning_router(self, kind: str, microbatch: int) -> int:
        """The peer that begins it."""

    def turn(self, kind: str, microbatch: int) -> tuple[int, ...]:
        """Lower ones begin first, equal ones as they come."""

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        """The pipeline whose codecs it travels with."""

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[tuple[int, ...]]:
        """Of the first ones of these, which begin together: one peer for each of the stages lo..hi, NOBODY for the
        others. None while one of the stages has nobody."""

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
        """A Work was done there."""


class MeasuredRoutes:
    """The `n_routers` members with the least ids steer, with `window` microbatches on their way in all; `seed` breaks
    the router's ties.

    Routers do not see what the others send. So that what each has left over does not pile up at one peer, they steer
    whole turns of microbatches, in which equal peers of a stage get equally many; at most one of them steers a part of
    a turn. Where there are fewer turns than routers, the others have nothing to steer."""

    def __init__(self, n_stages: int, n_routers: int, window: int, n_microbatches: int, seed: str):
        self.window = window
        self._router, self._n_routers, self._window = Router(n_stages, seed), n_routers, window
        self._n_microbatches, self._turn = n_microbatches, 1
        self._routers: Sequence[int] = ()

    def adopt(self, view: View, members: Sequence[int]) -> None:
        n_replicas = [len(view.stage_peers(stage)) for stage in range(len(self._router.stages))]
        self._turn = math.lcm(*n_replicas)
        self._routers = members[: min(self._n_routers, math.ceil(self._n_microbatches / self._turn))]
        window = max(1, self._window // len(self._routers))
        self.window = window - window % self._turn or window
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

    def owning_router(self, kind: str, microbatch: int) -> int:
        return self._routers[microbatch // self._turn % len(self._routers)]

    def turn(self, kind: str, microbatch: int) -> tuple[int, ...]:
        return ()

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        return 0

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[tuple[int, ...]]:
        return self._router.routes(lo, hi, min(self._turn, len(microbatches)))

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
        self._router.stages[stage].measured(peer, kind, seconds)
