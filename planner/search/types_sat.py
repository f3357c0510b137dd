"""CP-SAT over device types, for proofs, bounds and plans: integer counts per (type, stage), flows between stages.

The stage order is the path of Eq. 4 and the flows are its matchings, so one model holds all of Eq. 1-4. Costs are
rounded down to microseconds: the model's bound is a bound for every placement (and for devices, when types pool the
cheapest pairs). The cost of a solution is computed again from its devices.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from ortools.sat.python import cp_model

from planner.cost.bounds import datap_floor_s, pipelinep_floor_s
from planner.cost.placement import match_pipelines
from planner.model.problem import MICROSECONDS, MISSING_S, Problem, placement_s
from planner.search.annealing_chains import chain_sequences, in_threads
from planner.search.base import SolverEntry
from planner.search.device_types import Types, interchangeable, near_equal, types_of
from planner.search.incumbent import PROOF_GAP_S, Incumbent

SLACK_S = 1e-3  # the model rounds every exchange down, the floors come from exact costs
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


class TypesModel:
    """Data, variables, constraints and objective of one instance; `solve` may be called with several limits."""

    def __init__(self, types: Types, n_stages: int, n_pipelines: int):
        self.types = types
        self.n_stages = n_stages
        self.n_pipelines = n_pipelines
        self.dp = np.floor(types.dp_s * MICROSECONDS).astype(np.int64)
        self.pp = np.floor(types.pp_s * MICROSECONDS).astype(np.int64)
        self.model = cp_model.CpModel()
        self._add_counts()
        self.datap = self._add_datap()
        self.pipelinep = sum(self._add_hop(s) for s in range(n_stages - 1))
        self.model.minimize(self.datap + self.pipelinep)
        self.on_plan: Callable[[np.ndarray], None] | None = None
        self.on_bound: Callable[[float], None] | None = None

    def floors(self, datap_s: float, pipelinep_s: float):
        """Add known lower bounds of both terms."""
        self.model.add(self.datap >= _whole(datap_s - SLACK_S))
        self.model.add(self.pipelinep >= _whole(pipelinep_s - SLACK_S))

    def cost_at_most(self, cost_s: float):
        """Look only for plans of at most this cost."""
        self.model.add(self.datap + self.pipelinep <= _whole(cost_s))

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
        """DATAP of Eq. 2: at least the sum of a present type's exchanges, for every stage."""
        kinds = range(len(self.types.members))
        ceiling = int(self.dp.max()) * self.n_pipelines
        datap = self.model.new_int_var(0, ceiling, "datap")
        for s in range(self.n_stages):
            for k in kinds:
                present = self.model.new_bool_var(f"present{k},{s}")
                self.model.add(self.n[k][s] <= min(self.types.sizes[k], self.n_pipelines) * present)
                exchanges = sum(int(self.dp[k, l]) * self.n[l][s] for l in kinds) - int(self.dp[k, k])
                self.model.add(datap >= exchanges).only_enforce_if(present)
        return datap

    def _add_hop(self, s: int):
        """Cost of hop s (Eq. 3): a flow may use a pair of types only if the hop is charged at least its weight."""
        kinds = range(len(self.types.members))
        used = [self.pp[k, l] for k in kinds for l in kinds if k != l or self.types.sizes[k] > 1]
        weights = sorted({int(w) for w in used})
        above = [self.model.new_bool_var(f"above{s},{r}") for r in range(len(weights))]
        for low, high in zip(above, above[1:], strict=False):
            self.model.add_implication(high, low)
        rank = {w: r for r, w in enumerate(weights)}
        flow = {}
        for k in kinds:
            for l in kinds:
                if k != l or self.types.sizes[k] > 1:
                    most = min(self.types.sizes[k], self.types.sizes[l], self.n_pipelines)
                    flow[k, l] = self.model.new_int_var(0, most, f"flow{s},{k},{l}")
                    self.model.add(flow[k, l] <= most * above[rank[int(self.pp[k, l])]])
        for k in kinds:
            self.model.add(sum(flow[k, l] for l in kinds if (k, l) in flow) == self.n[k][s])
            self.model.add(sum(flow[l, k] for l in kinds if (l, k) in flow) == self.n[k][s + 1])
        self.model.add(above[0] == 1)
        steps = [weights[0]] + [b - a for a, b in zip(weights, weights[1:], strict=False)]
        return sum(step * b for step, b in zip(steps, above, strict=True))

    def solve(self, solver: cp_model.CpSolver) -> TypesResult:
        """Solve within the solver's limits. on_plan(counts) and on_bound(bound_s), where set, are called on the way.
        If there is no plan under `cost_at_most`, the result is proved and its bound infinite."""
        on_bound = self.on_bound
        if on_bound:
            solver.best_bound_callback = lambda bound: on_bound(bound / MICROSECONDS)
        status = solver.solve(self.model, _PlanCallback(self))
        if status == cp_model.INFEASIBLE:
            return TypesResult(None, np.inf, True)
        if status == cp_model.MODEL_INVALID:
            raise RuntimeError(f"CP-SAT refuses the types model: {self.model.validate()}")
        bound_s = max(0.0, solver.best_objective_bound / MICROSECONDS)
        if status == cp_model.UNKNOWN:
            return TypesResult(None, bound_s, False)
        return TypesResult(self.counts(solver.value), bound_s, status == cp_model.OPTIMAL)

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


