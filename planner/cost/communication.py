"""Compiled cost of a partition (DT-FM Eq. 1-4): best matchings, best stage order."""

import numpy as np

from planner.cost.compiled import compiled
from planner.cost.matching import improve, lower_bound
from planner.search.anneal import sum_exchanges

EXACT_PATH_STAGES = 12


@compiled
def hop_s(pp, left, right, work, match):
    """edge(j, k) of Eq. 3 for two stages' devices [P]; `match` receives the matching left slot -> right slot."""
    n = left.shape[0]
    for a in range(n):
        match[a] = a
    return improve(pp, left, right, n, match, lower_bound(pp, left, right, n), work)


@compiled
def hop_matrix(pp, groups):
    """edge(j, k) for all pairs of groups [S, P] -> [S, S]."""
    S, P = groups.shape
    edge = np.zeros((S, S))
    work = np.empty((5, P), np.int64)
    match = np.empty(P, np.int64)
    for j in range(S):
        for k in range(j):
            edge[j, k] = edge[k, j] = hop_s(pp, groups[j], groups[k], work, match)
    return edge


@compiled
def held_karp(edge, order):
    """Shortest open path through all S vertices (Eq. 4), exact in O(S^2 2^S); `order` [S] receives it."""
    S = edge.shape[0]
    best = np.full((1 << S, S), np.inf)
    came = np.full((1 << S, S), -1, np.int64)
    for k in range(S):
        best[1 << k, k] = 0.0
    for used in range(1, 1 << S):
        for k in range(S):
            if best[used, k] == np.inf:
                continue
            for j in range(S):
                if used >> j & 1 == 0:
                    cost = best[used, k] + edge[k, j]
                    if cost < best[used | 1 << j, j]:
                        best[used | 1 << j, j] = cost
                        came[used | 1 << j, j] = k
    used = (1 << S) - 1
    last = np.argmin(best[used])
    total = best[used, last]
    for s in range(S - 1, -1, -1):
        order[s] = last
        last, used = came[used, last], used & ~(1 << last)
    return total


@compiled
def path_s(edge, order):
    total = 0.0
    for s in range(order.shape[0] - 1):
        total += edge[order[s], order[s + 1]]
    return total


@compiled
def short_path(edge, order):
    """A short open path by nearest neighbour from every start, then 2-opt and single moves; for many stages."""
    S = edge.shape[0]
    best = np.inf
    trial = np.empty(S, np.int64)
    for start in range(S):
        left = np.ones(S, np.bool_)
        trial[0] = start
        left[start] = False
        for s in range(1, S):
            nearest = -1
            for j in range(S):
                if left[j] and (nearest < 0 or edge[trial[s - 1], j] < edge[trial[s - 1], nearest]):
                    nearest = j
            trial[s] = nearest
            left[nearest] = False
        total = path_s(edge, trial)
        if total < best:
            best = total
            order[:] = trial
    improved = True
    while improved:
        improved = False
        for i in range(S):
            for j in range(S):
                for reverse in range(2):
                    if i == j or (reverse and i > j):
                        continue
                    _rearrange(order, trial, i, j, reverse)
                    total = path_s(edge, trial)
                    if total < best - 1e-9:
                        best = total
                        order[:] = trial
                        improved = True
    return best


@compiled
def _rearrange(order, trial, i, j, reverse):
    """trial = order with positions i..j reversed, or with position i moved to j."""
    trial[:] = order
    if reverse:
        for s in range(i, j + 1):
            trial[s] = order[i + j - s]
        return
    step = 1 if j > i else -1
    for s in range(i, j, step):
        trial[s] = order[s + step]
    trial[j] = order[i]


@compiled
def best_path(edge, order):
    """Path of Eq. 4: exact up to 12 stages, a good one beyond."""
    if edge.shape[0] <= EXACT_PATH_STAGES:
        return held_karp(edge, order)
    return short_path(edge, order)


@compiled
def datap_s(dp, groups):
    """DATAP of Eq. 2 for groups [S, P]."""
    worst = 0.0
    sums = np.empty(groups.shape[1])
    for s in range(groups.shape[0]):
        worst = max(worst, sum_exchanges(dp, groups[s], sums))
    return worst


@compiled
def partition_s(dp, pp, groups):
    """COMM-COST of Eq. 1 for groups [S, P] under their best order and matchings (order exact to 12 stages)."""
    order = np.empty(groups.shape[0], np.int64)
    return datap_s(dp, groups) + best_path(hop_matrix(pp, groups), order)
