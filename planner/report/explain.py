"""`python -m planner explain`: where a plan's cost comes from, and which single change would lower it most."""

from argparse import Namespace
from dataclasses import dataclass

from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.cost.pool import PoolCost
from planner.cost.reference import Cost, pair_s
from planner.report import pool_explain
from planner.report.plan_file import CostedPlan, costed, read_any
from planner.report.pool_plan import CostedPool
from planner.report.suggest import Suggestion, device_name, suggestions
from planner.report.tables import memory_lines


@dataclass(frozen=True)
class Explanation:
    """The sources of a plan's cost: the cost and its terms (Eq. 1-4 of DT-FM, or for a pool's plan Eq. 1-2 of the
    hybrid parameter server paper), changes that would lower it, the best first, and the same in words, as str() prints
    it."""

    cost: Cost | PoolCost
    suggestions: tuple[Suggestion, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def explain(plan: Plan, network: Network, search: bool = False) -> Explanation:
    """The sources of the cost of a solver's plan, and the single changes that would lower it: explain(...).suggestions,
    each with its change and the seconds that it saves. BadInput for a plan without sizes, or of other devices than the
    network's. Needs neither numba nor OR-Tools, unless `search` asks for every swap and for a search of other shapes,
    which takes some seconds a shape. A pool's plan gets no suggestions."""
    return explanation(costed(plan, network), search)


def explanation(costed: CostedPlan | CostedPool, search: bool = False) -> Explanation:
    """The explanation of a plan with its cost."""
    if isinstance(costed, CostedPool):
        return Explanation(costed.cost, (), pool_explain.text(costed))
    plan = costed.plan
    cost = costed.cost
    found = plan.found
    lines = [
        f"{plan.shape} on {costed.network.name or 'a network'}: "
        f"{cost.total_s:.3f} s a step by Eq. 1-4, "
        f"{cost.datap_s:.3f} s of it data-parallel and {cost.pipelinep_s:.3f} s pipeline."
    ]
    if "step_s" in found:
        lines.append(f"Chosen by its step: {found['step_s']:.3f} s under the simulator, computing included.")
    if max(plan.n_replicas) > 1:
        lines.append(_slowest_group(costed))
    if plan.n_stages > 1:
        lines.append(_slowest_hop(costed))
    found_changes = suggestions(costed, search)
    bound_s = costed.bound_s
    if costed.proved:
        lines.append("No other placement costs less (proved), so only another shape, a codec or a faster link helps.")
    elif bound_s > 0:
        lines.append(
            f"No placement costs less than {bound_s:.3f} s: this one is at most {cost.total_s / bound_s - 1:.1%} above."
        )
    elif not costed.bound_holds:
        lines.append("The plan's bound is for another network or other sizes, and says nothing here.")
    if found.get("left_out"):
        lines.append(f"Left out: {'; '.join(found.get('left_out_why') or found['left_out'])}.")
    lines += memory_lines(plan)
    lines += _help_lines(found_changes)
    return Explanation(cost, tuple(found_changes), "\n".join(lines))


def _slowest_group(costed: CostedPlan) -> str:
    network = costed.network
    cost = costed.cost
    slowest = device_name(network, cost.slowest_device)
    row = costed.plan.placement[cost.slowest_stage]
    shard_bytes = costed.sizes.c_dp_bytes / len(row)
    exchanges = [(pair_s(network, cost.slowest_device, d, shard_bytes), d) for d in row if d != cost.slowest_device]
    worst_s, worst = max(exchanges)
    worst_s *= costed.sizes.exchanges_per_step
    return (
        f"Slowest group: stage {cost.slowest_stage}, whose {slowest} exchanges shards for "
        f"{cost.datap_s:.3f} s, {worst_s:.3f} s of it with {device_name(network, worst)}."
    )


def _slowest_hop(costed: CostedPlan) -> str:
    cost = costed.cost
    s = max(range(len(cost.hop_s)), key=lambda hop: cost.hop_s[hop])
    a, b = cost.slowest_pair[s]
    latency_s = costed.network.link(a, b).latency_s + costed.network.link(b, a).latency_s
    return (
        f"Slowest hop: stage {s} to {s + 1}, {cost.hop_s[s]:.3f} s, set by {device_name(costed.network, a)} to "
        f"{device_name(costed.network, b)} ({latency_s:.3f} s of it latency). "
        f"Hops: {', '.join(f'{h:.2f}' for h in cost.hop_s)} s."
    )


def _help_lines(changes: list[Suggestion]) -> list[str]:
    if not changes:
        return ["No single change that was tried helps: each maximum is reached several times."]
    return ["Would help, each by itself, in seconds of Eq. 1-4:"] + [
        f"  saves {change.saved_s:.3f} s: {change.text}" for change in changes
    ]


def run(flags: Namespace) -> int:
    print(explanation(read_any(flags.plan, flags.network, flags.percentile), flags.suggest))
    return 0
