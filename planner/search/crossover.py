"""Compiled offspring of two partitions: five-point crossover, balance repair, local search, score."""

import numpy as np

from planner.cost.communication import partition_s
from planner.cost.compiled import below, compiled
from planner.search.gain import improve_pass

N_CUTS = 5
MAX_PASSES = 4


@compiled
def cross(one, two, rng):
    """Labels [N] taken in turns from two parents, between five random cut points of the device order."""
    n = one.shape[0]
    switch = np.zeros(n, np.bool_)
    for _ in range(N_CUTS):
        cut = below(rng, n)
        switch[cut] = not switch[cut]
    child = np.empty(n, np.int64)
    from_one = below(rng, 2) == 0
    for d in range(n):
        if switch[d]:
            from_one = not from_one
        child[d] = one[d] if from_one else two[d]
    return child


@compiled
def repair(label, n_groups, rng):
    """Move random devices of groups that have too many to random groups that have too few, in place."""
    size = label.shape[0] // n_groups
    sizes = np.zeros(n_groups, np.int64)
    for d in range(label.shape[0]):
        sizes[label[d]] += 1
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
    filled = np.zeros(n_groups, np.int64)
    for d in range(label.shape[0]):
        k = label[d]
        groups[k, filled[k]] = d
        filled[k] += 1
    return groups


@compiled
def breed(dp, pp, one, two, n_groups, n_children, rule, rng, best_label):
    """Best of n_children offspring of two parents' labels, each kept before or after local search, whichever costs
    less. `best_label` [N] receives it. Returns its cost by Eq. 1-4."""
    best = np.inf
    for _ in range(n_children):
        child = cross(one, two, rng)
        repair(child, n_groups, rng)
        cost = partition_s(dp, pp, groups_of(child, n_groups))
        for _ in range(MAX_PASSES):
            trial = child.copy()
            if improve_pass(pp, trial, n_groups, rule) <= 0:
                break
            trial_cost = partition_s(dp, pp, groups_of(trial, n_groups))
            if trial_cost >= cost:
                break
            child, cost = trial, trial_cost
        if cost < best:
            best = cost
            best_label[:] = child
    return best
