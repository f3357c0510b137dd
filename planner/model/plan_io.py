"""From a solution to plan.json, and back to what the other commands need."""

from dataclasses import dataclass
from pathlib import Path

from jaxdt.spec import network as networks
from jaxdt.spec import plan as plans
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from planner.cost.reference import Cost, cost_of
from planner.model.sizes import Workload
from planner.search.portfolio import Solution


@dataclass(frozen=True)
class Planned:
    """A plan, its network and its cost as the independent evaluator sees them."""

    plan: Plan
    network: Network
    c_dp_bytes: float
    c_pp_bytes: float
    cost: Cost


def plan_of(network: Network, network_file: str, workload: Workload, solution: Solution, how: dict) -> Plan:
    """A plan with its costs recomputed from the network; `how` holds solver and seed."""
    rows = tuple(tuple(int(d) for d in row) for row in solution.placement)
    cost = cost_of(network, rows, workload.c_dp_bytes, workload.c_pp_bytes)
    bound_s = min(solution.bound_s, cost.total_s)
    used = {d for row in rows for d in row}
    found = {
        "network": network.name,
        "network_file": network_file,
        "left_out": [device.name for d, device in enumerate(network.devices) if d not in used],
        "c_dp_bytes": workload.c_dp_bytes,
        "c_pp_bytes": workload.c_pp_bytes,
        "cost": {"total_s": cost.total_s, "datap_s": cost.datap_s, "pipelinep_s": cost.pipelinep_s},
        "bound_s": bound_s,
        "gap": (cost.total_s - bound_s) / bound_s if bound_s > 0 else 0.0 if cost.total_s == 0 else None,
        "proved": solution.proved,
        **how,
        "evaluations": solution.evaluations,
        "time_s": round(solution.time_s, 3),
    }
    return Plan(
        n_layers=workload.n_layers,
        stages=workload.stages,
        placement=rows,
        shares=workload.shares,
        codec=("none",) * (len(rows) - 1),
        devices=tuple(device.name for device in network.devices),
        found=found,
    )


def read(path: str, network_file: str | None = None) -> Planned:
    """A plan.json with its network: the given file, or the one that the plan names."""
    plan = plans.load(path)
    for name in ("network_file", "c_dp_bytes", "c_pp_bytes"):
        if name not in plan.found:
            raise BadInput(f"{path}: {name}: missing, expected a plan written by `python -m planner solve`")
    network = networks.load(_beside(path, network_file or str(plan.found["network_file"])))
    if tuple(device.name for device in network.devices) != plan.devices:
        raise BadInput(
            f"{path}: devices: differ from those of network {network.name!r}, expected the plan's own network"
        )
    sizes = float(plan.found["c_dp_bytes"]), float(plan.found["c_pp_bytes"])
    return Planned(plan, network, *sizes, cost_of(network, plan.placement, *sizes))


def _beside(path: str, network_file: str) -> str:
    """The network file as named, or in the plan's directory."""
    moved = Path(path).parent / Path(network_file).name
    return str(moved) if not Path(network_file).exists() and moved.exists() else network_file
