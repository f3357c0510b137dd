"""Compiled genetic operators on balanced partitions: five-point crossover, balance repair, circular local search.

A partition is a label [N] (device -> group) whose groups have equal sizes. The local search is that of DT-FM Sec. 3.4,
with the paper's gain or Kernighan-Lin's: a cycle moves one device from group to group until the group at which it began
gets one back, so sizes stay equal. Gains are predictions from the hop costs pp [N, N]; Eq. 1-4 score the result.
"""

from typing import NamedTuple

import numpy as np

from planner.cost.communication import partition_s
from planner.cost.compiled import below, compiled, copy_row

DTFM_GAIN, KERNIGHAN_LIN_GAIN = 0, 1
N_CUTS = 5
MAX_PASSES = 4

# ------------------------------------------------------------------------------------------------------- local search


class Pass(NamedTuple):
    """One pass of the local search over `label` [N]. size [S] counts the devices of each group, and sums [N, S] adds up
    the costs from each device to each group; locked [N] devices have moved and marked [S] groups were visited;
    `candidates` [N] is scratch; `gain_rule` is DTFM_GAIN or KERNIGHAN_LIN_GAIN."""

    pp: np.ndarray
    label: np.ndarray
    size: np.ndarray
    sums: np.ndarray
    locked: np.ndarray
    marked: np.ndarray
    candidates: np.ndarray
    gain_rule: int


@compiled
def gain_of(search, device, target):
    """Predicted saving of moving a device to the group `target`, one-sided."""
    pp = search.pp
    label = search.label
    total = search.sums[device, target]
    if search.gain_rule == KERNIGHAN_LIN_GAIN:
        return total - search.sums[device, label[device]]
    nearest = np.inf
    for x in range(label.shape[0]):
        if label[x] == label[device] and x != device:
            nearest = min(nearest, pp[device, x])
    if nearest == np.inf or search.size[target] == 0:
        return -np.inf
    return total / search.size[target] - nearest


@compiled
def _find_candidates(search, group):
    """Write the devices of a group that may move into search.candidates; returns their count. Under the paper's gain
    these are both ends of the group's fastest link, else all."""
    label = search.label
    locked = search.locked
    n = 0
    if search.gain_rule == KERNIGHAN_LIN_GAIN:
        for d in range(label.shape[0]):
            if label[d] == group and not locked[d]:
                search.candidates[n] = d
                n += 1
        return n
    low = np.inf
    one = -1
    two = -1
    for d in range(label.shape[0]):
        if label[d] == group:
            for x in range(d):
                if label[x] == group and search.pp[d, x] < low:
                    low = search.pp[d, x]
                    one = d
                    two = x
    for d in (one, two):
        if d >= 0 and not locked[d]:
            search.candidates[n] = d
            n += 1
    return n


@compiled
def _best_move(search, group, first):
    """(gain, device, target) of the best move out of a group, to an unmarked group or back to `first`."""
    best = -np.inf
    device = -1
    goal = -1
    for c in range(_find_candidates(search, group)):
        for k in range(search.size.shape[0]):
            if k != group and (not search.marked[k] or k == first):
                gain = gain_of(search, search.candidates[c], k)
                if gain > best:
                    best = gain
                    device = search.candidates[c]
                    goal = k
    return best, device, goal


@compiled
def move_device(search, device, target):
    source = search.label[device]
    for x in range(search.label.shape[0]):
        search.sums[x, source] -= search.pp[x, device]
        search.sums[x, target] += search.pp[x, device]
    search.size[source] -= 1
    search.size[target] += 1
    search.label[device] = target


@compiled
def _start_group(search):
    """The unmarked group with the best move out of it; -1 if there is none."""
    best = -np.inf
    first = -1
    for group in range(search.size.shape[0]):
        if not search.marked[group]:
            gain, device, _ = _best_move(search, group, -1)
            if device >= 0 and gain > best:
                best = gain
                first = group
    return first


@compiled
def _cycle(search, first):
    """Move devices along one cycle from the group `first`, and close it after the move with the largest predicted gain.
    Returns that gain, 0 if every move was undone."""
    S = search.size.shape[0]
    moved = np.empty(S + 1, np.int64)
    origin = np.empty(S + 1, np.int64)
    n = 0
    n_kept = -1
    best = 0.0
    total = 0.0
    group = first
    search.marked[first] = True
    while n <= S:
        gain, device, target = _best_move(search, group, first)
        if device < 0:
            break
        if group != first:
            closing = gain_of(search, device, first)
            if total + closing > best:
                best = total + closing
                n_kept = n
        moved[n] = device
        origin[n] = group
        n += 1
        total += gain
        move_device(search, device, target)
        search.locked[device] = True
        search.marked[target] = True
        group = target
        if group == first:
            break
    for t in range(n - 1, n_kept, -1):
        move_device(search, moved[t], origin[t])
    if n_kept >= 0:
        move_device(search, moved[n_kept], first)
    return best


