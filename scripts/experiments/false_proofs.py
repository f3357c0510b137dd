"""Every solver of the planner against brute force on random networks of at most 8 devices: what it claims must be true.

    python scripts/experiments/false_proofs.py --instances=2000

Prints one line for every claim that is false, and a count. The exit code is 1 if there is one. A network has missing
links (at random, between regions, or none), bandwidths and latencies over six decades, unequal directions, or equal
devices. The brute force shares no code with the planner: it costs every placement by Eq. 1-4 of DT-FM (NeurIPS 2022).
2,000 instances take about half an hour of one core.
"""

import functools
import itertools
import math
import sys
from dataclasses import dataclass

import numpy as np
from absl import flags

from jaxdt.cli import script_main
from jaxdt.run.network import Device, Network
from planner.model.problem import Problem, problem_of
from planner.search.incumbent import Budget, Incumbent
from planner.search.solve import solve

SHAPES = ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2), (1, 5), (5, 1), (1, 8), (7, 1), (8, 1), (1, 1), (3, 1), (1, 2))
# The first three always prove at these sizes, long before their budget ends. The others have the floors alone as a
# bound, so a few plans are enough.
BUDGETS = {
    "auto": Budget(60.0),
    "types": Budget(None, 4_000_000),
    "exact": Budget(60.0),
    "evolve": Budget(None, 60),
    "kl": Budget(None, 60),
    "random": Budget(None, 60),
}
PROVING = ("auto", "types", "exact")
# A plan called optimal may be this much above the optimum, and a bound this much above by rounding.
OPTIMAL_FRAC, ROUNDING_FRAC = 1e-6, 1e-9

_INSTANCES = flags.DEFINE_integer("instances", 2000, "random networks")
_FIRST_SEED = flags.DEFINE_integer("first_seed", 0, "the seed of the first one; the others follow")


@dataclass(frozen=True)
class Instance:
    """A network to plan for S stages x P pipelines."""

    network: Network
    n_stages: int
    n_pipelines: int
    c_dp_bytes: float
    c_pp_bytes: float


# ----------------------------------------------------------------------------------------------------- random networks


def random_instance(seed: int) -> Instance:
    rng = np.random.default_rng(seed)
    n_stages, n_pipelines = SHAPES[int(rng.integers(len(SHAPES)))]
    n = n_stages * n_pipelines
    region = rng.integers(rng.integers(1, n + 1), size=n)
    latency_s, bandwidth_gbps = _links(rng, region)
    present = _present(rng, region)
    if rng.random() < 0.6:  # both directions equal
        latency_s, bandwidth_gbps = (np.triu(m, 1) + np.triu(m, 1).T for m in (latency_s, bandwidth_gbps))
        present = np.triu(present, 1) | np.triu(present, 1).T
    bandwidth_gbps = np.where(present, bandwidth_gbps, 0.0)
    for matrix in (latency_s, bandwidth_gbps):
        np.fill_diagonal(matrix, 0.0)
    network = Network(
        devices=tuple(Device(f"d{d}", f"r{region[d]}") for d in range(n)),
        latency_s=tuple(map(tuple, latency_s.tolist())),
        bandwidth_gbps=tuple(map(tuple, bandwidth_gbps.tolist())),
        name=f"seed{seed}",
    )
    c_dp_bytes, c_pp_bytes = (float(size) for size in 10 ** rng.uniform(3, 9, 2))
    if rng.random() < 0.1:
        c_dp_bytes = 0.0
    return Instance(network, n_stages, n_pipelines, c_dp_bytes, c_pp_bytes)


