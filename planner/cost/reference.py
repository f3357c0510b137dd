"""The reference cost: a placement's Eq. 1-4 straight from a network and two sizes, in plain Python.

It checks what solvers claim, so it shares no code with them and adds up both directions of a pair itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.run.network import Network


@dataclass(frozen=True)
class Cost:
    """COMM-COST of Eq. 1 and its terms; slowest_stage sets DATAP, hop_s[s] is between stages s and s + 1."""

    total_s: float
    datap_s: float
    pipelinep_s: float
    slowest_stage: int
    slowest_device: int
    hop_s: tuple[float, ...]
    slowest_pair: tuple[tuple[int, int], ...]

    @property
    def terms_s(self) -> tuple[float, float, float]:
        """(total_s, datap_s, pipelinep_s)."""
        return self.total_s, self.datap_s, self.pipelinep_s


def pair_s(network: Network, a: int, b: int, n_bytes: float) -> float:
    """Seconds of n_bytes from a to b and of as many back; infinite without a link either way. Devices of a host have
    equal parts of its line."""
    forth = network.link(a, b)
    back = network.link(b, a)
    forth_gbps, back_gbps = _fair_gbps(network, a, b), _fair_gbps(network, b, a)
    if min(forth_gbps, back_gbps) == 0:
        return math.inf
    s_per_byte = (1 / forth_gbps + 1 / back_gbps) * 8 / 1e9
    return (forth.latency_s + back.latency_s) + n_bytes * s_per_byte


def one_way_s(network: Network, src: int, dst: int, n_bytes: float) -> float:
    """Seconds of n_bytes from src to dst; infinite without a link, 0 within one device."""
    if src == dst:
        return 0.0
    gbps = _fair_gbps(network, src, dst)
    return network.link(src, dst).latency_s + n_bytes * 8 / 1e9 / gbps if gbps else math.inf


def _fair_gbps(network: Network, src: int, dst: int) -> float:
    """The link's bandwidth, at most an equal part of the line out of one host and of the line into the other."""
    gbps = network.link(src, dst).bandwidth_gbps
    if not network.hosts:
        return gbps
    hosts = [device.host for device in network.devices]
    if hosts[src] and hosts[src] == hosts[dst]:
        return gbps
    (out_gbps, _), (_, in_gbps) = network.shared_hosts[src].goodput_gbps, network.shared_hosts[dst].goodput_gbps
    limits = [] if out_gbps is None else [out_gbps / hosts.count(hosts[src])]
    limits += [] if in_gbps is None else [in_gbps / hosts.count(hosts[dst])]
    return min([gbps, *limits])


def cost_of(
    network: Network,
    placement: Sequence[Sequence[int]],
    c_dp_bytes: float,
    c_pp_bytes: float,
    exchanges_per_step: float = 1.0,
) -> Cost:
    """Cost of placement[stage][pipeline] with its own stage order and its own pairs in each hop (Eq. 2-4), in the mean
    over steps, if the replicas of a stage exchange their vector `exchanges_per_step` times in each.

    Stages may have unequal numbers R_j of replicas, the most of them R. placement[stage] are these in any order, and
    c_pp_bytes is what one device of the largest stage sends over a boundary in a step. Then Eq. 2 has c_dp / R_j in the
    place of c_dp / P. In Eq. 3 each device of the larger stage has one partner in the smaller one, which has at most
    ceil(max(R_j, R_k) / min(R_j, R_k)) of them; edge(j, k) is the slowest pair of the best such choice, each pair with
    c_pp R / max(R_j, R_k) bytes. Each device of a stage has an equal part of its bytes."""
    largest = max(len(row) for row in placement)
    loads = []
    for s, row in enumerate(placement):
        shard_bytes = c_dp_bytes / len(row)
        share = exchanges_per_step
        loads += [(share and share * sum(pair_s(network, d, e, shard_bytes) for e in row if e != d), s, d) for d in row]
    datap_s, slowest_stage, slowest_device = max(loads, key=lambda load: load[0])
    hops = []
    for left, right in zip(placement, placement[1:], strict=False):
        if all(len(row) == largest for row in placement):
            pairs = [(pair_s(network, a, b, c_pp_bytes), (a, b)) for a, b in zip(left, right, strict=True)]
            hops.append(max(pairs, key=lambda pair: pair[0]))
        else:
            hops.append(_slowest_of_best_pairs(network, left, right, c_pp_bytes * largest / max(len(left), len(right))))
    pipelinep_s = sum(hop[0] for hop in hops)
    return Cost(
        total_s=datap_s + pipelinep_s,
        datap_s=datap_s,
        pipelinep_s=pipelinep_s,
        slowest_stage=slowest_stage,
        slowest_device=slowest_device,
        hop_s=tuple(hop[0] for hop in hops),
        slowest_pair=tuple(hop[1] for hop in hops),
    )


def _slowest_of_best_pairs(
    network: Network, left: Sequence[int], right: Sequence[int], n_bytes: float
) -> tuple[float, tuple[int, int]]:
    """(seconds, pair) of the slowest pair, where each device of the larger stage has one partner in the other one, none
    there has more than its even share of them, rounded up, and the slowest pair is as fast as possible."""
    is_left = len(left) >= len(right)
    many, few = (left, right) if is_left else (right, left)
    most = -(-len(many) // len(few))
    pairs = sorted((pair_s(network, a, b, n_bytes), a, b) for a in many for b in few)
    for limit_s, a, b in pairs:
        partners = {e: [d for cost_s, d, other in pairs if other == e and cost_s <= limit_s] for e in few}
        if _all_assigned(many, partners, most):
            return limit_s, (a, b) if is_left else (b, a)
    raise AssertionError("with every pair allowed, all have a partner")


def _all_assigned(many: Sequence[int], partners: dict[int, list[int]], most: int) -> bool:
    """Whether each of `many` can have a partner that allows it, and no partner more than `most` of them."""
    assigned: dict[int, list[int]] = {e: [] for e in partners}

    def assign(d: int, seen: set[int]) -> bool:
        for e, allowed in partners.items():
            if d not in allowed or e in seen:
                continue
            seen.add(e)
            if len(assigned[e]) < most:
                assigned[e].append(d)
                return True
            for other in assigned[e]:
                if assign(other, seen):
                    assigned[e].remove(other)
                    assigned[e].append(d)
                    return True
        return False

    return all(assign(d, set()) for d in many)
