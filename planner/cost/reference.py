"""The reference cost: a placement's Eq. 1-4 straight from a network and two sizes, in plain Python.

It checks what solvers claim, so it shares no code with them and takes the means of both directions itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.spec.network import Network


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


def pair_s(network: Network, a: int, b: int, n_bytes: float) -> float:
    """2 (alpha + n_bytes / beta), alpha and beta means of both directions; infinite without a link either way."""
    forth = network.link(a, b)
    back = network.link(b, a)
    if min(forth.bandwidth_gbps, back.bandwidth_gbps) == 0:
        return math.inf
    beta = (forth.bandwidth_gbps + back.bandwidth_gbps) / 2 * 1e9 / 8
    return (forth.latency_s + back.latency_s) + 2 * n_bytes / beta


def cost_of(network: Network, placement: Sequence[Sequence[int]], c_dp_bytes: float, c_pp_bytes: float) -> Cost:
    """Cost of placement[stage][pipeline] with its own stage order and its own pairs in each hop (Eq. 2-4)."""
    shard_bytes = c_dp_bytes / len(placement[0])
    loads = []
    for s, row in enumerate(placement):
        loads += [(sum(pair_s(network, d, e, shard_bytes) for e in row if e != d), s, d) for d in row]
    datap_s, slowest_stage, slowest_device = max(loads, key=lambda load: load[0])
    hops = []
    for left, right in zip(placement, placement[1:], strict=False):
        pairs = [(pair_s(network, a, b, c_pp_bytes), (a, b)) for a, b in zip(left, right, strict=True)]
        hops.append(max(pairs, key=lambda pair: pair[0]))
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