def _links(rng: np.random.Generator, region: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(latency_s, bandwidth_gbps) [N, N]: few values (so that devices and costs are equal), by region, or all
    different; over up to six decades."""
    n = len(region)
    decades = float(rng.choice([0.5, 2.0, 6.0]))
    kind = rng.choice(["few", "regions", "all"])
    latency_s = 10 ** (-6 + rng.uniform(0, decades, (n, n))) * float(rng.choice([0.0, 1.0]))
    bandwidth_gbps = 10 ** (-3 + rng.uniform(0, decades, (n, n)))
    if kind == "few":
        values = 10 ** (-3 + rng.uniform(0, decades, 3))
        return np.where(latency_s > 0, 1e-3, 0.0), rng.choice(values, (n, n))
    if kind == "regions":
        a, b = np.meshgrid(region, region, indexing="ij")
        return latency_s[a, b], bandwidth_gbps[a, b]
    return latency_s, bandwidth_gbps


def _present(rng: np.random.Generator, region: np.ndarray) -> np.ndarray:
    """Which links exist [N, N]."""
    n = len(region)
    missing_prob = float(rng.choice([0.0, 0.1, 0.25, 0.5]))
    kind = rng.choice(["random", "regions", "none"])
    if kind == "none":
        return np.ones((n, n), dtype=bool)
    present = rng.random((n, n)) >= missing_prob
    if kind == "random":
        return present
    a, b = np.meshgrid(region, region, indexing="ij")
    return present[a, b] | (a == b)


# --------------------------------------------------------------------------------------------------------- brute force


@functools.cache
def all_placements(n_stages: int, n_pipelines: int) -> np.ndarray:
    """Every placement [M, S, P], up to the numbering of the pipelines: the first stage is in ascending order."""
    n = n_stages * n_pipelines
    rows = []
    for first in itertools.combinations(range(n), n_pipelines):
        rest = [d for d in range(n) if d not in first]
        rows += [first + others for others in itertools.permutations(rest)]
    return np.array(rows).reshape(-1, n_stages, n_pipelines)


def pair_cost_s(network: Network, n_bytes: float) -> np.ndarray:
    """Seconds [N, N] of n_bytes from a to b and of as many back; infinite without a link in either direction."""
    n = network.n_devices
    cost_s = np.zeros((n, n))
    for a, b in itertools.permutations(range(n), 2):
        for src, dst in ((a, b), (b, a)):
            bytes_per_s = network.bandwidth_gbps[src][dst] * 1e9 / 8
            sent_s = n_bytes / bytes_per_s if bytes_per_s else math.inf
            cost_s[a, b] += network.latency_s[src][dst] + sent_s
    return cost_s


def placement_costs_s(instance: Instance, placements: np.ndarray) -> np.ndarray:
    """Eq. 1-4 of every placement [M, S, P], with its own order and pairs: the least of all is the optimum."""
    exchange_s = pair_cost_s(instance.network, instance.c_dp_bytes / instance.n_pipelines)
    hop_s = pair_cost_s(instance.network, instance.c_pp_bytes)
    datap_s = exchange_s[placements[:, :, :, None], placements[:, :, None, :]].sum(axis=3).max(axis=(1, 2))
    hops_s = hop_s[placements[:, :-1], placements[:, 1:]].max(axis=2)
    return datap_s + hops_s.sum(axis=1)


def optimum_s(instance: Instance) -> float:
    """The least cost of any placement; infinite if every one uses a missing link."""
    return float(placement_costs_s(instance, all_placements(instance.n_stages, instance.n_pipelines)).min())


# -------------------------------------------------------------------------------------------------------------- claims


def problem_of_instance(instance: Instance) -> Problem:
    sizes = (instance.c_dp_bytes, instance.c_pp_bytes)
    return problem_of(instance.network, instance.n_stages, instance.n_pipelines, *sizes)


def false_claims(instance: Instance, solver: str, least_s: float) -> list[str]:
    """The false claims of a solver about an instance, given the optimum."""
    problem = problem_of_instance(instance)
    solution = solve(problem, Incumbent(BUDGETS[solver]), solver, 0)
    true_s = float(placement_costs_s(instance, solution.placement[None])[0])
    claims = {
        f"the cost {solution.cost_s!r}, {true_s!r} by brute force": _same(solution.cost_s, true_s),
        f"no plan exists, one of {least_s!r} does": math.isfinite(solution.bound_s) or math.isinf(least_s),
        f"the bound {solution.bound_s!r}, the optimum is {least_s!r}": solution.bound_s
        <= least_s * (1 + ROUNDING_FRAC),
        f"{true_s!r} is proved, the optimum is {least_s!r}": not solution.proved
        or true_s <= least_s * (1 + OPTIMAL_FRAC),
    }
    if solver in PROVING:
        claims["nothing where it should prove"] = solution.proved or math.isinf(solution.bound_s)
    return [claim for claim, holds in claims.items() if not holds]


def _same(a: float, b: float) -> bool:
    return a == b or math.isclose(a, b, rel_tol=ROUNDING_FRAC)


def check(seed: int, solvers: tuple[str, ...] = tuple(BUDGETS)) -> list[str]:
    """A line for every false claim about the instance of a seed."""
    instance = random_instance(seed)
    least_s = optimum_s(instance)
    shape = f"{instance.n_stages} x {instance.n_pipelines}"
    return [
        f"seed {seed}, {shape}: {solver} says {claim}"
        for solver in solvers
        for claim in false_claims(instance, solver, least_s)
    ]


def main() -> int:
    n_false = 0
    seeds = range(_FIRST_SEED.value, _FIRST_SEED.value + _INSTANCES.value)
    for n_done, seed in enumerate(seeds, start=1):
        lines = check(seed)
        n_false += len(lines)
        for line in lines:
            print(line, flush=True)
        if n_done % 100 == 0:
            print(f"{n_done} instances, {n_false} false claims", file=sys.stderr, flush=True)
    print(f"{len(seeds)} instances, {len(BUDGETS)} solvers: {n_false} false claims")
    return 1 if n_false else 0


if __name__ == "__main__":
    script_main.run(main)
