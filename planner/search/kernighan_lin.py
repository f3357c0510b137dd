"""`evolve` with Kernighan and Lin's gain in its local search, and nothing else changed."""

import functools

from planner.search.base import SolverEntry
from planner.search.evolve import KERNIGHAN_LIN, solve_by

ENTRY = SolverEntry(functools.partial(solve_by, KERNIGHAN_LIN))
