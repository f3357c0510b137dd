"""Routes through any peers of the stages, chosen by measured speed (SWARM Sec. 3.2)."""

import math
from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.wiring.route_policy import Route
from jaxdt.wiring.router import Router


class MeasuredRoutes:
    """The `n_routers` members with the least ids are routers, with `in_flight` microbatches on their way in all; `seed`
    breaks the ties of this peer's router.

    Routers do not see what the others send. So that their remainders do not pile up at one peer, each owns whole turns
    of microbatches, in which equal peers of a stage get equally many; at most one router owns a part of a turn. Where
    there are fewer turns than routers, the others own nothing."""

    def __init__(self, n_stages: int, n_routers: int, in_flight: int, n_microbatches: int, seed: str):
        self.in_flight_limit = in_flight
        self._router = Router(n_stages, seed)
        self._n_routers = n_routers
        self._in_flight = in_flight
        self._n_microbatches = n_microbatches
        self._turn = 1
        self._routers: Sequence[int] = ()

    def adopt(self, view: ev.View, members: Sequence[int]) -> None:
        n_replicas = [len(view.stage_peers(stage)) for stage in range(len(self._router.stages))]
        self._turn = math.lcm(*n_replicas)
        self._routers = members[: min(self._n_routers, math.ceil(self._n_microbatches / self._turn))]
        share = max(1, self._in_flight // len(self._routers))
        self.in_flight_limit = share - share % self._turn or share
        self._open(view, set(members))

    def begin_step(self, view: ev.View) -> None:
        self._open(view, {member.peer for member in view.members})

    def _open(self, view: ev.View, members: set[int]) -> None:
        for stage, queue in enumerate(self._router.stages):
            queue.forget_stuck()
            computing, open_peers = set(view.stage_peers(stage)) & members, set(queue.open)
            for peer in sorted(computing - open_peers):
                queue.add(peer)
            for peer in open_peers - computing:
                queue.ban(peer)

    def owning_router(self, kind: str, microbatch: int) -> int:
        return self._routers[microbatch // self._turn % len(self._routers)]

    def priority(self, kind: str, microbatch: int) -> tuple[int, ...]:
        return ()

    def pipeline_of(self, kind: str, microbatch: int) -> int:
        return 0

    def routes(self, kind: str, microbatches: Sequence[int], lo: int, hi: int) -> list[Route]:
        return self._router.routes(lo, hi, min(self._turn, len(microbatches)))

    def measured(self, stage: int, peer: int, kind: str, seconds: float) -> None:
        self._router.stages[stage].measured(peer, kind, seconds)

    def reroute(self, stage: int, peer: int) -> int | None:
        return self._router.stages[stage].choose_other(peer)
