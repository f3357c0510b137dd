"""The search by COMM-COST where seats are charged (planner.search.seats): under constraints, or near a plan that runs.
The solver `auto` runs it in place of its portfolio.

Under constraints, with at most SMALL devices every placement is tried, so the best one is proved. With more, a part of
the budget goes to the same problem without constraints: no plan with them costs less than its bound, and its plan,
moved to the nearest seats that are allowed, is a start. The rest is annealing. Near a plan that runs all of it is.
"""

import itertools

import numpy as np

from jaxdt.run.errors import BadInput
from planner.cost.bounds import floor_s
from planner.model.layer_cuts import Ranges
from planner.model.problem import Problem, placement_s
from planner.model.proof import ROUNDING
from planner.model.result import Solution
from planner.search.annealing_chains import anneal_charged, settle
from planner.search.base import solver_entry
from planner.search.charges import violation_s
from planner.search.incumbent import Budget, Incumbent
from planner.search.seating import seating
from planner.search.seats import Seats
from planner.search.solve import solution_of, solve

SMALL = 8
RELAXED_FRAC = 0.3  # of the budget, for the problem without constraints


def solve_seated(
    problem: Problem, seats: Seats, stages: Ranges, incumbent: Incumbent, solver: str, seed: int
) -> Solution:
    """The best placement that was found, by its cost and by what its moves are charged where stages have these layers.
    It honours the constraints."""
    if not solver_entry(solver).honours_constraints:
        why = "honour constraints" if seats.before is None else "know a plan that runs"
        raise BadInput(f"--solver: {solver} does not {why}, expected auto")
    incumbent.missing_s = problem.missing_s
    if seats.are_all_used:
        incumbent.raise_bound(floor_s(problem))
    charges = seats.charges(stages, violation_s(problem))
    starts = [seats.matched(problem, seats.near)]

    def charged(placement: np.ndarray) -> float:
        return placement_s(problem, placement) + seats.charged_s(stages, placement)

    incumbent.offer(starts[0], charged(starts[0]), by="seats")
    if seats.before is None:
        if problem.n_devices <= SMALL:
            _try_all(problem, seats, incumbent)
            assert incumbent.best is not None  # the seating without search
            return solution_of(problem, seats.matched(problem, incumbent.best), incumbent)
        starts += _starts_without(problem, seats, incumbent, solver, seed)
    for start in starts[1:]:
        incumbent.offer(start, charged(start), by="seats")
    if not incumbent.done:
        anneal_charged(problem, incumbent, charges, seed, min(starts, key=charged))
    assert incumbent.best is not None  # the first start
    found = settle(problem, charges, incumbent.best, seed) if seats.before else incumbent.best
    return solution_of(problem, min((seats.matched(problem, found), starts[0]), key=charged), incumbent)


def _starts_without(problem: Problem, seats: Seats, incumbent: Incumbent, solver: str, seed: int) -> list[np.ndarray]:
    """Allowed placements from the problem without constraints, to which a part of the budget goes; its bound holds with
    constraints too."""
    budget = incumbent.budget
    time_s = None if budget.time_s is None else RELAXED_FRAC * budget.time_s
    evaluations = None if budget.evaluations is None else max(1, int(RELAXED_FRAC * budget.evaluations))
    with incumbent.searching_inside(Budget(time_s, evaluations)) as inner:
        relaxed = solve(problem, inner, solver, seed)
    incumbent.raise_bound(min(relaxed.bound_s, problem.missing_s))
    incumbent.count(relaxed.evaluations)
    shape = problem.n_stages, problem.n_pipelines
    near = seating(seats.network, seats.rules.constraints, *shape, relaxed.placement)
    placements = (relaxed.placement, relaxed.placement[::-1], seats.matched(problem, near))
    return [placement for placement in placements if seats.allows(placement)]


def _try_all(problem: Problem, seats: Seats, incumbent: Incumbent):
    """Every placement, the cheapest first, until one is allowed."""
    shape = problem.n_stages, problem.n_pipelines
    every = np.array(list(itertools.permutations(range(problem.n_devices)))).reshape(-1, *shape)
    exchanges_s = problem.dp_s[every[:, :, :, None], every[:, :, None, :]].sum(axis=3).max(axis=(1, 2))
    hops_s = problem.pp_s[every[:, :-1], every[:, 1:]].max(axis=2).sum(axis=1)
    costs_s = exchanges_s + hops_s
    incumbent.count(len(every))
    for k in np.argsort(costs_s, kind="stable"):
        if seats.allows(every[k]):
            incumbent.offer(every[k], placement_s(problem, every[k]), by="exact")
            incumbent.raise_bound(min(float(costs_s[k]) * (1 - ROUNDING), problem.missing_s))
            return
