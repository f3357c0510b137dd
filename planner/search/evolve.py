"""The paper's hybrid genetic algorithm (Sec. 3.4), also with Kernighan-Lin's gain as its baseline, and random search.

Compiled code screens offspring; what enters the population has been matched and routed by OR-Tools. The gains of the
local search are predictions; `evolve` therefore lets the best child of a brood settle by swaps that Eq. 1-4 score, and
settles every second newcomer on the softened cost first. `kl` is the baseline and does neither.
"""

import numpy as np
from ortools.graph.python import linear_sum_assignment

from planner.cost.communication import best_path, hop_matrix, partition_s
from planner.cost.compiled import generator
from planner.cost.ortools import placement_of
from planner.model.problem import Problem, placement_s
from planner.search.anneal import anneal
from planner.search.annealing_chains import cost_scale
from planner.search.cluster import interchangeable
from planner.search.crossover import breed, groups_of
from planner.search.gain import DTFM, KERNIGHAN_LIN
from planner.search.incumbent import Board
from planner.search.smooth import smooth

POPULATION = {DTFM: 24, KERNIGHAN_LIN: 64}
CHILDREN = 16
STALE_BROODS = {DTFM: 80, KERNIGHAN_LIN: 400}
EQUAL_S = 1e-9
SETTLE_MOVES = 2_500_000  # over the number of devices: some 50 ms at any size
SOFT_MOVES = 4
SETTLE_HEAT, SETTLE_COLD, SOFT_HEAT, SOFT_COLD = 0.004, 2e-4, 0.004, 4e-4  # temperatures, parts of the best cost
SETTLE_REORDER, SETTLE_RUNS = 0.01, 0.3


def renamed(one: np.ndarray, two: np.ndarray, n_groups: int) -> np.ndarray:
    """Label `two` with its groups renamed to overlap the groups of `one` most (an assignment problem)."""
    overlap = np.zeros((n_groups, n_groups), np.int64)
    np.add.at(overlap, (two, one), 1)
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    rows, columns = np.divmod(np.arange(n_groups * n_groups), n_groups)
    solver.add_arcs_with_cost(rows, columns, len(one) - overlap.ravel())
    if solver.solve() != solver.OPTIMAL:
        raise RuntimeError("a complete bipartite graph has a perfect matching")
    return np.array([solver.right_mate(k) for k in range(n_groups)])[two]


class Population:
    """Labels [N] with the cost of their matched and routed placements."""

    def __init__(self, problem: Problem, board: Board, size: int):
        self.problem, self.board, self.size = problem, board, size
        self.members: list[tuple[float, np.ndarray]] = []

    def enter(self, groups: np.ndarray) -> bool:
        """Match and route a partition, and put it in place of the worst member; false if it is not better."""
        placement = placement_of(self.problem, groups)
        cost_s = placement_s(self.problem, placement)
        self.board.offer(placement, cost_s)
        if not self.wants(cost_s):
            return False
        label = np.empty(placement.size, np.int64)
        label[placement] = np.arange(len(placement))[:, None]
        self.members = sorted([*self.members, (cost_s, label)], key=lambda member: member[0])[: self.size]
        return True

    def wants(self, cost_s: float) -> bool:
        if len(self.members) < self.size:
            return True
        return cost_s < self.members[-1][0] and all(abs(cost_s - kept_s) > EQUAL_S for kept_s, _ in self.members)


