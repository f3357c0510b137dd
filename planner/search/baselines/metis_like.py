"""Enumeration after Metis: every order of the nodes, and stages that take devices in turn from that order.

Um et al., "Metis: Fast Automatic Distributed Training on Heterogeneous GPUs", USENIX ATC 2024. Its rules that apply
here: nodes of one type stand together; every order of the types is tried; a stage takes the next devices of the order,
and they are its replicas (data parallelism is preferred inside a stage); the cost model ranks all candidates.

Left out: unequal numbers of replicas, tensor parallelism, the balance of layers over unequal GPUs and the limits of
memory, because shape and layers are given; and its cost model, because all solvers are scored by Eq. 1-4.

More generous than the paper: every node is a type of its own, the order of stages and the matchings are the best for
the groups, and where there are too many orders, they are drawn at random instead of in lexicographic order.
"""

import itertools
import math
from collections.abc import Iterator

import numpy as np

from planner.model.problem import Problem
from planner.search.base import SolverEntry
from planner.search.baselines.partitions import nodes_of, score, stages_in_turn
from planner.search.incumbent import Incumbent

MOST_ENUMERATED = 50_000  # orders; 8 nodes have 40,320


def orders(n_nodes: int, seed: int) -> Iterator[tuple[int, ...]]:
    """All orders of the nodes, or random ones without end where they are too many."""
    if math.factorial(n_nodes) <= MOST_ENUMERATED:
        yield from itertools.permutations(range(n_nodes))
        return
    rng = np.random.default_rng(seed)
    while True:
        yield tuple(rng.permutation(n_nodes))


def metis_like(problem: Problem, incumbent: Incumbent, seed: int):
    nodes = nodes_of(problem)
    for order in orders(len(nodes), seed):
        if incumbent.spent:
            return
        sequence = np.concatenate([nodes[node] for node in order])
        score(problem, incumbent, stages_in_turn(sequence, problem), by="metis_like")


ENTRY = SolverEntry(metis_like)
