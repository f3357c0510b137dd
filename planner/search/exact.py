"""Proof by complete enumeration for up to 16 devices: every partition that could beat the best known plan.

16 devices have at most 2.6 million balanced partitions. A partition is built group by group (the next group holds the
lowest free device) and dropped when DATAP so far plus a bound of the path reaches the best cost.
"""

import itertools
from typing import NamedTuple

import numpy as np

from planner.cost.communication import held_karp, hop_s, matching_scratch
from planner.cost.compiled import compiled, copy_row
from planner.model.problem import Problem
from planner.model.proof import ROUNDING
from planner.search.background import in_background
from planner.search.base import SolverEntry
from planner.search.incumbent import Incumbent

MAX_DEVICES = 16
MAX_TABLE_GROUPS = 2000


class Groups(NamedTuple):
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
    """The optimal partition in path order [S, P] and its cost, given a plan and its cost; for up to MAX_DEVICES."""
    groups = all_groups(problem)
    n_groups = len(groups.masks)
    hop_table = np.full((n_groups, n_groups) if n_groups <= MAX_TABLE_GROUPS else (0, 0), np.nan)
    best = np.array(placement, dtype=np.int64)
    off_diagonal = problem.pp_s[~np.eye(problem.n_devices, dtype=bool)]
    cheapest_hop_s = float(off_diagonal.min()) if problem.n_devices > 1 else 0.0
    optimum_s = enumerate_partitions(problem.pp_s, groups, cheapest_hop_s, best_s, best, hop_table)
    return best, optimum_s


def prove_by_enumeration(problem: Problem, incumbent: Incumbent):
    """Prove the optimum of up to MAX_DEVICES devices, from the incumbent's best plan."""
    assert incumbent.best is not None  # the layouts were offered before
    groups, cost_s = prove(problem, incumbent.best, incumbent.best_s)
    incumbent.offer(groups, cost_s, by="exact")
    incumbent.raise_bound(cost_s * (1 - ROUNDING))


def enumerate_all(problem: Problem, incumbent: Incumbent, seed: int):
    """The solver: enumeration in a thread, so that the search can be interrupted."""
    del seed
    with in_background(lambda: prove_by_enumeration(problem, incumbent), incumbent) as task:
        task.result()


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
def _fill_edges(pp, edge, rows, pick, depth, hop_table, scratch):
    """Hops between the group at `depth` of a partition and those before it, into edge [S, S]; from the table if there
    is one, where NaN stands for unknown."""
    g = pick[depth]
    for d in range(depth):
        if hop_table.shape[0] == 0:
            hop = hop_s(pp, rows[d], rows[depth], scratch)
        else:
            if np.isnan(hop_table[pick[d], g]):
                hop_table[pick[d], g] = hop_s(pp, rows[d], rows[depth], scratch)
            hop = hop_table[pick[d], g]
        edge[d, depth] = hop
        edge[depth, d] = hop


@compiled
def enumerate_partitions(pp, groups, cheapest_hop_s, best_s, best, hop_table):
    """Lower best_s, and write the groups of a better partition in path order into `best` [S, P]. hop_table [G, G] keeps
    hops between groups; [0, 0] switches it off. Returns best_s: no partition costs less by more than rounding."""
    S, P = best.shape
    full = (1 << (S * P)) - 1
    pick = np.empty(S, np.int64)
    used = np.empty(S + 1, np.int64)
    datap = np.empty(S + 1)
    rows = np.empty((S, P), np.int64)
    edge = np.empty((S, S))
    for s in range(S):
        pick[s] = -1
        edge[s, s] = 0.0
    used[0] = 0
    datap[0] = 0.0
    order = np.empty(S, np.int64)
    scratch = matching_scratch(P)
    path_floor_s = (S - 1) * cheapest_hop_s
    below_s = best_s * (1 - ROUNDING)
    depth = np.int64(0)
    while depth >= 0:
        lowest = 0
        while used[depth] >> lowest & 1:
            lowest += 1
        g = pick[depth] + 1 if pick[depth] >= 0 else groups.first[lowest]
        end = groups.first[lowest + 1]
        while g < end and groups.masks[g] & used[depth] != 0:
            g += 1
        if g == end or max(datap[depth], groups.datap_s[g]) + path_floor_s >= below_s:
            pick[depth] = -1
            depth -= 1
            continue
        pick[depth] = g
        _members(groups.masks[g], rows[depth])
        _fill_edges(pp, edge, rows, pick, depth, hop_table, scratch)
        used[depth + 1] = used[depth] | groups.masks[g]
        datap[depth + 1] = max(datap[depth], groups.datap_s[g])
        if used[depth + 1] != full:
            depth += 1
        elif datap[S] + _path_floor(edge) < below_s:
            total = datap[S] + held_karp(edge, order)
            if total < below_s:
                best_s = total
                below_s = best_s * (1 - ROUNDING)
                for s in range(S):
                    copy_row(rows[order[s]], best[s])
    return best_s


ENTRY = SolverEntry(enumerate_all, max_devices=MAX_DEVICES, starts_from_layouts=True)
