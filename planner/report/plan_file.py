"""plan.json: from a solution to the file, and back to what the commands that show a plan need."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.options import NOT_NEGATIVE
from jaxdt.run.plan import Plan
from planner.cost.reference import Cost, cost_of
from planner.model.comm_workload import CommBytes
from planner.model.proof import checked_bound
from planner.report.pool_plan import POOL, CostedPool, check_network, costed_pool, is_pool

EXCHANGES = "exchanges_per_step"


@dataclass(frozen=True)
class CostedPlan:
    """A plan, its network, and its cost by the reference evaluator."""

    plan: Plan
    network: Network
    sizes: CommBytes
    cost: Cost

    @property
    def bound_holds(self) -> bool:
        """Whether the plan's bound, gap and `proved` are about this network and these sizes."""
        return self.plan.found.get("problem_digest") == problem_digest(self.network, self.sizes)

    @property
    def bound_s(self) -> float:
        """The plan's bound; 0, which says nothing, if it is about another problem."""
        return float(self.plan.found["bound_s"]) if self.bound_holds else 0.0

    @property
    def proved(self) -> bool:
        return bool(self.plan.found["proved"]) and self.bound_holds


def problem_digest(network: Network, sizes: CommBytes) -> str:
    """16 hex digits of all that Eq. 1-4 depend on besides the plan: names of devices, links, lines that devices of a
    host share, the two sizes, and how often replicas exchange where that is not once a step."""
    names = [device.name for device in network.devices]
    facts = [names, network.latency_s, network.bandwidth_gbps, float(sizes.c_dp_bytes), float(sizes.c_pp_bytes)]
    lines = [host.goodput_gbps for host in network.shared_hosts]
    if any(line != (None, None) for line in lines):
        facts += [[device.host for device in network.devices], lines]
    facts += [] if sizes.exchanges_per_step == 1.0 else [sizes.exchanges_per_step]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def cost_plan(plan: Plan, network: Network, sizes: CommBytes) -> CostedPlan:
    return CostedPlan(plan, network, sizes, cost_of(network, plan.placement, *sizes))


def solved(
    plan: Plan, network: Network, sizes: CommBytes, *, bound_s: float = 0.0, proved: bool = False, **facts: Any
) -> Plan:
    """The plan of a search, with the names of its devices and with its costs, computed again from the network;
    BoundError for a bound above them. `facts` are written beside them: the solver, the seed, and more by objective."""
    cost = cost_of(network, plan.placement, *sizes)
    bound_s = checked_bound(bound_s, cost.total_s)
    used = set(plan.peers)
    found = {
        "network": network.name,
        "left_out": [device.name for d, device in enumerate(network.devices) if d not in used],
        "c_dp_bytes": sizes.c_dp_bytes,
        "c_pp_bytes": sizes.c_pp_bytes,
        **({} if sizes.exchanges_per_step == 1.0 else {EXCHANGES: sizes.exchanges_per_step}),
        "problem_digest": problem_digest(network, sizes),
        "cost": {"total_s": cost.total_s, "datap_s": cost.datap_s, "pipelinep_s": cost.pipelinep_s},
        "bound_s": bound_s,
        "gap": _gap(cost.total_s, bound_s),
        "proved": proved,
        **facts,
    }
    return replace(plan, devices=tuple(device.name for device in network.devices), found=found)


def sizes_of(plan: Plan) -> CommBytes:
    """The sizes by which a plan was made, as its file says."""
    found = plan.found
    if not NOT_NEGATIVE.holds(found.get(EXCHANGES, 1.0)):
        raise BadInput(f"plan: {EXCHANGES}: got {found[EXCHANGES]!r:.40}, expected {NOT_NEGATIVE.text}")
    return CommBytes(float(found["c_dp_bytes"]), float(found["c_pp_bytes"]), float(found.get(EXCHANGES, 1.0)))


def _gap(total_s: float, bound_s: float) -> float | None:
    """(cost - bound) / bound; None if there is no bound, or no plan that avoids missing links."""
    if not math.isfinite(total_s):
        return None
    if bound_s > 0:
        return (total_s - bound_s) / bound_s
    return 0.0 if total_s == 0 else None


def costed(plan: Plan, network: Network, source: str = "plan") -> CostedPlan | CostedPool:
    """A plan with its network and the sizes that it says; BadInput for a plan of no solver, or of other devices.
    `source` names the plan in errors."""
    if is_pool(plan):
        return costed_pool(plan, network, source)
    for name in ("c_dp_bytes", "c_pp_bytes", "cost", "bound_s", "gap", "proved"):
        if name not in plan.found:
            raise BadInput(f"{source}: {name}: missing, expected a plan written by `python -m planner solve`")
    check_network(plan, network, source)
    return cost_plan(plan, network, sizes_of(plan))


def read_any(path: str, network_file: str | None = None, percentile: int | None = None) -> CostedPlan | CostedPool:
    """A plan.json with its network: the given file, or the one that the plan names, with the bandwidths of the given
    percentile, or of the one by which the plan was made."""
    plan = plans.load(path)
    network = networks.load(network_file or network_file_of(plan, path))
    return costed(plan, network.at_percentile(percentile_of(plan, percentile)), path)


def read(path: str, network_file: str | None = None, percentile: int | None = None) -> CostedPlan:
    """Reads a plan as `read_any` does; BadInput for a pool's plan."""
    found = read_any(path, network_file, percentile)
    if isinstance(found, CostedPool):
        raise BadInput(f"{path}: {POOL}: got the plan of a pool, which only `explain` and `verify` read")
    return found


def percentile_of(plan: Plan, percentile: int | None) -> int | None:
    """The percentile of bandwidths to look at: the given one, else the plan's own; None for plain bandwidths."""
    return plan.found.get("percentile") if percentile is None else percentile


def network_file_of(plan: Plan, path: str) -> str:
    """The network file that the plan of a file names; BadInput for none."""
    if "network_file" not in plan.found:
        raise BadInput(f"{path}: network_file: missing, expected --network")
    return _find(path, str(plan.found["network_file"]))


def save_plan(plan: Plan, path: str | Path, network_file: str = "") -> None:
    """Write a plan.json, which names its network's file, if given, for those who read it. BadInput if that fails."""
    found = plan.found | ({"network_file": network_file} if network_file else {})
    write_text(path, json.dumps(plans.to_json(replace(plan, found=found)), indent=1) + "\n")


def write_text(path: str | Path, text: str, flag: str = "out") -> None:
    """Write a file that a flag names; BadInput if that fails."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise BadInput(f"--{flag}: {path} cannot be written ({error.strerror})") from None


def _find(path: str, network_file: str) -> str:
    """The network file as named, or the file of that name in the plan's directory."""
    beside_plan = Path(path).parent / Path(network_file).name
    return str(beside_plan) if not Path(network_file).exists() and beside_plan.exists() else network_file
