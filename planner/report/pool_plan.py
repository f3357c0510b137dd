"""The plan of a pool: from its stages to plan.json, and back to what the commands that show it need.

The file holds what Eq. 1 and 2 need beside the network: bytes of a unit, mini-batches, seconds of a unit on each device
and its units of a mini-batch. So they can be computed again without the model.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.options import NOT_NEGATIVE, NOT_NEGATIVE_OR_ENDLESS, about
from jaxdt.run.plan import Plan, PlanRoles, even_shares
from planner.cost.pool import PoolCost, PoolStep, pool_cost
from planner.model.pool import PoolStage

POOL = "pool"  # the field of plan.found


@dataclass(frozen=True)
class LevelScore:
    """A number of stages that the search has looked at: seconds of a step by Eq. 2 with Eq. 3, and by Eq. 1 and 2 in
    full; None where memory or links allow no plan."""

    n_stages: int
    search_s: float | None
    step_s: float | None


@dataclass(frozen=True)
class PoolFacts:
    """The facts that a plan records about a pool, devices by their names. `path_s`: the length of the order of stages;
    `digest`: the digest of the network for which the plan was made."""

    eq3: str
    stop: str
    unit_bytes: float = field(metadata=about("of a unit over a boundary", NOT_NEGATIVE))
    n_minibatches: int
    step_s: float = field(metadata=about("by Eq. 1 and 2", NOT_NEGATIVE_OR_ENDLESS))
    path_s: float = field(metadata=about("of the order of stages", NOT_NEGATIVE_OR_ENDLESS))
    digest: str
    unit_s: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    units: dict[str, int] = field(default_factory=dict[str, int])
    levels: tuple[LevelScore, ...] = ()


@dataclass(frozen=True)
class CostedPool:
    """A pool's plan, its network, its stages, and its cost by Eq. 1 and 2 in full."""

    plan: Plan
    network: Network
    facts: PoolFacts
    stages: tuple[PoolStage, ...]
    cost: PoolCost

    def name(self, device: int) -> str:
        """A device as people know it, with its region."""
        found = self.network.devices[device]
        return f"{found.name} ({found.region})" if found.region else found.name


def is_pool(plan: Plan) -> bool:
    return POOL in plan.found


def pool_digest(network: Network) -> str:
    """16 hex digits of what a pool's plan rests on: names, links, lines of hosts, memory, and who may disconnect."""
    devices = [(one.name, one.host, one.memory_bytes, one.disconnect_prob) for one in network.devices]
    lines = [(host.out_gbps, host.in_gbps) for host in network.shared_hosts]
    facts = [devices, network.latency_s, network.bandwidth_gbps, lines]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def plan_of_pool(
    network: Network, stages: Sequence[PoolStage], n_units: int, codec: str, found: Mapping[str, Any]
) -> Plan:
    """The plan of stages by device index. The servers are its replicas, the workers stand beside the placement."""
    rows = tuple(stage.servers for stage in stages)
    n_pipelines = len(rows[0]) if len({len(row) for row in rows}) == 1 else 1
    return Plan(
        n_layers=stages[-1].hi,
        stages=tuple((stage.lo, stage.hi) for stage in stages),
        placement=rows,
        shares=even_shares(n_units, n_pipelines),
        codec=(codec,) * (len(stages) - 1),
        devices=tuple(device.name for device in network.devices),
        roles=PlanRoles(
            servers=rows,
            front=tuple(stage.front for stage in stages),
            back=tuple(stage.back for stage in stages),
            workers=tuple(stage.workers for stage in stages),
        ),
        found=dict(found),
    )


