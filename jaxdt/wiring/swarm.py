"""Stochastic wiring (SWARM Sec. 3.2): any peer of a stage may get any microbatch, and routers choose by measured speed.

How microbatches travel, and what happens after a view in mid-step: jaxdt.wiring.routed.
"""

import math
from collections.abc import Sequence

from jaxdt.protocol.events import View
from jaxdt.spec.config import RunConfig
from jaxdt.spec.peer_setup import PeerSetup
from jaxdt.spec.plan import Plan
from jaxdt.wiring.base import PeerLoad, WiringEntry, step_shape
from jaxdt.wiring.compute_slot import ComputeSlot
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.route_policy import Route
from jaxdt.wiring.routed import RoutedWiring
from jaxdt.wiring.router import Router
from jaxdt.wiring.service_time import ServiceTime

# Microbatches on their way for each peer. With 2, boundary tensors that take as long as the Work left peers idle for a
# third of the time.
IN_FLIGHT_A_PEER = 4


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

    def adopt(self, view: View, members: Sequence[int]) -> None:
        n_replicas = [len(view.stage_peers(stage)) for stage in range(len(self._router.stages))]
        self._turn = math.lcm(*n_replicas)
        self._routers = members[: min(self._n_routers, math.ceil(self._n_microbatches / self._turn))]
        share = max(1, self._in_flight // len(self._routers))
        self.in_flight_limit = share - share % self._turn or share
        self._open(view, set(members))

    def begin_step(self, view: View) -> None:
        self._open(view, {member.peer for member in view.members})

    def _open(self, view: View, members: set[int]) -> None:
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


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup, n_under_way: int) -> list[RoutedWiring]:
    service_time = ServiceTime()
    return [_wiring(setup, service_time) for _ in range(n_under_way)]


def _wiring(setup: PeerSetup, service_time: ServiceTime) -> RoutedWiring:
    config, plan, shape = setup.config, setup.plan, step_shape(setup)
    n_routers = min(config.wiring.routers, len(plan.peers))
    seed = f"{config.train.seed} {setup.peer}"
    routes = MeasuredRoutes(plan.n_stages, n_routers, in_flight(config, len(plan.peers)), plan.n_microbatches, seed)
    return RoutedWiring(shape, routes, Recovery(shape), ComputeSlot(), service_time)


def in_flight(config: RunConfig, n_peers: int) -> int:
    """Microbatches on their way in all."""
    return config.wiring.window or IN_FLIGHT_A_PEER * n_peers


def _check(config: RunConfig, plan: Plan) -> str:
    return ""


def _peer_load(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> PeerLoad:
    return load_of(config, len(plan.peers), plan.n_replicas[stage], plan.n_microbatches)


def load_of(config: RunConfig, n_peers: int, n_replicas: int, n_microbatches: int) -> PeerLoad:
    """Load of one of so many replicas of a stage, in a run of so many peers: all microbatches on their way may wait for
    this stage's backward, evenly spread over its peers."""
    share = -(-n_microbatches // n_replicas)
    return PeerLoad(min(share, -(-in_flight(config, n_peers) // n_replicas)), share)


ENTRY = WiringEntry(_build, _check, _peer_load, follows_plan=False, may_change_stages=True)
