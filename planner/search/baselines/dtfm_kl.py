"""DT-FM's search as published, with the Kernighan-Lin gain of its public code: the paper's own baseline."""

from planner.model.problem import Problem
from planner.search.base import SolverEntry
from planner.search.baselines.dtfm import search_as_published
from planner.search.crossover import KERNIGHAN_LIN_GAIN
from planner.search.incumbent import Incumbent


def dtfm_kl(problem: Problem, incumbent: Incumbent, seed: int):
    search_as_published(problem, incumbent, seed, KERNIGHAN_LIN_GAIN)


ENTRY = SolverEntry(dtfm_kl)
