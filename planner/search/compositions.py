"""Proof by enumeration over stage compositions, for networks of few types of devices.

A composition says how many devices of each type one stage has. It fixes the stage's DATAP, and two compositions fix the
hop between their stages, so a plan is a path of S compositions that together use all devices. The enumeration starts
every path at a stage of the largest DATAP and lets it grow at its right end, then at its left one. So Eq. 2 is known
from the start, and only compositions of at most that DATAP may follow.

Most paths end early by a bound for the hops to come. Over links of at most t the types fall into connected parts. A hop
that costs at most t leaves the number of devices in each part as it is. So where the devices that are left cannot
continue both ends with constant numbers, some hop to come costs more than t.

K types, S stages, P pipelines, n compositions, L thresholds.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from planner.cost.bounds import pipelinep_floor_s
from planner.cost.communication import MatchingScratch, hop_s, matching_scratch
from planner.cost.compiled import compiled, copy_row
from planner.cost.placement import match_pipelines
from planner.model.problem import Problem, placement_s
from planner.model.proof import PROOF_GAP, ROUNDING
from planner.search.device_types import Types, groups_from
from planner.search.incumbent import Incumbent

MAX_COMPOSITIONS = 30_000
MAX_TABLE = 1500  # compositions, of the least DATAP, whose hops are kept
MAX_NODES = 3_000  # extensions of paths from one composition, beyond which the enumeration gives up
MANY_CHANGES = 2  # of a part's number of devices: so many are told apart


class Compositions(NamedTuple):
    """counts [n, K] of devices of each type in a stage, and the stage's datap_s [n], ascending; sizes [K] of the
    types."""

    counts: np.ndarray
    datap_s: np.ndarray
    sizes: np.ndarray


class Thresholds(NamedTuple):
    """Costs of hops where the connected parts of the types change. part [L, K] is the part of each type over links
    below threshold l, n_parts [L] the number of parts; step_s [L] is threshold l less the one before, later_s [L] the
    sum of the steps after it. No hop costs less than least_s, the threshold before the first."""

    part: np.ndarray
    n_parts: np.ndarray
    step_s: np.ndarray
    later_s: np.ndarray
    least_s: float


class Hops(NamedTuple):
    """pp [K, K] of the types; table [T, T] of the hops between compositions, NaN where unknown; rows [2, P] and scratch
    for the matching."""

    pp: np.ndarray
    table: np.ndarray
    rows: np.ndarray
    scratch: MatchingScratch


class Path(NamedTuple):
    """A partial path, by the number of its compositions so far (depth). steps [S + 1, 5]: PICK, the composition added
    next; TO_LEFT, whether at the left end; RIGHT, LEFT, the compositions at the ends; N_RIGHT, those added at the
    right. cost_s [S + 1] of the hops. ends [6, K]: counts at the right and the left end, devices left, and scratch for
    the sums of these three over parts. rest [S + 1, K]: devices left."""

    steps: np.ndarray
    cost_s: np.ndarray
    rest: np.ndarray
    ends: np.ndarray


PICK, TO_LEFT, RIGHT, LEFT, N_RIGHT = range(5)


# -------------------------------------------------------------------------------------------------------- compositions


def count_compositions(types: Types, n_pipelines: int) -> int:
    """The number of ways to fill one stage."""
    ways = [1] + [0] * n_pipelines
    for size in types.sizes:
        ways = [sum(ways[max(0, n - size) : n + 1]) for n in range(n_pipelines + 1)]
    return ways[-1]


def compositions_below(types: Types, n_pipelines: int, most_s: float) -> Compositions:
    """All compositions whose DATAP (Eq. 2) is at most most_s."""
    counts = np.zeros((1, 0), np.int64)
    for size in types.sizes:
        n_more = np.minimum(size, n_pipelines - counts.sum(axis=1)) + 1
        rows = np.repeat(np.arange(len(counts)), n_more)
        first = np.repeat(np.cumsum(n_more) - n_more, n_more)
        counts = np.column_stack([counts[rows], np.arange(len(rows)) - first])
    counts = counts[counts.sum(axis=1) == n_pipelines]
    exchanges_s = counts @ types.dp_s - np.diag(types.dp_s)
    datap_s = np.where(counts > 0, exchanges_s, 0.0).max(axis=1)
    order = np.argsort(datap_s, kind="stable")
    order = order[datap_s[order] <= most_s]
    return Compositions(np.ascontiguousarray(counts[order]), datap_s[order], np.array(types.sizes, dtype=np.int64))


def thresholds_of(types: Types) -> Thresholds:
    """The thresholds at which single linkage joins parts."""
    pp = types.pp_s
    kinds = range(len(types.sizes))
    pairs = sorted((float(pp[k, other]), k, other) for k in kinds for other in range(k))
    least_s = min([pp[k, k] for k in kinds if types.sizes[k] > 1] + [pair[0] for pair in pairs[:1]], default=0.0)
    part = np.arange(len(types.sizes))
    parts = []
    at_s = [float(least_s)]
    for cost_s, k, other in pairs:
        if part[k] != part[other]:
            if cost_s > at_s[-1]:
                parts.append(np.unique(part, return_inverse=True)[1])
                at_s.append(cost_s)
            part[part == part[k]] = part[other]
    steps_s = np.diff(at_s)
    return Thresholds(
        part=np.array(parts, dtype=np.int64).reshape(len(steps_s), len(part)),
        n_parts=np.array([labels.max() + 1 for labels in parts], dtype=np.int64),
        step_s=steps_s,
        later_s=steps_s.sum() - np.cumsum(steps_s),
        least_s=float(least_s),
    )


# -------------------------------------------------------------------------------------------------- bound and hop costs


@compiled
def _changes(part, n_parts, ends, both, n_left, n_pipelines):
    """The number of times that the numbers of devices in the parts must change along the n_left stages to come: 0, 1 or
    MANY_CHANGES. `both` ends may grow, or the left one alone. With at most one change, a stages continue the right end,
    b the left one, and the others are all alike."""
    for i in range(3):
        for q in range(n_parts):
            ends[3 + i, q] = 0
        for k in range(part.shape[0]):
            ends[3 + i, part[k]] += ends[i, k]
    most_a = n_left
    most_b = n_left if both else 0
    for q in range(n_parts):
        if ends[3, q] > 0:
            most_a = min(most_a, ends[5, q] // ends[3, q])
        if ends[4, q] > 0:
            most_b = min(most_b, ends[5, q] // ends[4, q])
    fewest = MANY_CHANGES
    for a in range(most_a, -1, -1):
        for b in range(min(most_b, n_left - a), -1, -1):
            n_others = n_left - a - b
            if n_others > 0 and fewest < MANY_CHANGES:
                break
            possible = True
            for q in range(n_parts):
                others = ends[5, q] - a * ends[3, q] - b * ends[4, q]
                if others < 0 or others > n_others * n_pipelines or (n_others > 0 and others % n_others != 0):
                    possible = False
                    break
            if possible:
                if n_others == 0:
                    return 0
                fewest = 1
    return fewest


@compiled
def _hops_exceed(thresholds, ends, both, n_left, n_pipelines, room_s):
    """Whether the n_left hops to come cost room_s or more, by the bound of the module text. Fewer parts change less
    often, so the changes at one threshold bound those at the later ones."""
    floor_s = n_left * thresholds.least_s
    if n_left > 0:
        for i in range(thresholds.step_s.shape[0]):
            n_changes = _changes(thresholds.part[i], thresholds.n_parts[i], ends, both, n_left, n_pipelines)
            floor_s += n_changes * thresholds.step_s[i]
            if floor_s >= room_s or floor_s + n_changes * thresholds.later_s[i] < room_s:
                break
    return floor_s >= room_s


@compiled
def _expand(counts, row):
    """The type of each device of a composition, into row [P]."""
    p = 0
    for k in range(counts.shape[0]):
        for _ in range(counts[k]):
            row[p] = k
            p += 1


@compiled
def _hop_between(hops, counts, a, b):
    """edge(j, k) of Eq. 3 for stages of compositions a and b."""
    known = max(a, b) < hops.table.shape[0]
    if known and not np.isnan(hops.table[a, b]):
        return hops.table[a, b]
    _expand(counts[a], hops.rows[0])
    _expand(counts[b], hops.rows[1])
    cost_s = hop_s(hops.pp, hops.rows[0], hops.rows[1], hops.scratch)
    if known:
        hops.table[a, b] = cost_s
        hops.table[b, a] = cost_s
    return cost_s


# --------------------------------------------------------------------------------------------------------- enumeration


@compiled
def _fits(counts, rest, left):
    """Whether the devices left suffice for a composition; `left` receives what it leaves."""
    for k in range(rest.shape[0]):
        left[k] = rest[k] - counts[k]
        if left[k] < 0:
            return False
    return True


@compiled
def _next_pick(compositions, hops, thresholds, path, depth, room_s):
    """Move on to the next composition that may follow, with path.cost_s and path.rest after it; false if there is none.
    A path and its mirror image cost the same, so at least half of it grows to the right."""
    counts = compositions.counts
    step = path.steps[depth]
    n_stages = path.steps.shape[0] - 1
    n_left = n_stages - depth - 1
    root = path.steps[0, PICK]
    while True:
        step[PICK] += 1
        if step[PICK] > root:
            if step[TO_LEFT] or step[N_RIGHT] < n_stages // 2:
                return False
            step[TO_LEFT] = 1
            step[PICK] = 0
        j = step[PICK]
        if not _fits(counts[j], path.rest[depth], path.rest[depth + 1]):
            continue
        end = step[LEFT] if step[TO_LEFT] else step[RIGHT]
        cost_s = path.cost_s[depth] + _hop_between(hops, counts, end, j)
        if cost_s + n_left * thresholds.least_s >= room_s:
            continue
        copy_row(counts[j], path.ends[0])
        copy_row(counts[j if step[TO_LEFT] else step[LEFT]], path.ends[1])
        copy_row(path.rest[depth + 1], path.ends[2])
        both = step[TO_LEFT] == 0
        if not _hops_exceed(thresholds, path.ends, both, n_left, hops.rows.shape[1], room_s - cost_s):
            path.cost_s[depth + 1] = cost_s
            return True


@compiled
def _write(compositions, path, best):
    """The compositions of a whole path in stage order, into best [S, K]."""
    S = best.shape[0]
    left = S - 1 - path.steps[S, N_RIGHT]
    right = left
    copy_row(compositions.counts[path.steps[0, PICK]], best[left])
    for depth in range(1, S):
        if path.steps[depth, TO_LEFT]:
            left -= 1
        else:
            right += 1
        at = left if path.steps[depth, TO_LEFT] else right
        copy_row(compositions.counts[path.steps[depth, PICK]], best[at])


@compiled
def search_from(compositions, hops, thresholds, path, limit_s, best, max_nodes):
    """Look for paths below limit_s through the composition path.steps[0, PICK] and others up to it. Returns (the least
    cost found or limit_s, the number of extensions); if that is above max_nodes, some paths were not seen. `best`
    [S, K] receives the path."""
    S = best.shape[0]
    steps = path.steps
    root = steps[0, PICK]
    datap_s = compositions.datap_s[root]
    if not _fits(compositions.counts[root], compositions.sizes, path.rest[1]):
        return limit_s, 0
    copy_row(compositions.counts[root], path.ends[0])
    copy_row(compositions.counts[root], path.ends[1])
    copy_row(path.rest[1], path.ends[2])
    path.cost_s[1] = 0.0
    steps[1, PICK], steps[1, TO_LEFT], steps[1, N_RIGHT] = -1, 0, 0
    steps[1, RIGHT], steps[1, LEFT] = root, root
    both = steps[1, TO_LEFT] == 0
    if _hops_exceed(thresholds, path.ends, both, S - 1, hops.rows.shape[1], limit_s - datap_s):
        return limit_s, 0
    n_nodes = 0
    depth = min(S, 1)  # the literal 1 would have its own type, for which all is compiled once more
    while depth > 0:
        if depth == S:
            limit_s = datap_s + path.cost_s[S]
            _write(compositions, path, best)
            depth -= 1
        elif _next_pick(compositions, hops, thresholds, path, depth, limit_s - datap_s):
            n_nodes += 1
            if n_nodes > max_nodes:
                break
            step, following = steps[depth], steps[depth + 1]
            copy_row(step, following)
            following[PICK] = -1
            following[LEFT if step[TO_LEFT] else RIGHT] = step[PICK]
            following[N_RIGHT] += 1 - step[TO_LEFT]
            depth += 1
        else:
            depth -= 1
    return limit_s, n_nodes


# -------------------------------------------------------------------------------------------------------------- proof


def prove_by_compositions(problem: Problem, types: Types, incumbent: Incumbent, left_s: Callable[[], float]):
    """Prove the optimum of few types, or nothing, while left_s() says that there is time. It gives up at the first
    composition with more than MAX_NODES extensions, and under an evaluation limit after that many in all. Types must be
    exact. Types that may be exchanged for one another lead to many equal paths: it soon gives up on them."""
    n_stages, n_pipelines = problem.n_stages, problem.n_pipelines
    if count_compositions(types, n_pipelines) > MAX_COMPOSITIONS:
        return
    has_plan = incumbent.best_s < problem.missing_s
    limit_s = incumbent.best_s * (1 - PROOF_GAP / 2) if has_plan else problem.dearest_s
    compositions = compositions_below(types, n_pipelines, limit_s - pipelinep_floor_s(problem))
    thresholds = thresholds_of(types)
    hops = hops_of(types, n_pipelines, len(compositions.counts))
    path = new_path(n_stages, len(types.sizes))
    best = np.empty((n_stages, len(types.sizes)), np.int64)
    n_nodes_left = incumbent.budget.evaluations
    for root in range(len(compositions.counts)):
        max_nodes = MAX_NODES if n_nodes_left is None else min(MAX_NODES, n_nodes_left)
        if incumbent.done or left_s() <= 0:
            return
        path.steps[0, PICK] = root
        found_s, n_nodes = search_from(compositions, hops, thresholds, path, limit_s, best, max_nodes)
        if found_s < limit_s:
            limit_s, has_plan = found_s, True
            placement = match_pipelines(problem, groups_from(types, best.T))
            incumbent.offer(placement, placement_s(problem, placement), by="types")
        if n_nodes > max_nodes:
            return
        n_nodes_left = None if n_nodes_left is None else n_nodes_left - n_nodes
    incumbent.raise_bound(limit_s * (1 - ROUNDING) if has_plan else problem.missing_s)


def hops_of(types: Types, n_pipelines: int, n_compositions: int) -> Hops:
    """The hops between compositions, all unknown yet."""
    n_known = min(n_compositions, MAX_TABLE)
    table = np.full((n_known, n_known), np.nan)
    return Hops(types.pp_s, table, np.empty((2, n_pipelines), np.int64), matching_scratch(n_pipelines))


def new_path(n_stages: int, n_types: int) -> Path:
    """Room for a path."""
    return Path(
        steps=np.zeros((n_stages + 1, 5), np.int64),
        cost_s=np.zeros(n_stages + 1),
        rest=np.zeros((n_stages + 1, n_types), np.int64),
        ends=np.zeros((6, n_types), np.int64),
    )
