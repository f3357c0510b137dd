"""Partitions of the devices into stages, as the baselines make them: how one is scored, and devices by node.

ENTRY is the solver `random`, the baseline of every other one: random partitions, each with its best order and
matchings.

Planners for GPU clusters know machines with several GPUs, one bandwidth inside a machine and one between machines. The
region of a network file comes nearest to their node: it is a machine in some files, a city in others. A device without
a region is a node of its own.
"""

import numpy as np

from planner.cost.communication import partition_s
from planner.cost.placement import placement_of
from planner.model.problem import Problem, placement_s
from planner.search.base import SolverEntry
from planner.search.incumbent import Incumbent


def score(problem: Problem, incumbent: Incumbent, groups: np.ndarray, by: str) -> float:
    """Seconds of the partition `groups` [S, P] under its best order and matchings. One evaluation of the budget; the
    incumbent hears of it from the solver `by` where it is the best so far."""
    cost_s = partition_s(problem.dp_s, problem.pp_s, groups)
    if cost_s < incumbent.best_s:
        placement = placement_of(problem, groups)
        incumbent.offer(placement, placement_s(problem, placement), by=by)
    incumbent.count(1)
    return float(cost_s)


def nodes_of(problem: Problem) -> list[np.ndarray]:
    """The devices of each node, nodes and devices in the order of the network file."""
    return [np.flatnonzero(problem.region == node) for node in np.unique(problem.region)]


def stages_in_turn(sequence: np.ndarray, problem: Problem) -> np.ndarray:
    """Groups [S, P]: stage s takes the s-th run of P devices of the sequence [N]."""
    return sequence.reshape(problem.n_stages, problem.n_pipelines)


def random_search(problem: Problem, incumbent: Incumbent, seed: int):
    rng = np.random.default_rng(seed)
    shape = problem.n_stages, problem.n_pipelines
    while not incumbent.spent:
        score(problem, incumbent, rng.permutation(problem.n_devices).reshape(shape), by="random")


ENTRY = SolverEntry(random_search)
