"""Random search: random partitions, each with its best order and matchings. The baseline of every other solver."""

import numpy as np

from planner.model.problem import Problem
from planner.search.base import SolverEntry
from planner.search.baselines.scoring import score
from planner.search.incumbent import Incumbent


def random_search(problem: Problem, incumbent: Incumbent, seed: int):
    rng = np.random.default_rng(seed)
    shape = problem.n_stages, problem.n_pipelines
    while not incumbent.spent:
        score(problem, incumbent, rng.permutation(problem.n_devices).reshape(shape), by="random")


ENTRY = SolverEntry(random_search)