def facts_of(network: Network, stages: Sequence[PoolStage], step: PoolStep, **others: Any) -> dict[str, Any]:
    """The field `pool` of plan.found: a PoolFacts as plain data."""
    names = [device.name for device in network.devices]
    facts = PoolFacts(
        unit_bytes=step.unit_bytes,
        n_minibatches=step.n_minibatches,
        step_s=pool_cost(network, stages, step).total_s,
        digest=pool_digest(network),
        unit_s={names[d]: step.unit_s[d] for stage in stages for d in stage.units},
        units={names[d]: n for stage in stages for d, n in stage.units.items()},
        **others,
    )
    return serialize.write(facts)


def check_network(plan: Plan, network: Network, source: str = "plan") -> None:
    """BadInput for a plan, which `source` names, that is not of the devices of this network."""
    if tuple(device.name for device in network.devices) != plan.devices:
        raise BadInput(
            f"{source}: devices: differ from those of network {network.name!r}, expected the plan's own network"
        )
    network.require_devices([*plan.peers, *plan.workers], f"{source}: network {network.name!r}")


def costed_pool(plan: Plan, network: Network, source: str = "plan") -> CostedPool:
    """A pool's plan with its network; BadInput for other devices, or for facts that do not fit the roles."""
    check_network(plan, network, source)
    facts = serialize.read(PoolFacts, plan.found[POOL], f"{source}: {POOL}")
    _check(plan, facts, source)
    stages = _stages(plan, facts)
    index = {name: d for d, name in enumerate(plan.devices)}
    unit_s = {index[name]: seconds for name, seconds in facts.unit_s.items()}
    step = PoolStep(facts.unit_bytes, plan.n_microbatches // facts.n_minibatches, facts.n_minibatches, unit_s)
    return CostedPool(plan, network, facts, stages, pool_cost(network, stages, step))


def _check(plan: Plan, facts: PoolFacts, source: str) -> None:
    """BadInput where roles, units and mini-batches of a plan do not fit each other, so that it has no cost."""
    roles = plan.roles
    for name in ("servers", "front", "back", "workers"):
        rows: tuple[tuple[int, ...], ...] = getattr(roles, name)
        if len(rows) != plan.n_stages or (name != "workers" and not all(rows)):
            raise BadInput(f"{source}: roles.{name}: got {len(rows)} rows, expected one for each stage, none empty")
    members = {plan.devices[d] for row in (*roles.servers, *roles.workers) for d in row}
    for name, told in (("unit_s", facts.unit_s), ("units", facts.units)):
        if set(told) != members:
            raise BadInput(f"{source}: {POOL}.{name}: expected one entry for each server and each worker")
    for name, seconds in facts.unit_s.items():
        if not (0 < sum(seconds) < math.inf and min(seconds) >= 0):
            raise BadInput(f"{source}: {POOL}.unit_s: {name}: got {list(seconds)}, expected seconds >= 0, not both 0")
    n_units = plan.n_microbatches
    if facts.n_minibatches < 1 or n_units % facts.n_minibatches:
        raise BadInput(f"{source}: {POOL}.n_minibatches: got {facts.n_minibatches}, expected a divisor of {n_units}")
    for k, rows in enumerate(zip(roles.servers, roles.workers, strict=True)):
        n = sum(facts.units[plan.devices[d]] for row in rows for d in row)
        if n != n_units // facts.n_minibatches or min(facts.units.values()) < 0:
            raise BadInput(f"{source}: {POOL}.units: stage {k} has {n}, expected {n_units // facts.n_minibatches}")


def _stages(plan: Plan, facts: PoolFacts) -> tuple[PoolStage, ...]:
    roles = plan.roles
    stages: list[PoolStage] = []
    for k, (lo, hi) in enumerate(plan.stages):
        devices = (*roles.servers[k], *roles.workers[k])
        units = {d: facts.units[plan.devices[d]] for d in devices}
        stages.append(PoolStage(lo, hi, roles.front[k], roles.back[k], roles.workers[k], units))
    return tuple(stages)


def finite(value_s: float) -> float | None:
    """Seconds for a file, which cannot hold an infinite number."""
    return value_s if math.isfinite(value_s) else None
