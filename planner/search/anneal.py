"""Compiled annealing over placements (DT-FM Eq. 1-4).

The stage order is explicit (row s of `place` is stage s), so a plan's pipeline part is the sum of S-1 hop bottlenecks
and a move changes few of them. Every hop keeps its optimal matching, which the next move starts from. Moves: swap two
devices; swap two runs of 2-4 consecutive devices of two pipelines; swap two stages; reverse a range of stages.
A move is dropped as soon as its cost is certain to exceed what the temperature allows.
"""

import numpy as np

from planner.cost.compiled import below, compiled, unit
from planner.cost.matching import improve, lower_bound

NONE = -1
ALL = -2


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
def start_state(dp, pp, place, match, sums, stage_s, hop_s, work):
    """Fill matchings and terms of a placement; returns its cost."""
    S, P = place.shape
    for s in range(S):
        stage_s[s] = sum_exchanges(dp, place[s], sums[s])
    for s in range(S - 1):
        for a in range(P):
            match[s, a] = a
        floor = lower_bound(pp, place[s], place[s + 1], P)
        hop_s[s] = improve(pp, place[s], place[s + 1], P, match[s], floor, work)
    return stage_s.max() + hop_s.sum()


@compiled
def propose(rng, place, trial, match, kind_of, changed, reorder_share, run_share):
    """Write a random move into `trial`; changed[s] becomes the slot that changed in stage s, or ALL. False: no move."""
    S, P = place.shape
    choice = unit(rng)
    i = below(rng, S)
    j = below(rng, S)
    if i == j:
        return False
    if choice < reorder_share:
        if i > j:
            i, j = j, i
        if below(rng, 2) == 0:
            for a in range(P):
                trial[i, a], trial[j, a] = trial[j, a], trial[i, a]
            changed[i] = changed[j] = ALL
        else:
            for s in range(i, j + 1):
                trial[s] = place[i + j - s]
                changed[s] = ALL
        return True
    a = below(rng, P)
    b = below(rng, P)
    length = 1
    if choice < reorder_share + run_share:
        length = 2 + below(rng, 3)
    if length > 1 and (i + length > S or j + length > S or abs(i - j) < length):
        return False
    moved = False
    for k in range(length):
        left, right = place[i + k, a], place[j + k, b]
        if kind_of[left] != kind_of[right]:
            moved = True
        trial[i + k, a] = right
        trial[j + k, b] = left
        changed[i + k] = a
        changed[j + k] = b
        if k + 1 < length:
            a = match[i + k, a]
            b = match[j + k, b]
    return moved


@compiled
def swap_exchanges(dp, row, slot, old, sums, trial_sums):
    """DATAP(C_j) after row[slot] has replaced the device `old`, from the sums before."""
    new = row[slot]
    own = 0.0
    worst = 0.0
    for a in range(row.shape[0]):
        if a != slot:
            part = dp[new, row[a]]
            own += part
            trial_sums[a] = sums[a] + part - dp[old, row[a]]
            worst = max(worst, trial_sums[a])
    trial_sums[slot] = own
    return max(worst, own)


@compiled
def nearest_s(pp, device, row):
    """The cheapest pair that a device can form with a stage."""
    low = pp[device, row[0]]
    for b in range(1, row.shape[0]):
        low = min(low, pp[device, row[b]])
    return low


@compiled
def hop_floor(pp, trial, s, changed):
    """A cheap lower bound of hop s: the changed devices need partners."""
    low = 0.0
    if changed[s] >= 0:
        low = nearest_s(pp, trial[s, changed[s]], trial[s + 1])
    if changed[s + 1] >= 0:
        low = max(low, nearest_s(pp, trial[s + 1, changed[s + 1]], trial[s]))
    return low


@compiled
def evaluate(dp, pp, place, trial, sums, trial_sums, trial_match, trial_stage, trial_hop, changed, allowed, work):
    """Cost of `trial`, of which only changed stages differ; infinity as soon as it must exceed `allowed`."""
    S, P = trial.shape
    datap = 0.0
    for s in range(S):
        if changed[s] == ALL:
            trial_stage[s] = sum_exchanges(dp, trial[s], trial_sums[s])
        elif changed[s] >= 0:
            slot = changed[s]
            trial_stage[s] = swap_exchanges(dp, trial[s], slot, place[s, slot], sums[s], trial_sums[s])
        datap = max(datap, trial_stage[s])
    total = datap
    for s in range(S - 1):
        if changed[s] != NONE or changed[s + 1] != NONE:
            trial_hop[s] = hop_floor(pp, trial, s, changed)
        total += trial_hop[s]
    if total > allowed:
        return np.inf
    for s in range(S - 1):
        if changed[s] != NONE or changed[s + 1] != NONE:
            floor = lower_bound(pp, trial[s], trial[s + 1], P)
            total += floor - trial_hop[s]
            trial_hop[s] = floor
            if total > allowed:
                return np.inf
    for s in range(S - 1):
        if changed[s] != NONE or changed[s + 1] != NONE:
            floor = trial_hop[s]
            trial_hop[s] = improve(pp, trial[s], trial[s + 1], P, trial_match[s], floor, work)
            total += trial_hop[s] - floor
            if total > allowed:
                return np.inf
    return total


@compiled
def copy_changed(changed, source, target):
    """Copy changed stages and the hops beside them from one (place, match, sums, stage_s, hop_s) to another."""
    S = changed.shape[0]
    for s in range(S):
        if changed[s] != NONE:
            target[0][s] = source[0][s]
            target[2][s] = source[2][s]
            target[3][s] = source[3][s]
        if s + 1 < S and (changed[s] != NONE or changed[s + 1] != NONE):
            target[1][s] = source[1][s]
            target[4][s] = source[4][s]


@compiled
def anneal(dp, pp, place, best, kind_of, rng, hot_s, cold_s, n_moves, reorder_share, run_share):
    """Anneal `place` [S, P] in place from temperature hot_s to cold_s; `best` receives the best placement met.
    Returns (best cost, cost of `place`) in seconds. Devices with equal kind_of are interchangeable."""
    S, P = place.shape
    work = np.empty((5, P), np.int64)
    now = (place, np.empty((S, P), np.int64), np.zeros((S, P)), np.zeros(S), np.zeros(S))
    cost = start_state(dp, pp, now[0], now[1], now[2], now[3], now[4][: S - 1], work)
    trial = (place.copy(), now[1].copy(), now[2].copy(), now[3].copy(), now[4].copy())
    changed = np.full(S, NONE, np.int64)
    best_cost = cost
    best[:] = place
    cooling = (cold_s / hot_s) ** (1.0 / max(1, n_moves))
    temperature = hot_s
    for _ in range(n_moves):
        temperature *= cooling
        moved = propose(rng, now[0], trial[0], now[1], kind_of, changed, reorder_share, run_share)
        if moved:
            allowed = cost - temperature * np.log(1.0 - unit(rng))
            new_cost = evaluate(
                dp, pp, now[0], trial[0], now[2], trial[2], trial[1], trial[3], trial[4], changed, allowed, work
            )
            moved = new_cost <= allowed
        if moved:
            cost = new_cost
            copy_changed(changed, trial, now)
            if cost < best_cost - 1e-12:
                best_cost = cost
                best[:] = now[0]
        else:
            copy_changed(changed, now, trial)
        changed[:] = NONE
    return best_cost, cost
