"""`python -m planner explain`: where a plan's cost comes from, and which single change would lower it most."""

from argparse import Namespace
from dataclasses import dataclass, replace

from jaxdt.spec.network import Network
from planner.cost.reference import Cost, cost_of, pair_s
from planner.model.plan_io import Planned, read

N_CHANGES = 3


@dataclass(frozen=True)
class Change:
    """One link made twice as fast, and what the same plan then saves."""

    saved_s: float
    text: str


def name(network: Network, device: int) -> str:
    found = network.devices[device]
    return f"{found.name} ({found.region})" if found.region else found.name


def faster(network: Network, pairs: list[tuple[int, int]]) -> Network:
    """The network with half the latency and twice the bandwidth on the given pairs, both ways."""
    latency = [list(row) for row in network.latency_s]
    bandwidth = [list(row) for row in network.bandwidth_gbps]
    for a, b in {(a, b) for pair in pairs for a, b in (pair, pair[::-1])}:
        latency[a][b] /= 2
        bandwidth[a][b] *= 2
    return replace(network, latency_s=tuple(map(tuple, latency)), bandwidth_gbps=tuple(map(tuple, bandwidth)))


def changes(planned: Planned) -> list[Change]:
    """Savings of faster links: every slowest pair of a hop, and all links of the slowest device inside its stage."""
    network, cost = planned.network, planned.cost
    device = cost.slowest_device
    partners = [d for d in planned.plan.placement[cost.slowest_stage] if d != device]
    tried = [("the link " + " - ".join(name(network, d) for d in pair), [pair]) for pair in cost.slowest_pair]
    if partners:
        label = f"the links of {name(network, device)} inside stage {cost.slowest_stage}"
        tried.append((label, [(device, d) for d in partners]))
    found = []
    for label, pairs in tried:
        other = cost_of(faster(network, pairs), planned.plan.placement, planned.c_dp_bytes, planned.c_pp_bytes)
        found.append(Change(cost.total_s - other.total_s, label))
    return sorted(found, key=lambda change: -change.saved_s)


def text_of(planned: Planned) -> str:
    plan, cost, found = planned.plan, planned.cost, planned.plan.found
    lines = [
        f"{plan.n_stages} stages x {plan.n_pipelines} pipelines on {planned.network.name or 'a network'}: "
        f"{cost.total_s:.3f} s a step by Eq. 1-4, "
        f"{cost.datap_s:.3f} s of it data-parallel and {cost.pipelinep_s:.3f} s pipeline."
    ]
    if "step_s" in found:
        lines.append(f"Chosen by its step: {found['step_s']:.3f} s under the simulator, computing included.")
    if plan.n_pipelines > 1:
        lines.append(_slowest_group(planned))
    if plan.n_stages > 1:
        lines.append(_slowest_hop(planned, cost))
    lines += _help_lines(changes(planned))
    bound_s = float(found["bound_s"])
    if found["proved"]:
        lines.append("No other placement costs less (proved), so only a better network or smaller sizes help.")
    elif bound_s > 0:
        lines.append(
            f"No placement costs less than {bound_s:.3f} s: this one is at most {cost.total_s / bound_s - 1:.1%} above."
        )
    if found.get("left_out"):
        lines.append(f"Left out: {'; '.join(found.get('left_out_why') or found['left_out'])}.")
    return "\n".join(lines)


def _slowest_group(planned: Planned) -> str:
    network, cost = planned.network, planned.cost
    row = planned.plan.placement[cost.slowest_stage]
    shard_bytes = planned.c_dp_bytes / len(row)
    others = [(pair_s(network, cost.slowest_device, d, shard_bytes), d) for d in row if d != cost.slowest_device]
    worst_s, worst = max(others)
    return (
        f"Slowest group: stage {cost.slowest_stage}, whose {name(network, cost.slowest_device)} exchanges shards for "
        f"{cost.datap_s:.3f} s, {worst_s:.3f} s of it with {name(network, worst)}."
    )


def _slowest_hop(planned: Planned, cost: Cost) -> str:
    s = max(range(len(cost.hop_s)), key=lambda hop: cost.hop_s[hop])
    a, b = cost.slowest_pair[s]
    latency_s = planned.network.link(a, b).latency_s + planned.network.link(b, a).latency_s
    return (
        f"Slowest hop: stage {s} to {s + 1}, {cost.hop_s[s]:.3f} s, set by {name(planned.network, a)} to "
        f"{name(planned.network, b)} ({latency_s:.3f} s of it latency). "
        f"Hops: {', '.join(f'{h:.2f}' for h in cost.hop_s)} s."
    )


def _help_lines(found: list[Change]) -> list[str]:
    useful = [change for change in found if change.saved_s > 1e-9][:N_CHANGES]
    if not useful:
        return ["No single faster link helps: each maximum is reached by several links."]
    return ["Would help most, made twice as fast:"] + [f"  {c.text}: saves {c.saved_s:.3f} s" for c in useful]


def run(flags: Namespace) -> int:
    print(text_of(read(flags.plan, flags.network)))
    return 0
