"""The genetic algorithm with Kernighan and Lin's gain and without refinement: the DT-FM paper's baseline."""

from planner.model.problem import Problem
from planner.search.base import SolverEntry
from planner.search.crossover import KERNIGHAN_LIN_GAIN
from planner.search.evolve import evolve
from planner.search.incumbent import Incumbent


def kernighan_lin(problem: Problem, incumbent: Incumbent, seed: int):
    evolve(problem, incumbent, seed, KERNIGHAN_LIN_GAIN)


ENTRY = SolverEntry(kernighan_lin)
