"""Proof by complete enumeration for up to 16 devices: every partition that could beat the best known plan.

16 devices have at most 2.6 million balanced partitions. A partition is built group by group (the next group holds the
lowest free device) and dropped when DATAP so far plus a bound of the path reaches the best cost.
"""

import itertools
from dataclasses import dataclass

import numpy as np

from planner.cost.communication import held_karp, hop_s
from planner.cost.compiled import compiled
from planner.model.problem import Problem

MAX_DEVICES = 16
TABLE_GROUPS = 2000
ROUNDING_S = 1e-9


@dataclass(frozen=True, eq=False)
class Groups:
    """All subsets of P devices as bit masks, sorted by (lowest device, datap_s); those whose lowest device is d are
    first[d] .. first[d + 1] - 1."""

    masks: np.ndarray
    datap_s: np.ndarray
    first: np.ndarray


def all_groups(problem: Problem) -> Groups:
    n, size = problem.n_devices, problem.n_pipelines
    members = np.array(list(itertools.combinations(range(n), size)), dtype=np.int64)
    group_datap_s = problem.dp_s[members[:, :, None], members[:, None, :]].sum(axis=2).max(axis=1)
    order = np.lexsort((group_datap_s, members[:, 0]))
    first = np.searchsorted(members[order, 0], np.arange(n + 1))
    return Groups((1 << members).sum(axis=1)[order], group_datap_s[order], first)


def prove(problem: Problem, placement: np.ndarray, best_s: float) -> tuple[np.ndarray, float]:
    """The optimal partition in path order [S, P] and its cost, given a plan and its cost; for up to 16 devices."""
    groups = all_groups(problem)
    n_groups = len(groups.masks)
    table = np.full((n_groups, n_groups) if n_groups <= TABLE_GROUPS else (0, 0), np.nan)
    best = np.array(placement, dtype=np.int64)
    off_diagonal = problem.pp_s[~np.eye(problem.n_devices, dtype=bool)]
    cheapest_hop_s = float(off_diagonal.min()) if problem.n_devices > 1 else 0.0
    found_s = enumerate_partitions(
        problem.pp_s, groups.masks, groups.datap_s, groups.first, cheapest_hop_s, best_s, best, table
    )
    return best, found_s


@compiled
def _members(mask, row):
    k = 0
    for d in range(MAX_DEVICES):
        if mask >> d & 1:
            row[k] = d
            k += 1


@compiled
def _path_floor(edge):
    """Half of each vertex's two cheapest edges, an end of the path needing one: a lower bound of Eq. 4."""
    S = edge.shape[0]
    if S == 1:
        return 0.0
    total = 0.0
    saved1 = 0.0
    saved2 = 0.0
    for j in range(S):
        low1 = np.inf
        low2 = np.inf
        for k in range(S):
            if k != j:
                if edge[j, k] < low1:
                    low1, low2 = edge[j, k], low1
                elif edge[j, k] < low2:
                    low2 = edge[j, k]
        if S == 2:
            low2 = 0.0
        total += low1 + low2
        if low2 > saved1:
            saved1, saved2 = low2, saved1
        elif low2 > saved2:
            saved2 = low2
    return (total - saved1 - saved2) / 2


@compiled
def _hop(pp, table, g, h, left, right, work, match):
    if table.shape[0] == 0:
        return hop_s(pp, left, right, work, match)
    if np.isnan(table[g, h]):
        table[g, h] = hop_s(pp, left, right, work, match)
    return table[g, h]


@compiled
def enumerate_partitions(pp, masks, group_datap, first, cheapest_hop, best_s, best, table):
    """Lower best_s, and write the groups of a better partition in path order into `best` [S, P]. table [G, G] (or
    [0, 0]) keeps hops, NaN where unknown. Returns best_s: no partition costs less by more than rounding."""
    S, P = best.shape
    full = (1 << (S * P)) - 1
    pick = np.full(S, -1, np.int64)
    used = np.zeros(S + 1, np.int64)
    datap = np.zeros(S + 1)
    rows = np.empty((S, P), np.int64)
    edge = np.zeros((S, S))
    order = np.empty(S, np.int64)
    work = np.empty((5, P), np.int64)
    match = np.empty(P, np.int64)
    path_least = (S - 1) * cheapest_hop
    depth = 0
    while depth >= 0:
        lowest = 0
        while used[depth] >> lowest & 1:
            lowest += 1
        g = pick[depth] + 1 if pick[depth] >= 0 else first[lowest]
        while g < first[lowest + 1] and masks[g] & used[depth] != 0:
            g += 1
        if g == first[lowest + 1] or max(datap[depth], group_datap[g]) + path_least >= best_s - ROUNDING_S:
            pick[depth] = -1
            depth -= 1
            continue
        pick[depth] = g
        _members(masks[g], rows[depth])
        for d in range(depth):
            edge[d, depth] = _hop(pp, table, pick[d], g, rows[d], rows[depth], work, match)
            edge[depth, d] = edge[d, depth]
        used[depth + 1] = used[depth] | masks[g]
        datap[depth + 1] = max(datap[depth], group_datap[g])
        if used[depth + 1] != full:
            depth += 1
        elif datap[S] + _path_floor(edge) < best_s - ROUNDING_S:
            total = datap[S] + held_karp(edge, order)
            if total < best_s - ROUNDING_S:
                best_s = total
                for s in range(S):
                    best[s] = rows[order[s]]
    return best_s
