"""DT-FM's search as published, with the paper's gain (`dtfm`) or the published Kernighan-Lin baseline (`dtfm_kl`).

Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments", NeurIPS 2022, Sec. 3.4, and
where the paper is silent its public code (DS3Lab/DT-FM at cda948f), rewritten from the facts. A population of 100
random partitions; an offspring is one parent with the labels of five random devices from another; surplus devices, in
order of index, go to the first group with room; one pass of the circular local search; Eq. 1-4 score the result. It
takes the place of the worse parent if it costs no more than the first one, else it is dropped.

Kept from the code: a group's candidate is one end of its fastest link, any group may be the target of a move, the last
cycle of a pass is never kept. Left out: the limit of 5,000 candidates (the budget decides), and the matchings of the
failing threshold step, which the code emits (`solve` emits the best ones). Compiled, where the code is Python: it
scores some hundred times as many candidates a second.
"""

from typing import NamedTuple

import numpy as np

from planner.cost.compiled import below, compiled, copy_row, generator
from planner.model.problem import Problem
from planner.search.base import SolverEntry
from planner.search.baselines.partitions import score
from planner.search.crossover import DTFM_GAIN, KERNIGHAN_LIN_GAIN, count_sizes, groups_of
from planner.search.incumbent import Incumbent

POPULATION = 100
N_COPIED = 5
NAMES = {DTFM_GAIN: "dtfm", KERNIGHAN_LIN_GAIN: "dtfm_kl"}


class Moves(NamedTuple):
    """The best move out of each group: `gain` [S, S] by group and target, -inf where no device may move; the largest
    gain of each group, best [S], its device [S] (-1: none) and target [S]. value [S] is scratch."""

    gain: np.ndarray
    best: np.ndarray
    device: np.ndarray
    target: np.ndarray
    value: np.ndarray


@compiled
def _add_device(weights, label, size, gain_rule, moves, d):
    """Let device d compete for the best moves out of its group."""
    own = label[d]
    for k in range(size.shape[0]):
        moves.value[k] = 0.0
    nearest = np.inf
    for x in range(label.shape[0]):
        if x != d:
            moves.value[label[x]] += weights[d, x]
            if label[x] == own:
                nearest = min(nearest, weights[d, x])
    for k in range(size.shape[0]):
        if k == own:
            continue
        gain = moves.value[k] - moves.value[own]
        if gain_rule == DTFM_GAIN:
            gain = moves.value[k] / max(size[k], 1) - nearest
        moves.gain[own, k] = max(moves.gain[own, k], gain)
        if gain > moves.best[own]:
            moves.best[own] = gain
            moves.device[own] = d
            moves.target[own] = k


@compiled
def _find_moves(weights, label, locked, gain_rule, moves):
    """Fill `moves`. Under the paper's gain a group's only candidate is the unlocked device with the group's fastest
    inner link, the first of equal ones."""
    S = moves.best.shape[0]
    size = np.empty(S, np.int64)
    count_sizes(label, size)
    candidate = np.empty(S, np.int64)
    nearest = np.empty(S)
    for k in range(S):
        moves.best[k] = -np.inf
        moves.device[k] = -1
        candidate[k] = -1
        nearest[k] = np.inf
        for other in range(S):
            moves.gain[k, other] = -np.inf
    for d in range(label.shape[0]):
        if locked[d]:
            continue
        if gain_rule == KERNIGHAN_LIN_GAIN:
            _add_device(weights, label, size, gain_rule, moves, d)
            continue
        for x in range(label.shape[0]):
            if x != d and label[x] == label[d] and weights[d, x] < nearest[label[d]]:
                nearest[label[d]] = weights[d, x]
                candidate[label[d]] = d
    for k in range(S):
        if candidate[k] >= 0:
            _add_device(weights, label, size, gain_rule, moves, candidate[k])


@compiled
def _cycle(weights, label, locked, marked, gain_rule, moves):
    """Move devices along one cycle over `label` [N], in place, and close it after the move with the largest sum of
    gains. Returns that sum, 0 if the cycle was undone; -1 if no device may move."""
    n_devices = label.shape[0]
    moved = np.empty(n_devices, np.int64)
    origin = np.empty(n_devices, np.int64)
    _find_moves(weights, label, locked, gain_rule, moves)
    first = np.argmax(moves.best)
    if moves.device[first] < 0:
        return -1.0
    group = first
    n = 0
    n_kept = 0
    best = 0.0
    total = 0.0
    while n < n_devices:
        d = moves.device[group]
        target = moves.target[group]
        if d < 0:
            d = moved[n - 1]
            target = first
        if n > 0 and total + moves.gain[group, first] > best:
            best = total + moves.gain[group, first]
            n_kept = n
        moved[n] = d
        origin[n] = group
        total += moves.best[group]
        label[d] = target
        locked[d] = True
        marked[target] = True
        n += 1
        group = target
        if group == first:
            break
        _find_moves(weights, label, locked, gain_rule, moves)
    for t in range(n - 1, n_kept, -1):
        label[moved[t]] = origin[t]
    label[moved[n_kept]] = first
    return best


