"""`python -m planner explain`: where a plan's cost comes from, and which single change would lower it most."""

from argparse import Namespace
from dataclasses import dataclass, replace

from jaxdt.spec.network import Network
from planner.cost.reference import Cost, pair_s
from planner.report.plan_file import CostedPlan, cost_plan, read

N_CHANGES = 3


@dataclass(frozen=True)
class LinkChange:
    """Links made twice as fast, and the seconds that the same plan then saves."""

    saved_s: float
    text: str


def device_name(network: Network, index: int) -> str:
    device = network.devices[index]
    return f"{device.name} ({device.region})" if device.region else device.name


def with_faster_links(network: Network, pairs: list[tuple[int, int]]) -> Network:
    """The network with half the latency and twice the bandwidth on the given pairs, both ways."""
    latency = [list(row) for row in network.latency_s]
    bandwidth = [list(row) for row in network.bandwidth_gbps]
    for a, b in {(a, b) for pair in pairs for a, b in (pair, pair[::-1])}:
        latency[a][b] /= 2
        bandwidth[a][b] *= 2
    return replace(network, latency_s=tuple(map(tuple, latency)), bandwidth_gbps=tuple(map(tuple, bandwidth)))


def link_changes(costed: CostedPlan) -> list[LinkChange]:
    """Savings of faster links, the largest first: every slowest pair of a hop, and all links of the slowest device
    inside its stage."""
    network = costed.network
    cost = costed.cost
    device = cost.slowest_device
    partners = [d for d in costed.plan.placement[cost.slowest_stage] if d != device]
    tried = [("the link " + " - ".join(device_name(network, d) for d in pair), [pair]) for pair in cost.slowest_pair]
    if partners:
        label = f"the links of {device_name(network, device)} inside stage {cost.slowest_stage}"
        tried.append((label, [(device, d) for d in partners]))
    changes = []
    for label, pairs in tried:
        changed = cost_plan(costed.plan, with_faster_links(network, pairs), costed.c_dp_bytes, costed.c_pp_bytes)
        changes.append(LinkChange(cost.total_s - changed.cost.total_s, label))
    return sorted(changes, key=lambda change: -change.saved_s)


@dataclass(frozen=True)
class Explanation:
    """Where a plan's cost comes from: the cost and its terms, links that would lower it if they were faster, and the
    same in words, which is also the text of str()."""

    cost: Cost
    changes: tuple[LinkChange, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def explanation(costed: CostedPlan) -> Explanation:
    """The explanation of a plan."""
    plan = costed.plan
    cost = costed.cost
    found = plan.found
    lines = [
        f"{plan.n_stages} stages x {plan.n_pipelines} pipelines on {costed.network.name or 'a network'}: "
        f"{cost.total_s:.3f} s a step by Eq. 1-4, "
        f"{cost.datap_s:.3f} s of it data-parallel and {cost.pipelinep_s:.3f} s pipeline."
    ]
    if "step_s" in found:
        lines.append(f"Chosen by its step: {found['step_s']:.3f} s under the simulator, computing included.")
    if plan.n_pipelines > 1:
        lines.append(_slowest_group(costed))
    if plan.n_stages > 1:
        lines.append(_slowest_hop(costed))
    changes = link_changes(costed)
    lines += _help_lines(changes)
    bound_s = costed.bound_s
    if costed.proved:
        lines.append("No other placement costs less (proved), so only a better network or smaller sizes help.")
    elif bound_s > 0:
        lines.append(
            f"No placement costs less than {bound_s:.3f} s: this one is at most {cost.total_s / bound_s - 1:.1%} above."
        )
    elif not costed.bound_holds:
        lines.append("The plan's bound is for another network or other sizes, and says nothing here.")
    if found.get("left_out"):
        lines.append(f"Left out: {'; '.join(found.get('left_out_why') or found['left_out'])}.")
    return Explanation(cost, tuple(changes), "\n".join(lines))


def _slowest_group(costed: CostedPlan) -> str:
    network = costed.network
    cost = costed.cost
    slowest = device_name(network, cost.slowest_device)
    row = costed.plan.placement[cost.slowest_stage]
    shard_bytes = costed.c_dp_bytes / len(row)
    exchanges = [(pair_s(network, cost.slowest_device, d, shard_bytes), d) for d in row if d != cost.slowest_device]
    worst_s, worst = max(exchanges)
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


def _help_lines(changes: list[LinkChange]) -> list[str]:
    useful = [change for change in changes if change.saved_s > 1e-9][:N_CHANGES]
    if not useful:
        return ["No single faster link helps: each maximum is reached by several links."]
    return ["Would help most, made twice as fast:"] + [
        f"  {change.text}: saves {change.saved_s:.3f} s" for change in useful
    ]


def run(flags: Namespace) -> int:
    print(explanation(read(flags.plan, flags.network)))
    return 0