@compiled
def count_sizes(label, size):
    """Write the number of devices of each group into size [S]."""
    for group in range(size.shape[0]):
        size[group] = 0
    for d in range(label.shape[0]):
        size[label[d]] += 1


@compiled
def improve_pass(pp, label, n_groups, gain_rule):
    """One pass of at most n_groups cycles over `label` [N], in place; the prefix of cycles with the largest predicted
    gain stays. Returns that gain."""
    n = label.shape[0]
    size = np.empty(n_groups, np.int64)
    count_sizes(label, size)
    locked = np.empty(n, np.bool_)
    marked = np.empty(n_groups, np.bool_)
    for d in range(n):
        locked[d] = False
    for group in range(n_groups):
        marked[group] = False
    sums = np.zeros((n, n_groups))
    for d in range(n):
        for x in range(n):
            sums[d, label[x]] += pp[d, x]
    search = Pass(pp, label, size, sums, locked, marked, np.empty(n, np.int64), gain_rule)
    best_label = np.empty(n, np.int64)
    copy_row(label, best_label)
    best = 0.0
    total = 0.0
    for _ in range(n_groups):
        first = _start_group(search)
        if first < 0:
            break
        total += _cycle(search, first)
        if total > best + 1e-12:
            best = total
            copy_row(label, best_label)
    copy_row(best_label, label)
    return best


# ---------------------------------------------------------------------------------------------------------- offspring


class Offspring(NamedTuple):
    """The number of groups of a child, the number of children of two parents, and the gain rule of local search."""

    n_groups: int
    n_children: int
    gain_rule: int


@compiled
def cross(one, two, rng):
    """Labels [N] taken in turns from two parents, between five random cut points of the device order."""
    n = one.shape[0]
    switch = np.empty(n, np.bool_)
    for d in range(n):
        switch[d] = False
    for _ in range(N_CUTS):
        cut = below(rng, n)
        switch[cut] = not switch[cut]
    child = np.empty(n, np.int64)
    from_one = below(rng, np.int64(2)) == 0
    for d in range(n):
        if switch[d]:
            from_one = not from_one
        child[d] = one[d] if from_one else two[d]
    return child


@compiled
def repair(label, n_groups, rng):
    """Move random devices of groups that have too many to random groups that have too few, in place."""
    size = label.shape[0] // n_groups
    sizes = np.empty(n_groups, np.int64)
    count_sizes(label, sizes)
    start = below(rng, label.shape[0])
    stride = label.shape[0] + 1
    for step in range(label.shape[0]):
        d = (start + step * stride) % label.shape[0]
        if sizes[label[d]] <= size:
            continue
        target = below(rng, n_groups)
        while sizes[target] >= size:
            target = (target + 1) % n_groups
        sizes[label[d]] -= 1
        sizes[target] += 1
        label[d] = target


@compiled
def groups_of(label, n_groups):
    """Groups [S, P] of a balanced label [N]."""
    size = label.shape[0] // n_groups
    groups = np.empty((n_groups, size), np.int64)
    filled = np.empty(n_groups, np.int64)
    for k in range(n_groups):
        filled[k] = 0
    for d in range(label.shape[0]):
        k = label[d]
        groups[k, filled[k]] = d
        filled[k] += 1
    return groups


@compiled
def best_child(dp, pp, parents, offspring, rng, best_label):
    """The cheapest child of two parents' labels [2, N], each child before or after its local search, whichever costs
    less. `best_label` [N] receives it. Returns (its cost by Eq. 1-4, how many partitions were scored)."""
    n_groups = offspring.n_groups
    best = np.inf
    n_scored = 0
    for _ in range(offspring.n_children):
        child = cross(parents[0], parents[1], rng)
        repair(child, n_groups, rng)
        cost = partition_s(dp, pp, groups_of(child, n_groups))
        n_scored += 1
        for _ in range(MAX_PASSES):
            trial = np.empty(child.shape[0], np.int64)
            copy_row(child, trial)
            if improve_pass(pp, trial, n_groups, offspring.gain_rule) <= 0:
                break
            trial_cost = partition_s(dp, pp, groups_of(trial, n_groups))
            n_scored += 1
            if trial_cost >= cost:
                break
            child = trial
            cost = trial_cost
        if cost < best:
            best = cost
            copy_row(child, best_label)
    return best, n_scored
