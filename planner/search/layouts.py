"""Plans that need no search: blocks of consecutive devices, and random ones for comparison."""

import numpy as np

from planner.model.problem import Problem, placement_terms

N_RANDOM = 100


def block(problem: Problem) -> np.ndarray:
    """placement[s][p] = S p + s: pipeline p on the p-th run of devices, so inside a region where files list regions."""
    return np.arange(problem.n_devices).reshape(problem.n_pipelines, problem.n_stages).T.copy()


def rows(problem: Problem) -> np.ndarray:
    """placement[s][p] = P s + p: stage s on the s-th run of devices."""
    return np.arange(problem.n_devices).reshape(problem.n_stages, problem.n_pipelines)


def mean_random(problem: Problem, seed: int) -> tuple[float, float, float]:
    """Mean (total, data-parallel, pipeline) cost of random placements as they stand."""
    rng = np.random.default_rng(seed)
    shape = problem.n_stages, problem.n_pipelines
    terms = [placement_terms(problem, rng.permutation(problem.n_devices).reshape(shape)) for _ in range(N_RANDOM)]
    datap_s, pipelinep_s = np.mean(terms, axis=0)
    return float(datap_s + pipelinep_s), float(datap_s), float(pipelinep_s)
