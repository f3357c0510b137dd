"""The paper's hybrid genetic algorithm (Sec. 3.4), also with Kernighan-Lin's gain as its baseline, and random search.

Compiled code screens offspring; what enters the population has been matched and routed by OR-Tools.
"""

import numpy as np
from ortools.graph.python import linear_sum_assignment

from planner.assign import placement_of
from planner.board import Board
from planner.breed import breed, groups_of
from planner.compiled import generator
from planner.cost import partition_s
from planner.gain import DTFM, KERNIGHAN_LIN
from planner.problem import Problem, placement_s

POPULATION = 64
CHILDREN = 16
STALE_BROODS = 400
EQUAL_S = 1e-9


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

    def __init__(self, problem: Problem, board: Board):
        self.problem, self.board = problem, board
        self.members: list[tuple[float, np.ndarray]] = []

    def enter(self, label: np.ndarray):
        """Match and route a partition, and put it in place of the worst member."""
        placement = placement_of(self.problem, groups_of(label, self.problem.n_stages))
        cost_s = placement_s(self.problem, placement)
        self.board.offer(placement, cost_s)
        self.members = sorted([*self.members, (cost_s, label)], key=lambda member: member[0])[:POPULATION]

    def wants(self, cost_s: float) -> bool:
        return cost_s < self.members[-1][0] and all(abs(cost_s - kept_s) > EQUAL_S for kept_s, _ in self.members)


def evolve(problem: Problem, board: Board, seed: int, rule: int = DTFM):
    """Run until the board is done or its evaluations are spent. A population that yields nothing new for STALE_BROODS
    broods starts again from its best member."""
    rng, bits = np.random.default_rng(seed), generator(seed)
    size = problem.n_stages, problem.n_pipelines
    population = Population(problem, board)
    best = np.empty(problem.n_devices, np.int64)
    labels = np.repeat(np.arange(size[0]), size[1])
    stale = 0
    while not _spent(board):
        if len(population.members) < POPULATION:
            population.enter(rng.permutation(labels))
            board.count(1)
            continue
        i, j = rng.choice(len(population.members), 2, replace=False)
        one, two = population.members[i][1], population.members[j][1]
        two = renamed(one, two, size[0])
        cost_s = breed(problem.dp_s, problem.pp_s, one, two, size[0], CHILDREN, rule, bits, best)
        board.count(CHILDREN)
        stale += 1
        if population.wants(cost_s):
            population.enter(best.copy())
            stale = 0
        if stale == STALE_BROODS:
            del population.members[1:]
            stale = 0


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