def _whole(seconds: float) -> int:
    return int(np.floor(seconds * MICROSECONDS))


# ----------------------------------------------------------------------------------------------- proofs and the solver


class Effort(NamedTuple):
    """One call of CP-SAT: with linear relaxations or without, and at most this deterministic work (some seconds of one
    core). Without relaxations it proves small integer models far sooner; with them it bounds coarse ones far better."""

    linear: bool
    work: float


QUICK_EFFORTS = [Effort(True, 1.0), Effort(False, 3.5)]
EFFORTS = [Effort(linear, work) for work in (4.0, 16.0, 64.0, 256.0, 1024.0) for linear in (False, True)]


def cp_sat(time_s: float, effort: Effort, seed: int) -> cp_model.CpSolver:
    """A one-thread solver, limited by the clock and by deterministic work."""
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # its own handler would leave Ctrl-C killing the process
    solver.parameters.linearization_level = 1 if effort.linear else 0
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
    return types_of(problem, label)


def groups_from(types: Types, counts: np.ndarray) -> np.ndarray:
    """Groups [S, P] with counts[k][s] devices of type k in stage s."""
    stages = [[] for _ in range(counts.shape[1])]
    for members, row in zip(types.members, counts, strict=True):
        ends = np.cumsum(row)
        for s, stage in enumerate(stages):
            stage += members[ends[s] - row[s] : ends[s]]
    return np.array(stages)


def offer_counts(problem: Problem, types: Types, incumbent: Incumbent, counts: np.ndarray):
    """Offer the placement of counts [K, S] at the cost of its devices."""
    placement = match_pipelines(problem, groups_from(types, counts))
    incumbent.offer(placement, placement_s(problem, placement))


def prove_types(problem: Problem, types: Types, incumbent: Incumbent, solver: cp_model.CpSolver) -> bool:
    """Look for a plan that beats the incumbent by more than rounding; none means proof. With types that are not exact,
    costs must be pooled by np.min: then only the bound counts. Returns whether the model was solved."""
    model = TypesModel(types, problem.n_stages, problem.n_pipelines)
    below_s = np.inf
    if incumbent.best_s < MISSING_S:
        below_s = incumbent.best_s - PROOF_GAP_S / 10
        model.cost_at_most(below_s)
    if types.exact:
        model.floors(datap_floor_s(problem), pipelinep_floor_s(problem))
        model.on_plan = lambda counts: offer_counts(problem, types, incumbent, counts)
    model.on_bound = lambda bound_s: incumbent.raise_bound(min(bound_s, below_s))
    with incumbent.on_stop(solver.stop_search):
        result = model.solve(solver)
    model.on_bound(result.bound_s)
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
    They alternate between linear relaxations and none, because neither is faster on all networks."""
    for effort in efforts:
        if incumbent.done or left_s() <= 0:
            return
        prove_types(problem, types, incumbent, cp_sat(left_s(), effort, seed))


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
        prove_with_efforts(problem, types, incumbent, seed, efforts, lambda: incumbent.left_s)
        return
    types = types_of(problem, near_equal(problem, START_CLUSTERS)[-1], np.mean)
    solver = cp_sat(START_TIME_FRAC * incumbent.left_s, Effort(True, START_WORK), seed)
    model = TypesModel(types, problem.n_stages, problem.n_pipelines)
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
