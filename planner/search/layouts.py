"""Placements [S, P] that need no search: runs of consecutive devices, and random ones for comparison. ENTRY is the
solver `block`, which only offers the block layout."""

import numpy as np

from planner.model.problem import Problem, placement_s, placement_terms
from planner.search.base import SolverEntry
from planner.search.incumbent import Incumbent

N_RANDOM = 100


def block(problem: Problem) -> np.ndarray:
    """placement[s][p] = S p + s: pipeline p takes the p-th run of devices. Network files list devices by region, so a
    pipeline mostly stays inside one."""
    return np.arange(problem.n_devices).reshape(problem.n_pipelines, problem.n_stages).T.copy()


def rows(problem: Problem) -> np.ndarray:
    """placement[s][p] = P s + p: stage s takes the s-th run of devices."""
    return np.arange(problem.n_devices).reshape(problem.n_stages, problem.n_pipelines)


def mean_random(problem: Problem, seed: int) -> tuple[float, float, float]:
    """Mean (total, data-parallel, pipeline) cost of random placements, without improving their order or matchings;
    infinite if one of them uses a missing link."""
    rng = np.random.default_rng(seed)
    shape = problem.n_stages, problem.n_pipelines
    terms = [placement_terms(problem, rng.permutation(problem.n_devices).reshape(shape)) for _ in range(N_RANDOM)]
    terms = [[term_s if term_s < problem.missing_s else np.inf for term_s in pair] for pair in terms]
    datap_s, pipelinep_s = np.mean(terms, axis=0)
    return float(datap_s + pipelinep_s), float(datap_s), float(pipelinep_s)


def offer_block(problem: Problem, incumbent: Incumbent, seed: int):
    del seed
    layout = block(problem)
    incumbent.offer(layout, placement_s(problem, layout), by="block")
    incumbent.count(1)


ENTRY = SolverEntry(offer_block, keeps_placement=True)
