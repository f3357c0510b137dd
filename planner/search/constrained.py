"""The search by COMM-COST under constraints, which the solver `auto` runs in place of its portfolio.

With at most SMALL devices every placement is tried, so the best one is proved. With more, a part of the budget goes to
the same problem without constraints: no plan with them costs less than its bound, and its plan, moved to the nearest
seats that are allowed, is a start. The rest is annealing, which is charged for violations (planner.search.charges).
"""

import itertools

import numpy as np

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.cost.bounds import floor_s
from planner.cost.placement import match_pipelines
from planner.model.constraints import Constraints, Rules, rules_of
from planner.model.problem import Problem, placement_s
from planner.model.proof import ROUNDING
from planner.model.result import Solution
from planner.search.annealing_chains import anneal_charged
from planner.search.base import solver_entry
from planner.search.charges import charges_of
from planner.search.incumbent import Budget, Incumbent
from planner.search.seating import seating
from planner.search.solve import solution_of, solve

SMALL = 8
RELAXED_FRAC = 0.3  # of the budget, for the problem without constraints


def solve_constrained(
    problem: Problem, network: Network, constraints: Constraints, incumbent: Incumbent, solver: str, seed: int
) -> Solution:
    """The best placement found that honours the constraints. BadInput names those that contradict each other."""
    if not solver_entry(solver).honours_constraints:
        raise BadInput(f"--solver: {solver} does not honour constraints, expected auto")
    rules = rules_of(constraints, network, problem.n_stages, problem.n_pipelines)
    start = seating(network, constraints, problem.n_stages, problem.n_pipelines)
    incumbent.missing_s = problem.missing_s
    incumbent.raise_bound(floor_s(problem))
    if problem.n_devices <= SMALL:
        _try_all(problem, rules, incumbent)
        return _emit(problem, rules, incumbent)
    start = _matched(problem, rules, start)
    incumbent.offer(start, placement_s(problem, start), by="constraints")
    relaxed = _solve_relaxed(problem, incumbent, solver, seed)
    near = seating(network, constraints, problem.n_stages, problem.n_pipelines, relaxed.placement)
    for placement in (relaxed.placement, relaxed.placement[::-1], _matched(problem, rules, near)):
        if not rules.violated(placement.tolist()):
            incumbent.offer(placement, placement_s(problem, placement), by="constraints")
    if not incumbent.done:
        assert incumbent.best is not None  # the seating without search
        anneal_charged(problem, incumbent, charges_of(problem, rules), seed, incumbent.best)
    return _emit(problem, rules, incumbent)


def _matched(problem: Problem, rules: Rules, placement: np.ndarray) -> np.ndarray:
    """The placement with the best pairs of each hop, where constraints leave them open."""
    return placement if rules.about_pipelines else match_pipelines(problem, placement)


def _solve_relaxed(problem: Problem, incumbent: Incumbent, solver: str, seed: int) -> Solution:
    """Solve without constraints within a part of the budget; the bound holds with constraints too."""
    budget = incumbent.budget
    time_s = None if budget.time_s is None else RELAXED_FRAC * budget.time_s
    evaluations = None if budget.evaluations is None else max(1, int(RELAXED_FRAC * budget.evaluations))
    inner = Incumbent(Budget(time_s, evaluations))
    with incumbent.on_stop(inner.stop):
        if incumbent.interrupted:
            inner.stop()
        relaxed = solve(problem, inner, solver, seed)
    incumbent.raise_bound(min(relaxed.bound_s, problem.missing_s))
    incumbent.count(relaxed.evaluations)
    return relaxed


def _try_all(problem: Problem, rules: Rules, incumbent: Incumbent):
    """Every placement, the cheapest first, until one is allowed."""
    shape = problem.n_stages, problem.n_pipelines
    every = np.array(list(itertools.permutations(range(problem.n_devices)))).reshape(-1, *shape)
    exchanges_s = problem.dp_s[every[:, :, :, None], every[:, :, None, :]].sum(axis=3).max(axis=(1, 2))
    hops_s = problem.pp_s[every[:, :-1], every[:, 1:]].max(axis=2).sum(axis=1)
    costs_s = exchanges_s + hops_s
    incumbent.count(len(every))
    for k in np.argsort(costs_s, kind="stable"):
        if not rules.violated(every[k].tolist()):
            incumbent.offer(every[k], placement_s(problem, every[k]), by="exact")
            incumbent.raise_bound(min(float(costs_s[k]) * (1 - ROUNDING), problem.missing_s))
            return


def _emit(problem: Problem, rules: Rules, incumbent: Incumbent) -> Solution:
    assert incumbent.best is not None  # the seating without search
    return solution_of(problem, _matched(problem, rules, incumbent.best), incumbent)
