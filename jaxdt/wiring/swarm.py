"""Stochastic wiring (SWARM Sec. 3.2): any peer of a stage may get any microbatch, and routers choose by measured speed.

How microbatches travel, and what happens after a view in mid-step: jaxdt.wiring.routed.
"""

from jaxdt.run.config import RunConfig
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.wiring.base import PeerLoad, WiringEntry, step_shape
from jaxdt.wiring.compute_slot import ComputeSlot, ServiceTime
from jaxdt.wiring.measured_routes import MeasuredRoutes
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring

# Microbatches on their way for each peer. With 2, boundary tensors that take as long as the Work left peers idle for a
# third of the time.
IN_FLIGHT_A_PEER = 4


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


def _peer_load(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> PeerLoad:
    return load_of(config, len(plan.peers), plan.n_replicas[stage], plan.n_microbatches)


def load_of(config: RunConfig, n_peers: int, n_replicas: int, n_microbatches: int) -> PeerLoad:
    """Load of one of so many replicas of a stage, in a run of so many peers: all microbatches on their way may wait for
    this stage's backward, evenly spread over its peers."""
    share = -(-n_microbatches // n_replicas)
    return PeerLoad(min(share, -(-in_flight(config, n_peers) // n_replicas)), share)


ENTRY = WiringEntry(_build, _peer_load, follows_plan=False, may_change_stages=True)
