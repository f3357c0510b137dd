"""`evolve` with Kernighan and Lin's gain in its local search, and nothing else changed."""

from planner.model.problem import Problem
from planner.search.base import SolverEntry
from planner.search.evolve import KERNIGHAN_LIN, evolve
from planner.search.incumbent import Incumbent


def kernighan_lin(problem: Problem, incumbent: Incumbent, seed: int):
    evolve(problem, incumbent, seed, KERNIGHAN_LIN)


ENTRY = SolverEntry(kernighan_lin)