class Settling:
    """Swaps scored by Eq. 1-4 on whole plans, from a low temperature down."""

    def __init__(self, problem: Problem, board: Board, bits: np.ndarray):
        self.problem, self.board, self.bits = problem, board, bits
        self.kind_of = interchangeable(problem)
        self.n_moves = SETTLE_MOVES // problem.n_devices

    def settle(self, groups: np.ndarray) -> np.ndarray:
        """The best groups met on the way, in path order [S, P]."""
        problem = self.problem
        order = np.empty(problem.n_stages, np.int64)
        best_path(hop_matrix(problem.pp_s, groups), order)
        place = np.ascontiguousarray(groups[order])
        best = place.copy()
        hot_s, cold_s = (cost_scale(problem, self.board.best_s) * heat for heat in (SETTLE_HEAT, SETTLE_COLD))
        n_moves = self._count(self.n_moves)
        shares = SETTLE_REORDER, SETTLE_RUNS
        anneal(problem.dp_s, problem.pp_s, place, best, self.kind_of, self.bits, hot_s, cold_s, n_moves, *shares)
        return best

    def soften(self, groups: np.ndarray):
        """Settle `groups` in place on the softened cost, which ends as the true one."""
        problem = self.problem
        hot_s, cold_s = (cost_scale(problem, self.board.best_s) * heat for heat in (SOFT_HEAT, SOFT_COLD))
        n_moves = self._count(SOFT_MOVES * self.n_moves)
        ends = hot_s, cold_s, 1.0, 0.0
        smooth(problem.dp_s, problem.pp_s, groups, self.kind_of, self.bits, *ends, n_moves, SETTLE_RUNS)

    def _count(self, n_moves: int) -> int:
        """At most as many moves as evaluations are left, counted as such."""
        limit = self.board.limits.evaluations
        allowed = n_moves if limit is None else max(1, min(n_moves, limit - self.board.evaluations))
        self.board.count(allowed)
        return allowed


def evolve(problem: Problem, board: Board, seed: int, rule: int = DTFM, until_s: float = np.inf):
    """Run until the board is done, until_s has come or the evaluations are spent. A population that yields nothing
    new for a number of broods starts again from its best member."""
    rng, bits = np.random.default_rng(seed), generator(seed)
    n_groups = problem.n_stages
    population = Population(problem, board, POPULATION[rule])
    settling = Settling(problem, board, bits) if rule == DTFM else None
    best = np.empty(problem.n_devices, np.int64)
    stale = newcomers = 0
    while not _spent(board) and board.elapsed_s < until_s:
        if len(population.members) < population.size:
            population.enter(_newcomer(problem, rng, settling, newcomers % 2 == 1))
            newcomers += 1
            board.count(1)
            continue
        i, j = rng.choice(len(population.members), 2, replace=False)
        one, two = population.members[i][1], population.members[j][1]
        two = renamed(one, two, n_groups)
        cost_s = breed(problem.dp_s, problem.pp_s, one, two, n_groups, CHILDREN, rule, bits, best)
        board.count(CHILDREN)
        child = groups_of(best, n_groups)
        if settling is not None:
            child = settling.settle(child)
        stale += 1
        if (settling is not None or population.wants(cost_s)) and population.enter(child):
            stale = 0
        if stale == STALE_BROODS[rule]:
            del population.members[1:]
            stale = 0


def _newcomer(problem: Problem, rng: np.random.Generator, settling: Settling | None, soft: bool) -> np.ndarray:
    groups = rng.permutation(problem.n_devices).reshape(problem.n_stages, problem.n_pipelines)
    if settling is None:
        return groups
    if soft:
        settling.soften(groups)
    return settling.settle(groups)


def kernighan_lin(problem: Problem, board: Board, seed: int):
    """The same search with Kernighan and Lin's gain."""
    evolve(problem, board, seed, KERNIGHAN_LIN)


def random_search(problem: Problem, board: Board, seed: int):
    """Random partitions, each with its best order and matchings."""
    rng = np.random.default_rng(seed)
    shape = problem.n_stages, problem.n_pipelines
    while not _spent(board):
        groups = rng.permutation(problem.n_devices).reshape(shape)
        if partition_s(problem.dp_s, problem.pp_s, groups) < board.best_s:
            placement = placement_of(problem, groups)
            board.offer(placement, placement_s(problem, placement))
        board.count(1)


def _spent(board: Board) -> bool:
    limit = board.limits.evaluations
    return board.done or (limit is not None and board.evaluations >= limit)