@compiled
def improve_as_published(weights, label, n_groups, gain_rule):
    """One pass of cycles over `label` [N], in place: the prefix with the largest sum of gains stays, without the last
    cycle."""
    n_devices = label.shape[0]
    moves = Moves(
        np.empty((n_groups, n_groups)),
        np.empty(n_groups),
        np.empty(n_groups, np.int64),
        np.empty(n_groups, np.int64),
        np.empty(n_groups),
    )
    locked = np.zeros(n_devices, np.bool_)
    marked = np.zeros(n_groups, np.bool_)
    best_label = np.empty(n_devices, np.int64)
    copy_row(label, best_label)
    best = 0.0
    total = 0.0
    for _ in range(n_groups):
        if total > best:  # known not to be the last cycle
            best = total
            copy_row(label, best_label)
        gain = _cycle(weights, label, locked, marked, gain_rule, moves)
        if gain < 0 or marked.all():
            break
        total += gain
    copy_row(best_label, label)


@compiled
def _copy_labels(one, two, rng):
    """Parent `two` [N] with the labels that five random devices have in parent `one`."""
    n = one.shape[0]
    child = np.empty(n, np.int64)
    copy_row(two, child)
    order = np.arange(n)
    for i in range(min(N_COPIED, n)):
        j = i + below(rng, n - i)
        order[i], order[j] = order[j], order[i]
        child[order[i]] = one[order[i]]
    return child


@compiled
def _repair_in_order(label, n_groups):
    """Move devices of groups that have too many, in order of index, to the first group with room, in place."""
    most = label.shape[0] // n_groups
    size = np.empty(n_groups, np.int64)
    count_sizes(label, size)
    for d in range(label.shape[0]):
        if size[label[d]] > most:
            target = 0
            while size[target] >= most:
                target += 1
            size[label[d]] -= 1
            size[target] += 1
            label[d] = target


@compiled
def offspring(weights, one, two, rng, n_groups, gain_rule):
    """The label [N] of an offspring of two parents, after its local search."""
    child = _copy_labels(one, two, rng)
    _repair_in_order(child, n_groups)
    improve_as_published(weights, child, n_groups, gain_rule)
    return child


def weights_of(problem: Problem, gain_rule: int) -> np.ndarray:
    """The weights that the gain adds up over pairs of devices, [N, N]: the cost of a pair in a hop, or in the baseline
    the same less the exchange of all gradients. That leaves (c_pp - c_dp) / beta, up to a factor that does not change
    the order of gains."""
    if gain_rule == DTFM_GAIN:
        return problem.pp_s
    sign = np.sign(problem.c_pp_bytes - problem.c_dp_bytes)
    is_link = problem.pp_s < problem.missing_s
    return sign * np.where(is_link, np.abs(problem.pp_s - problem.dp_s), problem.missing_s)


def search_as_published(problem: Problem, incumbent: Incumbent, seed: int, gain_rule: int):
    """See the head of this file. gain_rule is DTFM_GAIN or KERNIGHAN_LIN_GAIN."""
    rng = np.random.default_rng(seed)
    bits = generator(seed)
    weights = weights_of(problem, gain_rule)
    labels: list[np.ndarray] = []
    costs_s: list[float] = []
    S = problem.n_stages
    while not incumbent.spent:
        if len(labels) < POPULATION:
            label = rng.permutation(np.repeat(np.arange(S), problem.n_pipelines))
            costs_s.append(score(problem, incumbent, groups_of(label, S), by=NAMES[gain_rule]))
            labels.append(label)
            continue
        one, two = rng.integers(POPULATION, size=2)
        child = offspring(weights, labels[one], labels[two], bits, S, gain_rule)
        cost_s = score(problem, incumbent, groups_of(child, S), by=NAMES[gain_rule])
        if cost_s <= costs_s[one]:
            worse = one if costs_s[one] > costs_s[two] else two
            labels[worse], costs_s[worse] = child, cost_s


def dtfm(problem: Problem, incumbent: Incumbent, seed: int):
    search_as_published(problem, incumbent, seed, DTFM_GAIN)


def dtfm_kl(problem: Problem, incumbent: Incumbent, seed: int):
    search_as_published(problem, incumbent, seed, KERNIGHAN_LIN_GAIN)


ENTRY = SolverEntry(dtfm)
KERNIGHAN_LIN_ENTRY = SolverEntry(dtfm_kl)
