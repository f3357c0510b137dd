"""The pool's entry in the table of wirings: how its machines are built, and what makes no sense with it."""

from jaxdt.protocol import events as ev
from jaxdt.run.config import RunConfig
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import sync_groups
from jaxdt.wiring.base import PeerLoad, StepShape, WiringEntry, WorkerRole, step_shape
from jaxdt.wiring.compute_slot import ComputeSlot, ServiceTime
from jaxdt.wiring.measured_routes import MeasuredRoutes
from jaxdt.wiring.pool.even_transfer import server_of
from jaxdt.wiring.pool.server import Fallback, PoolPlace, PoolServer
from jaxdt.wiring.pool.server_counts import CountedServer
from jaxdt.wiring.pool.task_times import LEASES_MIN, LeaseTimes
from jaxdt.wiring.pool.worker import PoolWorker
from jaxdt.wiring.recovery import Recovery
from jaxdt.wiring.routed import RoutedWiring


def _build(setup: PeerSetup, n_under_way: int) -> list[CountedServer]:
    """One wiring, for all steps that are under way."""
    config, plan, shape = setup.config, setup.plan, step_shape(setup)
    slot, service_time = ComputeSlot(), ServiceTime()
    fallbacks = [_fallback(setup, shape, slot, service_time) for _ in range(n_under_way)]
    sync_stages = [group.stage for group in sync_groups(config, plan) if setup.stage in group.stages]
    place = PoolPlace(shape, plan.depth(setup.stage), sync_stages, setup.fingerprint, config.delay)
    server = PoolServer(place, fallbacks, slot, LeaseTimes(config.net.deadline_floor_s))
    return [CountedServer(server, config.sync.codec_spec)]


def _fallback(setup: PeerSetup, shape: StepShape, slot: ComputeSlot, service_time: ServiceTime) -> Fallback:
    config, plan = setup.config, setup.plan
    n_routers = min(config.wiring.routers, len(plan.peers))
    seed = f"{config.train.seed} {setup.peer}"
    routes = MeasuredRoutes(plan.n_stages, n_routers, plan.depth(0) * n_routers, plan.n_microbatches, seed)
    recovery = Recovery(shape)
    return Fallback(RoutedWiring(shape, routes, recovery, slot, service_time), recovery)


def _build_worker(setup: PeerSetup, server: int) -> PoolWorker:
    return PoolWorker(step_shape(setup), server, setup.config.delay)


def _check(config: RunConfig, plan: Plan) -> str:
    if plan.schedule != "1f1b":
        return f"plan.schedule: got {plan.schedule}, expected 1f1b with wiring {config.wiring.kind}"
    if not config.wiring.retain_bytes:
        return (
            f"wiring.retain_bytes: got 0, expected more with wiring {config.wiring.kind}: a server sends the tensors "
            "of a microbatch again when a worker is lost"
        )
    for stage, row in enumerate(plan.roles.servers):
        if set(row) != set(plan.placement[stage]):
            return (
                f"plan.roles.servers[{stage}]: got {list(row)}, expected {list(plan.placement[stage])} with wiring "
                f"{config.wiring.kind}, whose servers are the peers of the placement"
            )
    return ""


def _peer_load(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> PeerLoad:
    """All of a server's microbatches have their tensors there, and those that it may take from other servers. Beside
    workers it has as many forwards in flight as they have, but for what travels."""
    share = -(-plan.n_microbatches // plan.n_replicas[stage])
    return PeerLoad(min(share, plan.depth(stage) + LEASES_MIN - 1), min(2 * share, plan.n_microbatches))


ENTRY = WiringEntry(
    _build,
    _peer_load,
    follows_plan=False,
    may_change_stages=False,
    check=_check,
    plan_roles=frozenset({"servers", "front", "back", "workers"}),
    workers=WorkerRole(
        _build_worker,
        server_of,
        messages=frozenset({ev.ProbeLink, ev.Enlist, ev.WantsTasks, ev.TaskDone, ev.TaskOutput, ev.Fetch, ev.Shard}),
    ),
)
