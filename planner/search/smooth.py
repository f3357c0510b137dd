"""Compiled annealing of a softened cost, as a start for `anneal`.

Maxima hide progress: in the paper's case 2 a hop gets cheap only when all eight pipelines cross it inside a machine, so
no single swap from a random plan gains anything. Here a hop costs (1 - softness) * slowest pair + softness * mean pair
of an explicit matching (column p of `place` is pipeline p), DATAP likewise over the stages; softness falls to zero.
"""

import numpy as np

from planner.cost.compiled import below, compiled, unit
from planner.search.anneal import sum_exchanges

REFRESH = 1000


@compiled
def soft_hop(pp, left, right, softness):
    worst = 0.0
    total = 0.0
    for p in range(left.shape[0]):
        cost = pp[left[p], right[p]]
        worst = max(worst, cost)
        total += cost
    return (1 - softness) * worst + softness * total / left.shape[0]


@compiled
def soft_terms(dp, pp, place, softness, stage_s, hop_s, sums):
    """Fill the terms of a placement [S, P]; returns its softened cost."""
    S = place.shape[0]
    for s in range(S):
        stage_s[s] = sum_exchanges(dp, place[s], sums)
        if s + 1 < S:
            hop_s[s] = soft_hop(pp, place[s], place[s + 1], softness)
    return (1 - softness) * stage_s.max() + softness * stage_s.mean() + hop_s.sum()


@compiled
def pick_runs(rng, place, kind_of, run_share):
    """(stage, pipeline, stage, pipeline, length) of two runs to swap; length 0 if there is nothing to do."""
    S, P = place.shape
    i, j, a, b = below(rng, S), below(rng, S), below(rng, P), below(rng, P)
    length = 1
    if unit(rng) < run_share:
        length = 1 + below(rng, 4)
        if i + length > S or j + length > S or a == b or (i != j and abs(i - j) < length):
            length = 0
    elif kind_of[place[i, a]] == kind_of[place[j, b]]:
        length = 0
    return i, a, j, b, length


@compiled
def swap_runs(place, i, a, j, b, length):
    for k in range(length):
        place[i + k, a], place[j + k, b] = place[j + k, b], place[i + k, a]


@compiled
def soft_cost(dp, pp, place, i, j, length, softness, stage_s, hop_s, trial_stage, trial_hop, sums):
    """Softened cost after runs of stages i.. and j.. changed; their terms go to the trial arrays."""
    S = place.shape[0]
    worst = 0.0
    total = 0.0
    cost = 0.0
    for s in range(S):
        here = 0 <= s - i < length or 0 <= s - j < length
        trial_stage[s] = stage_s[s]
        if here and i != j:
            trial_stage[s] = sum_exchanges(dp, place[s], sums)
        worst = max(worst, trial_stage[s])
        total += trial_stage[s]
        if s + 1 < S:
            trial_hop[s] = hop_s[s]
            if here or 0 <= s + 1 - i < length or 0 <= s + 1 - j < length:
                trial_hop[s] = soft_hop(pp, place[s], place[s + 1], softness)
            cost += trial_hop[s]
    return cost + (1 - softness) * worst + softness * total / S


@compiled
def smooth(dp, pp, place, kind_of, rng, hot_s, cold_s, soft_from, soft_to, n_moves, run_share):
    """Anneal `place` [S, P] in place while temperature and softness fall. Returns the softened cost reached."""
    S, P = place.shape
    stage_s, trial_stage = np.zeros(S), np.zeros(S)
    hop_s, trial_hop = np.zeros(S), np.zeros(S)
    sums = np.zeros(P)
    cooling = (cold_s / hot_s) ** (1.0 / max(1, n_moves))
    temperature = hot_s
    softness = soft_from
    cost = 0.0
    for move in range(n_moves):
        if move % REFRESH == 0:
            softness = soft_from + (soft_to - soft_from) * move / n_moves
            cost = soft_terms(dp, pp, place, softness, stage_s, hop_s, sums)
        temperature *= cooling
        i, a, j, b, length = pick_runs(rng, place, kind_of, run_share)
        if length == 0:
            continue
        swap_runs(place, i, a, j, b, length)
        new_cost = soft_cost(dp, pp, place, i, j, length, softness, stage_s, hop_s, trial_stage, trial_hop, sums)
        if new_cost <= cost - temperature * np.log(1.0 - unit(rng)):
            cost = new_cost
            stage_s, trial_stage = trial_stage, stage_s
            hop_s, trial_hop = trial_hop, hop_s
        else:
            swap_runs(place, i, a, j, b, length)
    return cost
