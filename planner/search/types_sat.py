"""CP-SAT over device types, for proofs, bounds and plans: integer counts per (type, stage), flows between stages.

The stage order is the path of Eq. 4 and the flows are its matchings, so one model holds all of Eq. 1-4.

A model looks for plans up to a limit, the cost of the best known plan. A pair that alone would cost more is forbidden,
as a missing link is, and no number in the model exceeds the limit. Costs are whole units, the limit is UNITS_PER_TERM
of them for every term that a plan adds up, and every pair is rounded down. The model's bound therefore holds for every
placement (and for devices, when types pool the cheapest pairs), and is too low by less than PROOF_GAP / 4 of the limit.
The cost of a solution is computed again from its devices.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from planner.cost.bounds import datap_floor_s, pipelinep_floor_s
from planner.cost.placement import match_pipelines
from planner.model.problem import Problem, placement_s
from planner.model.proof import PROOF_GAP
from planner.search.annealing_chains import chain_sequences, in_threads
from planner.search.base import SolverEntry
from planner.search.compositions import prove_by_compositions
from planner.search.device_types import Types, groups_from, interchangeable, near_equal, types_of
from planner.search.incumbent import Incumbent

UNITS_PER_TERM = round(4 / PROOF_GAP)
ROUND_DOWN = 1 - 1e-12  # a product of floats may be above the true one by its last bit
FORBIDDEN = -1
MAX_TYPES = 24
MAX_CLUSTERS = 12  # types in the coarse problems that give bounds
MAX_UNSOLVED = 2
WORK_PER_EVALUATION = 1e-6
START_CLUSTERS, START_WORK, START_TIME_FRAC = 8, 30.0, 0.3  # of the coarse problem that gives a plan


@dataclass(frozen=True)
class TypesResult:
    """counts[k][s] devices of type k in stage s (None: none found in time); bound_s holds for every placement."""

    counts: np.ndarray | None
    bound_s: float
    proved: bool


class Floors(NamedTuple):
    """Lower bounds of DATAP and PIPELINEP of every placement."""

    datap_s: float
    pipelinep_s: float


NO_FLOORS = Floors(0.0, 0.0)


class TypesModel:
    """Data, variables, constraints and objective of one instance; `solve` may be called with several limits of work.

    The model finds only plans of at most limit_s. `floors` must hold for devices; they forbid more pairs."""

    def __init__(self, types: Types, n_stages: int, n_pipelines: int, limit_s: float, floors: Floors = NO_FLOORS):
        self.types = types
        self.n_stages = n_stages
        self.n_pipelines = n_pipelines
        self.limit = UNITS_PER_TERM * (n_stages + n_pipelines)
        self.unit_s = limit_s / self.limit if limit_s > 0 else 1.0
        self.dp = self._whole(types.dp_s, limit_s - floors.pipelinep_s)
        self.pp = self._whole(types.pp_s, limit_s - floors.datap_s)
        self.model = cp_model.CpModel()
        self._add_counts()
        self.datap = self._add_datap()
        self.pipelinep = sum(self._add_hop(s) for s in range(n_stages - 1))
        self.model.add(self.datap + self.pipelinep <= self.limit)
        self.model.minimize(self.datap + self.pipelinep)
        self.on_plan: Callable[[np.ndarray], None] | None = None
        self.on_bound: Callable[[float], None] | None = None

    def _whole(self, seconds: np.ndarray, most_s: float) -> np.ndarray:
        """Units of every pair, rounded down; FORBIDDEN where a pair costs more than most_s."""
        allowed = seconds <= most_s / ROUND_DOWN
        return np.where(
            allowed, np.floor(np.where(allowed, seconds, 0.0) / self.unit_s * ROUND_DOWN), FORBIDDEN
        ).astype(np.int64)

    def add_floors(self, floors: Floors):
        """Let the model know lower bounds that hold for types too. Every term of a plan is rounded down by up to one
        unit, so the sums may be that much lower than the floors."""
        self.model.add(self.datap >= int(floors.datap_s / self.unit_s) - self.n_pipelines)
        self.model.add(self.pipelinep >= int(floors.pipelinep_s / self.unit_s) - self.n_stages)

    def _add_counts(self):
        """n[k][s] devices of type k in stage s: stages are full, and all devices of a type are used. A path and its
        reverse cost the same, so one of them is enough."""
        new = self.model.new_int_var
        stages = range(self.n_stages)
        self.n = [
            [new(0, min(size, self.n_pipelines), f"n{k},{s}") for s in stages]
            for k, size in enumerate(self.types.sizes)
        ]
        for k, size in enumerate(self.types.sizes):
            self.model.add(sum(self.n[k]) == size)
        for s in stages:
            self.model.add(sum(row[s] for row in self.n) == self.n_pipelines)
        if self.n_stages > 1:
            weighted = [sum(k * row[s] for k, row in enumerate(self.n)) for s in (0, self.n_stages - 1)]
            self.model.add(weighted[0] <= weighted[1])

    def _add_datap(self):
        """DATAP of Eq. 2: at least the sum of a present type's exchanges, for every stage. Types whose pair is
        forbidden are not in one stage, nor are two devices of a type whose own pair is."""
        kinds = range(len(self.types.members))
        cost = np.where(self.dp == FORBIDDEN, 0, self.dp)
        datap = self.model.new_int_var(0, self.limit, "datap")
        for s in range(self.n_stages):
            present = [self.model.new_bool_var(f"present{k},{s}") for k in kinds]
            for k in kinds:
                most = 1 if self.dp[k, k] == FORBIDDEN else min(self.types.sizes[k], self.n_pipelines)
                self.model.add(self.n[k][s] <= most * present[k])
                exchanges = sum(int(cost[k, l]) * self.n[l][s] for l in kinds if cost[k, l]) - int(cost[k, k])
                self.model.add(datap >= exchanges).only_enforce_if(present[k])
                for l in kinds[k + 1 :]:
                    if self.dp[k, l] == FORBIDDEN:
                        self.model.add_bool_or(~present[k], ~present[l])
        return datap

    def _add_hop(self, s: int):
        """Cost of hop s (Eq. 3): a flow may use a pair of types only if the hop is charged at least its weight. A
        forbidden pair has no flow."""
        kinds = range(len(self.types.members))
        sizes = self.types.sizes
        pairs = [(k, l) for k in kinds for l in kinds if self.pp[k, l] != FORBIDDEN and (k != l or sizes[k] > 1)]
        weights = sorted({int(self.pp[pair]) for pair in pairs})
        above = [self.model.new_bool_var(f"above{s},{r}") for r in range(len(weights))]
        for low, high in zip(above, above[1:], strict=False):
            self.model.add_implication(high, low)
        rank = {w: r for r, w in enumerate(weights)}
        flow = {}
        for k, l in pairs:
            most = min(sizes[k], sizes[l], self.n_pipelines)
            flow[k, l] = self.model.new_int_var(0, most, f"flow{s},{k},{l}")
            self.model.add(flow[k, l] <= most * above[rank[int(self.pp[k, l])]])
        for k in kinds:
            self.model.add(sum(flow[k, l] for l in kinds if (k, l) in flow) == self.n[k][s])
            self.model.add(sum(flow[l, k] for l in kinds if (l, k) in flow) == self.n[k][s + 1])
        if not weights:
            return 0
        self.model.add(above[0] == 1)
        steps = [weights[0]] + [b - a for a, b in zip(weights, weights[1:], strict=False)]
        return sum(step * b for step, b in zip(steps, above, strict=True))

    def solve(self, solver: cp_model.CpSolver) -> TypesResult:
        """Solve within the solver's limits. on_plan(counts) and on_bound(bound_s), where set, are called on the way.
        If there is no plan up to the limit, the result is proved and its bound infinite."""
        on_bound = self.on_bound
        if on_bound:
            solver.best_bound_callback = lambda bound: on_bound(self._seconds(bound))
        status = solver.solve(self.model, _PlanCallback(self))
        if status == cp_model.INFEASIBLE:
            return TypesResult(None, np.inf, True)
        if status == cp_model.MODEL_INVALID:
            raise RuntimeError(f"CP-SAT refuses the types model: {self.model.validate()}")
        bound_s = self._seconds(solver.best_objective_bound)
        if status == cp_model.UNKNOWN:
            return TypesResult(None, bound_s, False)
        return TypesResult(self.counts(solver.value), bound_s, status == cp_model.OPTIMAL)

    def _seconds(self, units: float) -> float:
        """A bound of the model as a bound of costs: no more than the limit, above which the model knows nothing."""
        return min(max(0.0, units), self.limit) * self.unit_s * ROUND_DOWN

    def counts(self, value) -> np.ndarray:
        """counts [K, S] of a solution, given the function from variable to value."""
        return np.array([[value(variable) for variable in row] for row in self.n])


class _PlanCallback(cp_model.CpSolverSolutionCallback):
    def __init__(self, types_model: TypesModel):
        super().__init__()
        self.types_model = types_model

    def on_solution_callback(self):
        if self.types_model.on_plan:
            self.types_model.on_plan(self.types_model.counts(self.value))


# ----------------------------------------------------------------------------------------------- proofs and the solver


class Effort(NamedTuple):
    """One call of CP-SAT: with linear relaxations or without, and at most this deterministic work (some seconds of one
    core). Without relaxations it proves small integer models far sooner; with them it bounds coarse ones far better."""

    linear: bool
    work: float


QUICK_EFFORTS = [Effort(True, 0.2), Effort(False, 9.0)]
EFFORTS = [Effort(linear, work) for work in (4.0, 16.0, 64.0, 256.0, 1024.0) for linear in (False, True)]


def cp_sat(time_s: float, effort: Effort, seed: int) -> cp_model.CpSolver:
    """A one-thread solver, limited by the clock and by deterministic work."""
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # its own handler would leave Ctrl-C killing the process
    solver.parameters.linearization_level = 1 if effort.linear else 0
    # OR-Tools 9.15 loses solutions in the presolve steps that compare at-most-one constraints with linear ones, and
    # then proves wrong optima; 0 switches these steps off.
    solver.parameters.presolve_inclusion_work_limit = 0
    solver.parameters.symmetry_level = 0  # types leave few symmetries, and looking for them takes a sixth of the work
    solver.parameters.max_deterministic_time = effort.work
    if np.isfinite(time_s):
        solver.parameters.max_time_in_seconds = max(0.01, time_s)
    return solver


def max_work(incumbent: Incumbent) -> float:
    """Deterministic work of one call of CP-SAT that an evaluation limit allows."""
    limit = incumbent.budget.evaluations
    return np.inf if limit is None else limit * WORK_PER_EVALUATION


def affordable(incumbent: Incumbent, efforts: list[Effort]) -> list[Effort]:
    return [effort for effort in efforts if effort.work <= max_work(incumbent)]


def exact_types(problem: Problem) -> Types | None:
    """Types of interchangeable devices, or None where there are too many for CP-SAT."""
    label = interchangeable(problem)
    if label.max() >= MAX_TYPES:
        return None
    return types_of(problem, label, np.min)


def offer_counts(problem: Problem, types: Types, incumbent: Incumbent, counts: np.ndarray):
    """Offer the placement of counts [K, S] at the cost of its devices."""
    placement = match_pipelines(problem, groups_from(types, counts))
    incumbent.offer(placement, placement_s(problem, placement), by="types")


def prove_types(problem: Problem, types: Types, incumbent: Incumbent, solver: cp_model.CpSolver) -> bool:
    """Look for a plan that beats the incumbent by half of PROOF_GAP; none means proof. While the incumbent has no plan
    without missing links, look for any; none means that there is none. With types that are not exact, costs must be
    pooled by np.min: then only the bound counts. Returns whether the model was solved."""
    has_plan = incumbent.best_s < problem.missing_s
    limit_s = incumbent.best_s * (1 - PROOF_GAP / 2) if has_plan else problem.dearest_s
    floors = Floors(datap_floor_s(problem), pipelinep_floor_s(problem))
    model = TypesModel(types, problem.n_stages, problem.n_pipelines, limit_s, floors)
    if types.exact:
        model.add_floors(floors)
        model.on_plan = lambda counts: offer_counts(problem, types, incumbent, counts)
    model.on_bound = incumbent.raise_bound
    with incumbent.on_stop(solver.stop_search):
        result = model.solve(solver)
    nothing_below_s = limit_s if has_plan else problem.missing_s
    incumbent.raise_bound(min(result.bound_s, nothing_below_s))
    return result.proved


def prove_with_efforts(
    problem: Problem,
    types: Types,
    incumbent: Incumbent,
    seed: int,
    efforts: list[Effort],
    left_s: Callable[[], float],
):
    """Proofs with growing work, each against the plan that is best by then, while left_s() says that there is time.
    They alternate between linear relaxations and none, because neither is faster on all networks. A model that was
    solved without a proof had a limit far above the optimum, and so coarse units: the next has the new plan's cost."""
    for effort in efforts:
        solved = True
        while solved and not incumbent.proved:
            if incumbent.done or left_s() <= 0:
                return
            solved = prove_types(problem, types, incumbent, cp_sat(left_s(), effort, seed))


