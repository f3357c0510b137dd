"""The block layout and no search: pipeline p takes the p-th run of devices of the network file."""

from planner.model.problem import Problem, placement_s
from planner.search import layouts
from planner.search.base import SolverEntry
from planner.search.incumbent import Incumbent


def block(problem: Problem, incumbent: Incumbent, seed: int):
    del seed
    layout = layouts.block(problem)
    incumbent.offer(layout, placement_s(problem, layout), by="block")
    incumbent.count(1)


ENTRY = SolverEntry(block, keeps_placement=True)
