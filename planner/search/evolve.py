"""The genetic algorithm of DT-FM Sec. 3.4 with annealing, and the paper's gain (`evolve`) or Kernighan-Lin's (`kl`).

Compiled code breeds children and screens them by Eq. 1-4. Those that pass become members: CP-SAT routes the stages (Eq.
4), OR-Tools' assignment matches the devices of each hop on that route (Eq. 3), and a member's cost is that of the route
and the matchings which they found. The gains of the local search are predictions. The best child of two parents is
therefore refined by swaps that Eq. 1-4 score, and every second random member on the softened cost before that.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.graph.python import linear_sum_assignment

from planner.cost.communication import best_path, hop_matrix, partition_s
from planner.cost.compiled import generator
from planner.cost.placement import placement_of
from planner.model.problem import Problem, placement_s
from planner.search.anneal import (
    Cooling,
    MoveShares,
    Softness,
    anneal,
    anneal_softened,
    cost_scale_s,
    devices_of,
    soft_walk_from,
    walk_from,
)
from planner.search.base import SolverEntry
from planner.search.charges import NOTHING
from planner.search.crossover import DTFM_GAIN, KERNIGHAN_LIN_GAIN, Offspring, best_child, groups_of
from planner.search.incumbent import Incumbent, Share

N_CHILDREN = 16
EQUAL_S = 1e-9
MEMBER_WORK = 0.02  # CP-SAT's deterministic time for the route of a member: 12 stages need less, 32 take some 0.1 s
MOVES_PER_DEVICE = 600  # of a refinement, as long as that takes less than some 50 ms:
REFINE_MOVES = 2_500_000  # over the number of devices
SOFTENED_MOVES = 4  # times the moves of a refinement
REFINE_HOT, REFINE_COLD = 0.004, 2e-4  # temperatures, as parts of the best cost
SOFTENED_HOT, SOFTENED_COLD = 0.004, 4e-4
REFINE_SHARES = MoveShares(reorder=0.01, runs=0.3)


@dataclass(frozen=True)
class Genetic:
    """A variant of the algorithm: the gain of its local search, whether it refines by annealing, the members of its
    population, and the crossovers without a new member after which it starts again."""

    name: str
    gain_rule: int
    annealed: bool = True
    population: int = 24
    stale_limit: int = 80


EVOLVE = Genetic("evolve", DTFM_GAIN)
KERNIGHAN_LIN = Genetic("kl", KERNIGHAN_LIN_GAIN)


def relabelled(one: np.ndarray, two: np.ndarray, n_groups: int) -> np.ndarray:
    """Label `two` with its groups renamed so that they overlap the groups of `one` most (an assignment problem)."""
    overlap = np.zeros((n_groups, n_groups), np.int64)
    np.add.at(overlap, (two, one), 1)
    solver = linear_sum_assignment.SimpleLinearSumAssignment()
    rows, columns = np.divmod(np.arange(n_groups * n_groups), n_groups)
    costs = len(one) - overlap.ravel()
    solver.add_arcs_with_cost(rows, columns, costs)  # pyright: ignore[reportArgumentType]  # OR-Tools' stub swaps shape and type
    if solver.solve() != solver.OPTIMAL:
        raise RuntimeError("a complete bipartite graph has a perfect matching")
    return np.array([solver.right_mate(k) for k in range(n_groups)])[two]


class Population:
    """Labels [N] with the cost of their matched and routed placements, best first."""

    def __init__(self, problem: Problem, share: Share, variant: Genetic):
        self.problem = problem
        self.share = share
        self.size = variant.population
        self.name = variant.name
        self.members: list[tuple[float, np.ndarray]] = []

    @property
    def full(self) -> bool:
        return len(self.members) >= self.size

    @property
    def best_s(self) -> float:
        return self.members[0][0] if self.members else np.inf

    def insert(self, groups: np.ndarray) -> bool:
        """Route and match a partition [S, P] that compiled code has found acceptable, and put it in place of the worst
        member; false if it is not better. The order in which its groups come means nothing: they are sorted by their
        first devices, so that the route is CP-SAT's and depends on the partition alone."""
        if not self.accepts(partition_s(self.problem.dp_s, self.problem.pp_s, groups)):
            return False
        partition = groups[np.argsort(groups.min(axis=1))]
        placement = placement_of(self.problem, partition, MEMBER_WORK)
        cost_s = placement_s(self.problem, placement)
        self.share.incumbent.offer(placement, cost_s, self.share.source, by=self.name)
        if not self.accepts(cost_s):
            return False
        label = np.empty(placement.size, np.int64)
        label[placement] = np.arange(len(placement))[:, None]
        self.members = sorted([*self.members, (cost_s, label)], key=lambda member: member[0])[: self.size]
        return True

    def accepts(self, cost_s: float) -> bool:
        if not self.full:
            return True
        return cost_s < self.members[-1][0] and all(abs(cost_s - other_s) > EQUAL_S for other_s, _ in self.members)

    def parents(self, rng: np.random.Generator) -> np.ndarray:
        """Labels [2, N] of two random members, the second with the group names of the first."""
        i, j = rng.choice(len(self.members), 2, replace=False)
        one = self.members[i][1]
        return np.stack([one, relabelled(one, self.members[j][1], self.problem.n_stages)])


