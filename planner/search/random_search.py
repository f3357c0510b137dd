"""Random search: random partitions, each with its best order and matchings. The baseline of every other solver."""

import numpy as np

from planner.cost.communication import partition_s
from planner.cost.placement import placement_of
from planner.model.problem import Problem, placement_s
from planner.search.base import SolverEntry
from planner.search.incumbent import Incumbent


def random_search(problem: Problem, incumbent: Incumbent, seed: int):
    rng = np.random.default_rng(seed)
    shape = problem.n_stages, problem.n_pipelines
    while not incumbent.spent:
        groups = rng.permutation(problem.n_devices).reshape(shape)
        if partition_s(problem.dp_s, problem.pp_s, groups) < incumbent.best_s:
            placement = placement_of(problem, groups)
            incumbent.offer(placement, placement_s(problem, placement), by="random")
        incumbent.count(1)


ENTRY = SolverEntry(random_search)