def bound_by_clusters(problem: Problem, incumbent: Incumbent, left_s: Callable[[], float], work: float, seed: int):
    """Bounds from coarser problems: k clusters of devices whose links are as good as the best of their pairs, for
    k = 2, 3, ... until MAX_UNSOLVED of them are not solved with this work, or left_s() says that time is up."""
    n_unsolved = 0
    for label in near_equal(problem, MAX_CLUSTERS)[1:]:
        if left_s() <= 0 or incumbent.done or n_unsolved == MAX_UNSOLVED:
            return
        solver = cp_sat(left_s(), Effort(True, work), seed)
        n_unsolved += not prove_types(problem, types_of(problem, label, np.min), incumbent, solver)


def search_types(problem: Problem, incumbent: Incumbent, seed: int):
    """The solver. Where all links differ it plans clusters, and then lets annealing swap their devices."""
    types = exact_types(problem)
    if types is not None:
        efforts = affordable(incumbent, [*QUICK_EFFORTS, *EFFORTS])
        left_s = lambda: incumbent.left_s  # noqa: E731
        prove_with_efforts(problem, types, incumbent, seed, efforts[:1], left_s)
        prove_by_compositions(problem, types, incumbent, left_s)
        prove_with_efforts(problem, types, incumbent, seed, efforts[1:], left_s)
        return
    types = types_of(problem, near_equal(problem, START_CLUSTERS)[-1], np.mean)
    solver = cp_sat(START_TIME_FRAC * incumbent.left_s, Effort(True, START_WORK), seed)
    limit_s = incumbent.best_s if incumbent.best_s < problem.missing_s else problem.dearest_s
    model = TypesModel(types, problem.n_stages, problem.n_pipelines, limit_s)
    with incumbent.on_stop(solver.stop_search):
        result = model.solve(solver)
    if result.counts is not None:
        offer_counts(problem, types, incumbent, result.counts)
    if not incumbent.done:
        starts = incumbent.starts
        chains = chain_sequences(problem, incumbent, seed)
        with in_threads([functools.partial(chain.run, starts) for chain in chains[1:]]):
            chains[0].run(starts)


ENTRY = SolverEntry(search_types, starts_from_layouts=True)
