"""Proofs and bounds: enumeration for few devices, CP-SAT over types for the rest; both also improve the plan."""

import numpy as np
from ortools.sat.python import cp_model

from planner.cost.bounds import datap_floor_s, pipelinep_floor_s
from planner.cost.ortools import chain
from planner.model.problem import MISSING_S, Problem, placement_s
from planner.search.cluster import Types, interchangeable, near_equal, types_of
from planner.search.exact import prove
from planner.search.incumbent import PROOF_GAP_S, Board
from planner.search.types_sat import TypesModel

MAX_TYPES = 24
LADDER = 12
FAILURES = 2


def enumerate_all(problem: Problem, board: Board):
    """Prove the optimum of up to MAX_DEVICES devices, from the board's best plan."""
    groups, cost_s = prove(problem, board.best, board.best_s)
    board.offer(groups, cost_s)
    board.raise_bound(cost_s - PROOF_GAP_S / 10)


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


def cp_sat(time_s: float, work: float, seed: int, linear: bool) -> cp_model.CpSolver:
    """A one-thread solver, limited by the clock and by deterministic work (some seconds of one core). Without linear
    relaxations it proves small integer models far sooner; with them it bounds coarse ones far better."""
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # it would leave Ctrl-C killing the process
    solver.parameters.linearization_level = 1 if linear else 0
    solver.parameters.max_deterministic_time = work
    if np.isfinite(time_s):
        solver.parameters.max_time_in_seconds = max(0.01, time_s)
    return solver


def prove_types(problem: Problem, types: Types, board: Board, solver: cp_model.CpSolver) -> bool:
    """Look for a plan that beats the board's best by more than rounding; none means proof. With types that are not
    exact, costs must be pooled by np.min: then only the bound counts. Returns whether the model was solved."""
    model = TypesModel(types, problem.n_stages, problem.n_pipelines)
    below_s = np.inf
    if board.best_s < MISSING_S:
        below_s = board.best_s - PROOF_GAP_S / 10
        model.cost_at_most(below_s)
    if types.exact:
        model.floors(datap_floor_s(problem), pipelinep_floor_s(problem))
        model.on_plan = lambda counts: _offer(problem, types, board, counts)
    model.on_bound = lambda bound_s: board.raise_bound(min(bound_s, below_s))
    with board.calling(solver.stop_search):
        result = model.solve(solver)
    model.on_bound(result.bound_s)
    return result.proved


def climb(problem: Problem, board: Board, time_s, work: float, seed: int):
    """Bounds from coarser problems: k clusters of devices whose links are as good as the best of their pairs, for
    k = 2, 3, ... until FAILURES of them are not solved with this work. time_s() says how many seconds are left."""
    failures = 0
    for label in near_equal(problem, LADDER)[1:]:
        if time_s() <= 0 or board.done or failures == FAILURES:
            return
        solver = cp_sat(time_s(), work, seed, linear=True)
        failures += not prove_types(problem, types_of(problem, label, np.min), board, solver)


def start_from(problem: Problem, types: Types, board: Board, solver: cp_model.CpSolver):
    """Offer the best plan of CP-SAT over types that are not exact; its cost is that of the devices."""
    model = TypesModel(types, problem.n_stages, problem.n_pipelines)
    with board.calling(solver.stop_search):
        result = model.solve(solver)
    if result.counts is not None:
        _offer(problem, types, board, result.counts)


def _offer(problem: Problem, types: Types, board: Board, counts: np.ndarray):
    placement = chain(problem, groups_from(types, counts))
    board.offer(placement, placement_s(problem, placement))
