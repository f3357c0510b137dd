"""config + plan -> machines: names every wiring and sync that a run can choose."""

import json

from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig, DurableState
from jaxdt.membership.member import Membership, PeerIdentity
from jaxdt.membership.peer import Peer
from jaxdt.membership.rebalance_api import Balance
from jaxdt.spec import serialize
from jaxdt.spec.config import RunConfig, check_plan
from jaxdt.spec.plan import Plan, to_json
from jaxdt.spec.sizes import boundary_bytes, sync_groups
from jaxdt.sync.allreduce import AllReduce
from jaxdt.sync.state_transfer import StateTransfer
from jaxdt.wiring.delayed_update import DelayedUpdate
from jaxdt.wiring.fixed import FixedWiring
from jaxdt.wiring.load_report import LoadReporter
from jaxdt.wiring.rebalance import Rebalancer
from jaxdt.wiring.retention import Retention
from jaxdt.wiring.route_policy import MeasuredRoutes
from jaxdt.wiring.service_time import ServiceTime
from jaxdt.wiring.swarm import SwarmWiring

REPORTS_A_PERIOD = 4  # of rebalancing
WINDOW_A_PEER = 4  # with 2, boundary tensors that take as long as the Work left peers idle a third of the time


def build_peer(
    config: RunConfig,
    plan: Plan,
    peer: int,
    run: str,
    start_version: int = 0,
    start_generation: int = 0,
    data_checksum: str = "",
) -> Peer:
    """The machines of one peer of the plan, which begins with `start_version` updates seen, of `start_generation`."""
    check_plan(config, plan)
    mark = fingerprint(config, plan, data_checksum)
    return _peer(config, plan, peer, plan.seat(peer)[0], run, mark, start_version, start_generation)


def build_peers(config: RunConfig, plan: Plan, run: str) -> dict[int, Peer]:
    """All peers of the plan at its start, for a driver that runs them all: the plan is checked once."""
    check_plan(config, plan)
    mark = fingerprint(config, plan, "")
    return {peer: _peer(config, plan, peer, plan.seat(peer)[0], run, mark) for peer in plan.peers}


def build_newcomer(config: RunConfig, plan: Plan, peer: int, stage: int, run: str, data_checksum: str = "") -> Peer:
    """The machines of a peer that joins a run, for a stage of the plan."""
    check_plan(config, plan)
    return _peer(config, plan, peer, stage, run, fingerprint(config, plan, data_checksum))


def _peer(
    config: RunConfig,
    plan: Plan,
    peer: int,
    stage: int,
    run: str,
    mark: str,
    start_version: int = 0,
    start_generation: int = 0,
) -> Peer:
    seat = PeerIdentity(
        run=run,
        fingerprint=mark,
        peer=peer,
        stage=stage,
        start_version=start_version,
        start_generation=start_generation,
        n_steps=config.train.steps,
        checkpoint_every_steps=config.train.checkpoint_every_steps,
        heartbeat_s=config.net.heartbeat_s,
        deadline_floor_s=config.net.deadline_floor_s,
        outage_s=config.net.outage_s,
    )
    handover = StateTransfer(peer, stage, config.sync.slice_bytes)
    pace = ServiceTime()
    wirings = [_wiring(config, plan, peer, stage, pace) for _ in range(1 + config.sync.delay)]
    wiring = DelayedUpdate(peer, stage, wirings, config.delay) if len(wirings) > 1 else wirings[0]
    if config.wiring.rebalance_s:
        wiring = LoadReporter(wiring, config.wiring.rebalance_s / REPORTS_A_PERIOD)
    return Peer(Membership(seat), wiring, _sync(config, plan, peer, stage), handover)


def window(config: RunConfig, plan: Plan) -> int:
    """Microbatches on their way in all under stochastic wiring."""
    return config.wiring.window or WINDOW_A_PEER * len(plan.peers)


def build_coordinator(
    config: RunConfig,
    plan: Plan,
    run: str,
    start_version: int = 0,
    start_generation: int = 0,
    data_checksum: str = "",
    memory: DurableState | None = None,
    balance: Balance | None = None,
) -> Coordinator:
    """The coordinator of a run of this plan; with `memory`, one that goes on after another's death. `balance` decides
    who changes stages, if not the config does."""
    check_plan(config, plan)
    terms = CoordinatorConfig(
        run=run,
        fingerprint=fingerprint(config, plan, data_checksum),
        stage_of={peer: stage for stage, row in enumerate(plan.placement) for peer in row},
        n_stages=plan.n_stages,
        start_version=start_version,
        start_generation=start_generation,
        n_steps=config.train.steps,
        on_nonfinite=config.train.on_nonfinite,
        tokens_per_sample=config.seq_lengths,
        heartbeat_s=config.net.heartbeat_s,
        deadline_floor_s=config.net.deadline_floor_s,
        waits=config.wiring.on_stage_lost == "wait",
        delay_steps=config.sync.delay,
        job={"config": json.dumps(serialize.write(config)), "plan": json.dumps(to_json(plan))},
    )
    every_s = config.wiring.rebalance_s
    if balance is None and every_s:
        balance = Rebalancer(every_s, config.wiring.rebalance_moves)
    return Coordinator(terms, memory, balance)


def fingerprint(config: RunConfig, plan: Plan, data_checksum: str) -> str:
    """What peers compare to know that they run the same thing, as people read it."""
    return f"config {config.fingerprint}, plan {plan.fingerprint}, tokens {data_checksum[:16]}"


def _wiring(config: RunConfig, plan: Plan, peer: int, stage: int, pace: ServiceTime) -> FixedWiring | SwarmWiring:
    sizes = [_sent_bytes(config, plan, stage, pipeline) for pipeline in range(plan.n_pipelines)]
    n_steps, evals = config.train.steps, (config.train.eval_every_steps, config.train.eval_microbatches)
    retain_bytes = config.wiring.retain_bytes // (1 + config.sync.delay)  # each of the steps under way has its share
    if config.wiring.kind == "fixed":
        return FixedWiring(plan, peer, stage, n_steps, sizes, evals, retain_bytes)
    n_routers = min(config.wiring.routers, len(plan.peers))
    sizes_of_routes = n_routers, window(config, plan), plan.n_microbatches
    routes = MeasuredRoutes(plan.n_stages, *sizes_of_routes, f"{config.train.seed} {peer}")
    retention = Retention(stage, plan.n_stages, sizes[0], retain_bytes)
    return SwarmWiring(peer, stage, plan.n_stages, plan.n_microbatches, n_steps, sizes, evals, routes, retention, pace)


def _sent_bytes(config: RunConfig, plan: Plan, stage: int, pipeline: int) -> tuple[int, int]:
    """Payload of an activation that a stage sends and of a gradient, for microbatches of a pipeline."""
    first, last = stage == 0, stage == plan.n_stages - 1
    activation = 0 if last else boundary_bytes(config, plan, stage, pipeline, forward=True)
    gradient = 0 if first else boundary_bytes(config, plan, stage - 1, pipeline, forward=False)
    return activation, gradient


def _sync(config: RunConfig, plan: Plan, peer: int, stage: int) -> AllReduce:
    groups = tuple(group for group in sync_groups(config, plan) if stage in group.stages)
    sizes = (plan.n_microbatches, config.sync.slice_bytes)
    return AllReduce(peer, stage, groups, *sizes, config.optim.clip_norm, config.delay)
