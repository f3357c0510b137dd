"""The compiled cost of a partition (DT-FM Eq. 1-4): best matchings, best stage order.

A partition is groups [S, P] of device indices. S stages, P pipelines, N = S * P devices; dp and pp are the matrices
dp_s and pp_s [N, N] of a Problem.
"""

from typing import NamedTuple

import numpy as np

from planner.cost.compiled import compiled, copy_row

EXACT_PATH_STAGES = 12

# ------------------------------------------------------------------------------------- Eq. 2: exchange inside a stage


@compiled
def sum_exchanges(dp, row, sums):
    """DATAP(C_j) of Eq. 2 for the devices in row [P]; `sums` receives each device's part."""
    worst = 0.0
    for a in range(row.shape[0]):
        sums[a] = 0.0
        for b in range(row.shape[0]):
            sums[a] += dp[row[a], row[b]]
        worst = max(worst, sums[a])
    return worst


@compiled
def datap_s(dp, groups):
    """DATAP of Eq. 2 for groups [S, P]."""
    worst = 0.0
    sums = np.empty(groups.shape[1])
    for s in range(groups.shape[0]):
        worst = max(worst, sum_exchanges(dp, groups[s], sums))
    return worst


# ------------------------------------------------------------------------ Eq. 3: bottleneck matching of two stages


class MatchingScratch(NamedTuple):
    """Arrays int64 [P] that matchings overwrite: the matching of `hop_s`; the one that `improve_matching` tries and its
    inverse; of a breadth-first search the columns seen, the queue of rows, and the row that led to each column."""

    match: np.ndarray
    trial: np.ndarray
    inverse: np.ndarray
    seen: np.ndarray
    queue: np.ndarray
    parent: np.ndarray


@compiled
def matching_scratch(n):
    rows = np.empty((6, n), np.int64)
    return MatchingScratch(rows[0], rows[1], rows[2], rows[3], rows[4], rows[5])


@compiled
def matching_floor(pp, left, right):
    """A lower bound: every device is matched, so no matching beats the largest of all row and column minima."""
    best = 0.0
    for a in range(left.shape[0]):
        low_row = pp[left[a], right[0]]
        low_col = pp[left[0], right[a]]
        for b in range(1, left.shape[0]):
            low_row = min(low_row, pp[left[a], right[b]])
            low_col = min(low_col, pp[left[b], right[a]])
        best = max(best, low_row, low_col)
    return best


@compiled
def _augment(pp, left, right, limit, start, scratch):
    """Give row `start` a partner over weights < limit by one alternating path (breadth first); false if none."""
    _, match, inverse, seen, queue, parent = scratch
    for b in range(left.shape[0]):
        seen[b] = 0
    queue[0] = start
    head = 0
    tail = 1
    while head < tail:
        a = queue[head]
        head += 1
        for b in range(left.shape[0]):
            if seen[b] or pp[left[a], right[b]] >= limit:
                continue
            seen[b] = 1
            parent[b] = a
            if inverse[b] < 0:
                while True:
                    a = parent[b]
                    previous = match[a]
                    match[a] = b
                    inverse[b] = a
                    if a == start:
                        return True
                    b = previous
            queue[tail] = inverse[b]
            tail += 1
    return False


@compiled
def improve_matching(pp, left, right, match, floor, scratch):
    """Lower the bottleneck of the perfect matching `match` (row -> column) to the optimum, or to `floor`, a known
    lower bound. Returns the bottleneck; `match` attains it."""
    n = left.shape[0]
    trial = scratch.trial
    inverse = scratch.inverse
    worst = 0.0
    for a in range(n):
        worst = max(worst, pp[left[a], right[match[a]]])
    while worst > floor:
        for a in range(n):
            trial[a] = match[a]
            inverse[match[a]] = a
        for a in range(n):
            if pp[left[a], right[trial[a]]] >= worst:
                inverse[trial[a]] = -1
                trial[a] = -1
        for a in range(n):
            if trial[a] < 0 and not _augment(pp, left, right, worst, a, scratch):
                return worst
        worst = 0.0
        for a in range(n):
            match[a] = trial[a]
            worst = max(worst, pp[left[a], right[match[a]]])
    return worst


@compiled
def hop_s(pp, left, right, scratch):
    """edge(j, k) of Eq. 3 for two stages' devices [P]."""
    for a in range(left.shape[0]):
        scratch.match[a] = a
    return improve_matching(pp, left, right, scratch.match, matching_floor(pp, left, right), scratch)


@compiled
def hop_matrix(pp, groups):
    """edge(j, k) for all pairs of groups [S, P] -> [S, S]."""
    S, P = groups.shape
    edge = np.empty((S, S))
    scratch = matching_scratch(P)
    for j in range(S):
        edge[j, j] = 0.0
        for k in range(j):
            edge[j, k] = edge[k, j] = hop_s(pp, groups[j], groups[k], scratch)
    return edge


# ------------------------------------------------------------------------------------------ Eq. 4: order of the stages


@compiled
def held_karp(edge, order):
    """Shortest open path through all S vertices (Eq. 4), exact in O(S^2 2^S); `order` [S] receives it."""
    S = edge.shape[0]
    best = np.empty((1 << S, S))
    previous = np.empty((1 << S, S), np.int64)
    for used in range(1 << S):
        for k in range(S):
            best[used, k] = np.inf
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
                        previous[used | 1 << j, j] = k
    used = (1 << S) - 1
    last = 0
    for k in range(S):
        if best[used, k] < best[used, last]:
            last = k
    total = best[used, last]
    for s in range(S - 1, -1, -1):
        order[s] = last
        last, used = previous[used, last], used & ~(1 << last)
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
    unused = np.empty(S, np.int64)
    for start in range(S):
        for s in range(S):
            unused[s] = 1
        trial[0] = start
        unused[start] = 0
        for s in range(1, S):
            nearest = -1
            for j in range(S):
                if unused[j] == 1 and (nearest < 0 or edge[trial[s - 1], j] < edge[trial[s - 1], nearest]):
                    nearest = j
            trial[s] = nearest
            unused[nearest] = 0
        total = path_s(edge, trial)
        if total < best:
            best = total
            copy_row(trial, order)
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
                    if total < best * (1 - 1e-9):
                        best = total
                        copy_row(trial, order)
                        improved = True
    return best


@compiled
def _rearrange(order, trial, i, j, reverse):
    """trial = order with positions i..j reversed, or with position i moved to j."""
    copy_row(order, trial)
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
    """Path of Eq. 4: exact up to EXACT_PATH_STAGES, a good one beyond."""
    if edge.shape[0] <= EXACT_PATH_STAGES:
        return held_karp(edge, order)
    return short_path(edge, order)


@compiled
def partition_s(dp, pp, groups):
    """COMM-COST of Eq. 1 for groups [S, P] under their best order and matchings."""
    order = np.empty(groups.shape[0], np.int64)
    return datap_s(dp, groups) + best_path(hop_matrix(pp, groups), order)