class Refinement:
    """Annealing of whole plans from a low temperature down, counted as evaluations."""

    def __init__(self, problem: Problem, population: Population, bits: np.ndarray):
        self.problem = problem
        self.population = population
        self.bits = bits
        self.devices = devices_of(problem)
        self.n_moves = min(MOVES_PER_DEVICE * problem.n_devices, REFINE_MOVES // problem.n_devices)

    def refine(self, groups: np.ndarray) -> np.ndarray:
        """The best groups met on the way, in path order [S, P]."""
        order = np.empty(self.problem.n_stages, np.int64)
        best_path(hop_matrix(self.problem.pp_s, groups), order)
        walk = walk_from(np.ascontiguousarray(groups[order]), self.problem.n_devices)
        cooling = self._cooling(REFINE_HOT, REFINE_COLD, self.n_moves)
        anneal(self.devices, walk, NOTHING, self.bits, cooling, REFINE_SHARES)
        return walk.best

    def refine_softened(self, groups: np.ndarray):
        """Refine `groups` in place on the softened cost, which ends as the true one."""
        cooling = self._cooling(SOFTENED_HOT, SOFTENED_COLD, SOFTENED_MOVES * self.n_moves)
        walk = soft_walk_from(groups)
        anneal_softened(self.devices, walk, self.bits, cooling, Softness(1.0, 0.0), REFINE_SHARES.runs)

    def _cooling(self, hot: float, cold: float, n_moves: int) -> Cooling:
        """A cooling with at most as many moves as evaluations are left; they are counted."""
        scale_s = cost_scale_s(self.problem, self.population.best_s)
        allowed = max(1, int(min(n_moves, self.population.share.left)))
        self.population.share.count(allowed)
        return Cooling(scale_s * hot, scale_s * cold, allowed)


def evolve(
    problem: Problem,
    share: Share,
    seed: int,
    variant: Genetic = EVOLVE,
    starts: Sequence[np.ndarray] = (),
) -> list[tuple[float, np.ndarray]]:
    """Fill the population with the partitions `starts` [S, P] and random members, then cross over, until the share is
    spent. A population that gains no member for `stale_limit` crossovers starts again from its best one. Returns the
    last population as (cost, groups), best first."""
    rng = np.random.default_rng(seed)
    bits = generator(seed)
    offspring = Offspring(problem.n_stages, N_CHILDREN, variant.gain_rule)
    population = Population(problem, share, variant)
    for groups in starts:
        population.insert(groups)
    refinement = Refinement(problem, population, bits) if variant.annealed else None
    best_label = np.empty(problem.n_devices, np.int64)
    n_stale = 0
    n_random = 0
    while not share.spent:
        if not population.full:
            population.insert(_random_member(problem, rng, refinement, n_random % 2 == 1))
            n_random += 1
            share.count(1)
            continue
        parents = population.parents(rng)
        _, n_scored = best_child(problem.dp_s, problem.pp_s, parents, offspring, bits, best_label)
        share.count(n_scored)
        child = groups_of(best_label, problem.n_stages)
        if refinement is not None:
            child = refinement.refine(child)
        n_stale += 1
        if population.insert(child):
            n_stale = 0
        if n_stale == variant.stale_limit:
            del population.members[1:]
            n_stale = 0
    return [(cost_s, groups_of(label, problem.n_stages)) for cost_s, label in population.members]


def solve_by(variant: Genetic, problem: Problem, incumbent: Incumbent, seed: int):
    """Give the whole budget to one variant of the algorithm."""
    evolve(problem, Share(incumbent, evaluations=incumbent.budget.evaluations), seed, variant)


def _random_member(
    problem: Problem, rng: np.random.Generator, refinement: Refinement | None, softened: bool
) -> np.ndarray:
    groups = rng.permutation(problem.n_devices).reshape(problem.n_stages, problem.n_pipelines)
    if refinement is None:
        return groups
    if softened:
        refinement.refine_softened(groups)
    return refinement.refine(groups)


def compile_evolve():
    """Compile the kernels of `evolve` that annealing has not, or read them from the cache."""
    offspring = Offspring(2, 1, DTFM_GAIN)
    parents = np.array([[0, 0, 1, 1], [0, 1, 0, 1]])
    label = np.empty(4, np.int64)
    best_child(np.zeros((4, 4)), np.zeros((4, 4)), parents, offspring, generator(0), label)
    groups = groups_of(label, 2)
    best_path(hop_matrix(np.zeros((4, 4)), groups), label[:2])
    partition_s(np.zeros((4, 4)), np.zeros((4, 4)), groups)


ENTRY = SolverEntry(functools.partial(solve_by, EVOLVE))
KERNIGHAN_LIN_ENTRY = SolverEntry(functools.partial(solve_by, KERNIGHAN_LIN))
