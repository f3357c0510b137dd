"""Running one solver of the table, and emitting its best plan."""

import numpy as np

from jaxdt.run.errors import BadInput
from planner.cost.bounds import floor_s
from planner.cost.placement import match_pipelines, placement_of
from planner.model.problem import Problem, placement_s
from planner.model.proof import checked_bound, is_optimal
from planner.model.result import Solution
from planner.search import layouts
from planner.search.base import solver_entry
from planner.search.incumbent import Incumbent


def solve(problem: Problem, incumbent: Incumbent, solver: str, seed: int) -> Solution:
    """Run a solver until the incumbent is done, and emit its best plan with matchings (and, if shorter, the stage
    order) by OR-Tools. There always is a placement: the block layout if the solver had no time for its first.
    BoundError if the search has proved a bound above the cost of that placement."""
    entry = solver_entry(solver)
    if entry.max_devices is not None and problem.n_devices > entry.max_devices:
        raise BadInput(
            f"--solver: {solver} is for at most {entry.max_devices} devices, got {problem.n_devices}; use auto"
        )
    incumbent.missing_s = problem.missing_s
    incumbent.raise_bound(floor_s(problem))
    if entry.starts_from_layouts:
        for layout in (layouts.block(problem), layouts.rows(problem)):
            incumbent.offer(layout, placement_s(problem, layout), by="layouts")
    entry.run(problem, incumbent, seed)
    if entry.keeps_placement and incumbent.best is not None:
        return solution_of(problem, incumbent.best, incumbent)
    return _emit(problem, incumbent)


def _emit(problem: Problem, incumbent: Incumbent) -> Solution:
    groups = layouts.block(problem) if incumbent.best is None else incumbent.best
    placement = match_pipelines(problem, groups)
    if not is_optimal(placement_s(problem, placement), incumbent.bound_s):
        placement = min(placement, placement_of(problem, groups), key=lambda plan: placement_s(problem, plan))
    return solution_of(problem, placement, incumbent)


def solution_of(problem: Problem, placement: np.ndarray, incumbent: Incumbent) -> Solution:
    """The solution of a search, with this placement. BoundError if the search has proved a bound above its cost."""
    cost_s = placement_s(problem, placement)
    bound_s = checked_bound(incumbent.bound_s, cost_s)
    missing_s = problem.missing_s
    return Solution(
        placement=placement,
        cost_s=cost_s if cost_s < missing_s else np.inf,
        bound_s=bound_s if bound_s < missing_s else np.inf,
        proved=cost_s < missing_s and is_optimal(cost_s, bound_s),
        evaluations=incumbent.evaluations,
        time_s=incumbent.elapsed_s,
    )
