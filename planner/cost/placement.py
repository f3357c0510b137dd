"""From a partition to a placement: matchings (Eq. 3) and the stage order (Eq. 4) by OR-Tools.

A partition says which devices form a group; a placement [S, P] also says in which order the groups are stages and which
devices of two neighbouring stages belong to one pipeline.
"""

import numpy as np
from ortools.graph.python import linear_sum_assignment
from ortools.sat.python import cp_model

from planner.cost.communication import EXACT_PATH_STAGES, hop_matrix, short_path
from planner.cost.compiled import at_once
from planner.model.problem import Problem

CIRCUIT_WORK = 0.1  # CP-SAT's deterministic time, less than a second of one core
UNITS = 1 << 20  # the integers that OR-Tools adds up: the largest cost of a matching is so many
PATH_UNITS = 1 << 30  # and a whole path so many: a rounded path is at most a billionth longer for each hop


def _perfect(weights: np.ndarray, limit: float) -> np.ndarray | None:
    """The perfect matching of least sum over weights <= limit (row -> column), or None."""
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    rows, columns = np.nonzero(weights <= limit)
    unit_s = limit / UNITS if limit > 0 else 1.0
    costs = np.round(weights[rows, columns] / unit_s).astype(np.int64)
    solver.add_arcs_with_cost(rows, columns, costs)  # pyright: ignore[reportArgumentType]  # OR-Tools' stub swaps shape and type
    if len(set(rows.tolist())) < len(weights) or solver.solve() != solver.OPTIMAL:
        return None
    return np.array([solver.right_mate(a) for a in range(len(weights))])


def bottleneck_matching(weights: np.ndarray) -> tuple[float, np.ndarray]:
    """(value, row -> column) of Eq. 3: the smallest threshold with a perfect matching, found by binary search over
    the distinct weights [P, P]; among its matchings the one of least sum."""
    thresholds = np.unique(weights)
    low = int(np.searchsorted(thresholds, max(weights.min(axis=0).max(), weights.min(axis=1).max())))
    high = len(thresholds) - 1
    while low < high:
        middle = (low + high) // 2
        if _perfect(weights, thresholds[middle]) is None:
            low = middle + 1
        else:
            high = middle
    match = _perfect(weights, thresholds[low])
    assert match is not None  # the largest threshold allows every pair
    return float(thresholds[low]), match


def open_path(edge: np.ndarray, work: float = CIRCUIT_WORK) -> list[int]:
    """Shortest open path of Eq. 4 by CP-SAT: a circuit with a dummy vertex of zero cost, to the precision of
    PATH_UNITS where the deterministic `work` suffices (CIRCUIT_WORK: some 24 vertices). It starts from the order of the
    vertices, beyond EXACT_PATH_STAGES from compiled 2-opt, and is never worse than that."""
    n = len(edge)
    start = np.arange(n)
    if n > EXACT_PATH_STAGES:  # only what is called is compiled
        at_once(short_path)(edge, start)
    start_s = _path_s(edge, start)
    if n <= 2 or start_s <= 0:
        return start.tolist()
    routed = np.array(_circuit(edge, start.tolist(), start_s, work))
    return (routed if _path_s(edge, routed) < start_s else start).tolist()


def _path_s(edge: np.ndarray, order: np.ndarray) -> float:
    return float(edge[order[:-1], order[1:]].sum())


def _circuit(edge: np.ndarray, start: list[int], start_s: float, work: float) -> list[int]:
    """A short open path by CP-SAT, given one and its cost, which bounds the edges that a shorter one may use."""
    n = len(edge)
    model = cp_model.CpModel()
    successor = {a: b for a, b in zip(start, start[1:], strict=False)} | {start[-1]: n, n: start[0]}
    costs = np.round(np.minimum(edge, start_s) * (PATH_UNITS / start_s)).astype(np.int64)
    arcs = []
    for a in range(n + 1):
        for b in range(n + 1):
            if a != b and (n in (a, b) or edge[a, b] <= start_s):
                used = model.new_bool_var("")
                model.add_hint(used, bool(successor[a] == b))
                arcs.append((a, b, used))
    model.add_circuit(arcs)
    model.minimize(sum(int(costs[a, b]) * used for a, b, used in arcs if n not in (a, b)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # its own handler would leave Ctrl-C killing the process
    solver.parameters.max_deterministic_time = work
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    successor = {a: b for a, b, used in arcs if solver.value(used)}
    order = []
    vertex = successor[n]
    while vertex != n:
        order.append(vertex)
        vertex = successor[vertex]
    return order


def match_pipelines(problem: Problem, groups: np.ndarray) -> np.ndarray:
    """Placement [S, P] of groups [S, P] in this stage order: pipelines are numbered on the first group, and follow the
    optimal matching of each hop from there."""
    placement = np.array(groups, dtype=np.int64)
    for s in range(len(placement) - 1):
        _, match = bottleneck_matching(problem.pp_s[np.ix_(placement[s], placement[s + 1])])
        placement[s + 1] = placement[s + 1][match]
    return placement


def placement_of(problem: Problem, groups: np.ndarray, work: float = CIRCUIT_WORK) -> np.ndarray:
    """The cheapest placement [S, P] of a partition: compiled code gives the lengths of all hops, CP-SAT the route
    within its deterministic `work`, and OR-Tools' assignment the matching of each hop on the route. A search ends with
    it, so it does not wait for the compiler: interpreted, 64 devices take some hundredths of a second."""
    groups = np.asarray(groups, dtype=np.int64)
    return match_pipelines(problem, groups[open_path(at_once(hop_matrix)(problem.pp_s, groups), work)])
