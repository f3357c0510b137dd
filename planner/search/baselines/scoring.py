"""The steps of all baselines with a partition: score it by Eq. 1-4, count it, and report it if it is the best so
far."""

import numpy as np

from planner.cost.communication import partition_s
from planner.cost.placement import placement_of
from planner.model.problem import Problem, placement_s
from planner.search.incumbent import Incumbent


def score(problem: Problem, incumbent: Incumbent, groups: np.ndarray, by: str) -> float:
    """Seconds of the partition `groups` [S, P] under its best order and matchings. One evaluation of the budget; the
    incumbent hears of it from the solver `by` where it is the best so far."""
    cost_s = partition_s(problem.dp_s, problem.pp_s, groups)
    if cost_s < incumbent.best_s:
        placement = placement_of(problem, groups)
        incumbent.offer(placement, placement_s(problem, placement), by=by)
    incumbent.count(1)
    return float(cost_s)
