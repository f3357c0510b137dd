"""Small instances and brute force for the planner's tests."""

import itertools
from pathlib import Path

import numpy as np

from jaxdt.run import network as networks
from planner.model.generate import generate
from planner.model.problem import Problem, problem_of

NETWORKS = Path(__file__).parents[1] / "configs" / "networks"
FALSE_PROOFS = Path(__file__).parent / "planner" / "false_proofs"  # a solver once claimed too much on each
C_DP, C_PP = 650_000_000, 471_249_222.755


def case(name: str):
    return networks.load(NETWORKS / f"{name}.json")


def small(n_stages: int, n_pipelines: int, seed: int, kind: str = "jitter") -> Problem:
    return problem_of(generate(kind, n_stages * n_pipelines, seed), n_stages, n_pipelines, C_DP, C_PP)


def partitions(devices: tuple[int, ...], size: int):
    """All ways to cut devices into groups of `size`."""
    if not devices:
        yield ()
        return
    head, rest = devices[0], devices[1:]
    for others in itertools.combinations(rest, size - 1):
        left = tuple(d for d in rest if d not in others)
        for tail in partitions(left, size):
            yield ((head, *others), *tail)


def brute_matching(weights: np.ndarray) -> float:
    n = len(weights)
    return min(max(weights[a, b] for a, b in enumerate(columns)) for columns in itertools.permutations(range(n)))


def brute_path(edge: np.ndarray) -> float:
    orders = itertools.permutations(range(len(edge)))
    return min(sum(edge[a, b] for a, b in itertools.pairwise(order)) for order in orders)


def brute_partition(problem: Problem, groups) -> float:
    """Eq. 1-4 by trying every matching and every order."""
    datap = max(sum(problem.dp_s[d, e] for e in group if e != d) for group in groups for d in group)
    edge = np.zeros((len(groups), len(groups)))
    for j, k in itertools.permutations(range(len(groups)), 2):
        edge[j, k] = brute_matching(problem.pp_s[np.ix_(groups[j], groups[k])])
    return datap + brute_path(edge)


def brute_optimum(problem: Problem) -> float:
    every = partitions(tuple(range(problem.n_devices)), problem.n_pipelines)
    return min(brute_partition(problem, groups) for groups in every)
