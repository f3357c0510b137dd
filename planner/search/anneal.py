"""Compiled simulated annealing of placements, on COMM-COST (`anneal`) and on a softened cost (`anneal_softened`).

`anneal`: the stage order is explicit (row s of `place` is stage s), so a plan's pipeline part is the sum of S - 1 hop
bottlenecks, and a move changes few of them. Every hop keeps its optimal matching, from which the next move starts.
Where constraints are about pipelines, column p is pipeline p instead, and a hop costs its slowest pair.
Moves: swap two devices, one of which may be spare (out of the plan); swap two runs of 2-4 consecutive devices of two
pipelines; swap two stages; reverse a range of stages; where columns are pipelines, swap two devices of a stage. A move
is dropped as soon as its cost, with its charges (planner.search.charges), is certain to exceed what the temperature
allows.

`anneal_softened`: maxima hide progress. In the paper's case 2 a hop gets cheap only when all eight pipelines cross it
inside a machine, so no single swap from a random plan gains anything. The softened cost of a hop is
(1 - softness) * slowest pair + softness * mean pair, of an explicit matching (column p of `place` is pipeline p), and
that of DATAP likewise over the stages. It is a start for `anneal`.

S stages, P pipelines, N devices, N - S * P of them spare.
"""

from typing import NamedTuple

import numpy as np

from planner.cost.communication import (
    MatchingScratch,
    improve_matching,
    matching_floor,
    matching_scratch,
    sum_exchanges,
)
from planner.cost.compiled import below, compiled, copy_row, copy_rows, generator, unit
from planner.model.problem import Problem
from planner.search.charges import NOTHING, Charges, SeatScratch, charge, seat_scratch
from planner.search.device_types import interchangeable

UNCHANGED = -1
ALL_SLOTS = -2
SOFTNESS_MOVES = 1000  # moves between two updates of the softness


class Devices(NamedTuple):
    """The devices as annealing knows them: dp and pp are the matrices dp_s and pp_s [N, N] of the Problem; devices with
    equal type_of [N] are interchangeable, so that swapping them is no move."""

    dp: np.ndarray
    pp: np.ndarray
    type_of: np.ndarray


def devices_of(problem: Problem, apart: bool = False) -> Devices:
    """The devices for annealing; `apart`: none is interchangeable with another, as charges tell them apart."""
    type_of = np.arange(problem.n_devices) if apart else interchangeable(problem)
    return Devices(problem.dp_s, problem.pp_s, type_of)


class Cooling(NamedTuple):
    """Temperatures at the first and the last move, in seconds of cost, with a constant ratio between moves."""

    hot_s: float
    cold_s: float
    n_moves: int


class MoveShares(NamedTuple):
    """Parts of the moves that reorder stages, and that swap runs of devices; the others swap two devices."""

    reorder: float
    runs: float


def cost_scale_s(problem: Problem, best_s: float) -> float:
    """The cost of which temperatures are parts: the best so far, or a typical one while the best plan still uses a
    missing link."""
    if 0 < best_s < problem.missing_s:
        return best_s
    dp_s, pp_s = (m[(m > 0) & (m < problem.missing_s)] for m in (problem.dp_s, problem.pp_s))
    typical_dp_s, typical_pp_s = (float(np.median(m)) if m.size else 0.0 for m in (dp_s, pp_s))
    return max(1e-9, problem.n_pipelines * typical_dp_s + problem.n_stages * typical_pp_s)


# ---------------------------------------------------------------------------------------------------------- COMM-COST


class PlacementState(NamedTuple):
    """A placement and the terms of its cost: match[s] [P] and hop_s[s] belong to the hop from stage s to s + 1 (the
    last row is unused), sums[s] [P] are the exchanges of each device, and stage_s[s] is the largest of them."""

    place: np.ndarray
    match: np.ndarray
    sums: np.ndarray
    stage_s: np.ndarray
    hop_s: np.ndarray


def new_state(place: np.ndarray) -> PlacementState:
    """The state of a placement, whose terms _start_state has to fill."""
    S, P = place.shape
    return PlacementState(place, np.zeros((S, P), np.int64), np.zeros((S, P)), np.zeros(S), np.zeros(S))


@compiled
def _soft_hop(pp, left, right, softness):
    worst = 0.0
    total = 0.0
    for p in range(left.shape[0]):
        cost = pp[left[p], right[p]]
        worst = max(worst, cost)
        total += cost
    return (1 - softness) * worst + softness * total / left.shape[0]


@compiled
def _hop(pp, left, right, match, floor, columns, scratch):
    """The cost of a hop: of its best matching, which `match` receives, or of its columns."""
    if columns:
        return _soft_hop(pp, left, right, 0.0)
    return improve_matching(pp, left, right, match, floor, scratch)


@compiled
def _start_state(devices, state, columns, scratch):
    """Fill the matchings and terms of state.place; returns its cost."""
    S, P = state.place.shape
    worst = 0.0
    total = 0.0
    for s in range(S):
        state.stage_s[s] = sum_exchanges(devices.dp, state.place[s], state.sums[s])
        worst = max(worst, state.stage_s[s])
    for s in range(S - 1):
        for a in range(P):
            state.match[s, a] = a
        left = state.place[s]
        right = state.place[s + 1]
        floor = matching_floor(devices.pp, left, right)
        state.hop_s[s] = _hop(devices.pp, left, right, state.match[s], floor, columns, scratch)
        total += state.hop_s[s]
    return worst + total


@compiled
def _propose_order(rng, place, trial, changed, i, j):
    """Swap stages i < j in `trial`, or reverse the range between them."""
    P = place.shape[1]
    if below(rng, np.int64(2)) == 0:
        for a in range(P):
            trial[i, a], trial[j, a] = trial[j, a], trial[i, a]
        changed[i] = changed[j] = ALL_SLOTS
    else:
        for s in range(i, j + 1):
            copy_row(place[i + j - s], trial[s])
            changed[s] = ALL_SLOTS


@compiled
def _propose(rng, devices, state, trial, changed, shares):
    """Write a random move into `trial` [S, P], a copy of state.place; changed[s] becomes the slot that changed in stage
    s, or ALL_SLOTS. False: no move."""
    S, P = trial.shape
    choice = unit(rng)
    i = below(rng, S)
    j = below(rng, S)
    if i == j:
        return False
    if choice < shares.reorder:
        _propose_order(rng, state.place, trial, changed, min(i, j), max(i, j))
        return True
    a = below(rng, P)
    b = below(rng, P)
    length = 1
    if choice < shares.reorder + shares.runs:
        length = 2 + below(rng, np.int64(3))
    if length > 1 and (i + length > S or j + length > S or abs(i - j) < length):
        return False
    moved = False
    for k in range(length):
        left, right = state.place[i + k, a], state.place[j + k, b]
        if devices.type_of[left] != devices.type_of[right]:
            moved = True
        trial[i + k, a] = right
        trial[j + k, b] = left
        changed[i + k] = a
        changed[j + k] = b
        if k + 1 < length:
            a = state.match[i + k, a]
            b = state.match[j + k, b]
    return moved


@compiled
def _swap_exchanges(dp, row, slot, old, sums, trial_sums):
    """DATAP(C_j) after row[slot] has replaced the device `old`, from the sums before the swap."""
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
def _nearest_s(pp, device, row):
    """The cheapest pair that a device can form with a stage."""
    low = pp[device, row[0]]
    for b in range(1, row.shape[0]):
        low = min(low, pp[device, row[b]])
    return low


@compiled
def _quick_hop_floor(pp, place, s, changed):
    """A cheap lower bound of hop s: the changed devices need partners."""
    low = 0.0
    if changed[s] >= 0:
        low = _nearest_s(pp, place[s, changed[s]], place[s + 1])
    if changed[s + 1] >= 0:
        low = max(low, _nearest_s(pp, place[s + 1, changed[s + 1]], place[s]))
    return low


@compiled
def _evaluate(devices, state, trial, changed, allowed_s, columns, scratch):
    """Cost of trial.place, which differs from `state` in changed stages only; infinity as soon as it must exceed
    allowed_s. Bounds of the changed hops replace each other from the cheapest to compute up to the hop itself."""
    dp, pp, _ = devices
    place = trial.place
    S = place.shape[0]
    datap = 0.0
    for s in range(S):
        if changed[s] == ALL_SLOTS:
            trial.stage_s[s] = sum_exchanges(dp, place[s], trial.sums[s])
        elif changed[s] >= 0:
            slot = changed[s]
            old = state.place[s, slot]
            trial.stage_s[s] = _swap_exchanges(dp, place[s], slot, old, state.sums[s], trial.sums[s])
        datap = max(datap, trial.stage_s[s])
    total = datap
    for s in range(S - 1):
        if changed[s] != UNCHANGED or changed[s + 1] != UNCHANGED:
            trial.hop_s[s] = _quick_hop_floor(pp, place, s, changed)
        total += trial.hop_s[s]
    if total > allowed_s:
        return np.inf
    for s in range(S - 1):
        if changed[s] != UNCHANGED or changed[s + 1] != UNCHANGED:
            floor = matching_floor(pp, place[s], place[s + 1])
            total += floor - trial.hop_s[s]
            trial.hop_s[s] = floor
            if total > allowed_s:
                return np.inf
    for s in range(S - 1):
        if changed[s] != UNCHANGED or changed[s + 1] != UNCHANGED:
            floor = trial.hop_s[s]
            trial.hop_s[s] = _hop(pp, place[s], place[s + 1], trial.match[s], floor, columns, scratch)
            total += trial.hop_s[s] - floor
            if total > allowed_s:
                return np.inf
    return total


@compiled
def _copy_changed(changed, source, target):
    """Copy changed stages, and the hops beside them, from one state to another."""
    S = changed.shape[0]
    for s in range(S):
        if changed[s] != UNCHANGED:
            copy_row(source.place[s], target.place[s])
            copy_row(source.sums[s], target.sums[s])
            target.stage_s[s] = source.stage_s[s]
        if s + 1 < S and (changed[s] != UNCHANGED or changed[s + 1] != UNCHANGED):
            copy_row(source.match[s], target.match[s])
            target.hop_s[s] = source.hop_s[s]


class Walk(NamedTuple):
    """The arrays that annealing works on: the placement, a trial of the next move, the stages that differ between the
    two, the spare devices, the best placement met, and scratch."""

    state: PlacementState
    trial: PlacementState
    changed: np.ndarray
    spare: np.ndarray
    best: np.ndarray
    scratch: MatchingScratch
    seat_scratch: SeatScratch


def walk_from(place: np.ndarray, n_devices: int, charges: Charges = NOTHING) -> Walk:
    """A walk of `anneal` that begins at `place` [S, P], and changes it; devices that are not in it are spare."""
    S, P = place.shape
    return Walk(
        state=new_state(place),
        trial=new_state(place.copy()),
        changed=np.full(S, UNCHANGED, np.int64),
        spare=np.setdiff1d(np.arange(n_devices), place),
        best=place.copy(),
        scratch=matching_scratch(P),
        seat_scratch=seat_scratch(n_devices, charges),
    )


@compiled
def _propose_seat(rng, devices, walk, columns, shares):
    """Write a random move into the trial placement. Returns (whether there is one; stage, slot and index of the spare
    device of a swap with one, else -1 each)."""
    state, trial, changed, spare = walk.state, walk.trial, walk.changed, walk.spare
    S, P = state.place.shape
    if spare.shape[0] > 0:
        choice = below(rng, S * P + spare.shape[0])
        if choice >= S * P:
            i, a = below(rng, S), below(rng, P)
            trial.place[i, a] = spare[choice - S * P]
            changed[i] = a
            return True, i, a, choice - S * P
    if columns and unit(rng) < 0.3:
        i, a, b = below(rng, S), below(rng, P), below(rng, P)
        trial.place[i, a], trial.place[i, b] = state.place[i, b], state.place[i, a]
        changed[i] = ALL_SLOTS
        return a != b, -1, -1, -1
    return _propose(rng, devices, state, trial.place, changed, shares), -1, -1, -1


@compiled
def anneal(
    devices: Devices, walk: Walk, charges: Charges, rng: np.ndarray, cooling: Cooling, shares: MoveShares
) -> tuple[float, float]:
    """Anneal the walk's placement in place; walk.best receives the best allowed placement met. Returns (best cost,
    infinite if no placement was allowed; cost of the placement) in seconds, with what is charged. Where nothing is
    charged, no device may be spare."""
    state, trial, changed, scratch = walk.state, walk.trial, walk.changed, walk.scratch
    S = state.place.shape[0]
    is_charged = charges.move_s.shape[0] > 0
    columns = charges.rules.seat_ok.shape[2] > 1
    n_bad = 0
    charged_s = 0.0
    if is_charged:
        n_bad, charged_s = charge(charges, state.place, walk.seat_scratch)
    cost = _start_state(devices, state, columns, scratch) + charged_s + n_bad * charges.violation_s
    for s in range(S):
        changed[s] = ALL_SLOTS
    _copy_changed(changed, state, trial)
    for s in range(S):
        changed[s] = UNCHANGED
    best_cost = cost if n_bad == 0 else np.inf
    copy_rows(state.place, walk.best)
    ratio = (cooling.cold_s / cooling.hot_s) ** (1.0 / max(1, cooling.n_moves))
    temperature = cooling.hot_s
    for _ in range(cooling.n_moves):
        temperature *= ratio
        i = a = r = -1
        if is_charged:
            moved, i, a, r = _propose_seat(rng, devices, walk, columns, shares)
        else:  # faster than the same move by way of _propose_seat
            moved = _propose(rng, devices, state, trial.place, changed, shares)
        new_cost = cost
        if moved:
            allowed_s = cost - temperature * np.log(1.0 - unit(rng))
            if is_charged:
                n_bad, charged_s = charge(charges, trial.place, walk.seat_scratch)
                charged_s += n_bad * charges.violation_s
            new_cost = charged_s + _evaluate(devices, state, trial, changed, allowed_s - charged_s, columns, scratch)
            moved = new_cost <= allowed_s
        if moved:
            cost = new_cost
            if r >= 0:
                walk.spare[r] = state.place[i, a]
            _copy_changed(changed, trial, state)
            if n_bad == 0 and cost < best_cost * (1 - 1e-12):
                best_cost = cost
                copy_rows(state.place, walk.best)
        else:
            _copy_changed(changed, state, trial)
        for s in range(S):
            changed[s] = UNCHANGED
    return best_cost, cost


# ------------------------------------------------------------------------------------------------------- softened cost


class Softness(NamedTuple):
    """The part of the means in the softened cost, at the first move and after the last."""

    first: float
    last: float


class SoftTerms(NamedTuple):
    """Terms of the softened cost: stage_s [S] by stage, hop_s [S] by hop (the last one is unused)."""

    stage_s: np.ndarray
    hop_s: np.ndarray


class RunSwap(NamedTuple):
    """Two runs of devices to exchange: `length` stages of one pipeline each; length 0 if there is nothing to do."""

    stage: int
    pipeline: int
    other_stage: int
    other_pipeline: int
    length: int


@compiled
def _soft_start(devices, place, softness, terms, sums):
    """Fill the terms of a placement [S, P]; returns its softened cost."""
    S = place.shape[0]
    worst = 0.0
    total = 0.0
    cost = 0.0
    for s in range(S):
        terms.stage_s[s] = sum_exchanges(devices.dp, place[s], sums)
        worst = max(worst, terms.stage_s[s])
        total += terms.stage_s[s]
        if s + 1 < S:
            terms.hop_s[s] = _soft_hop(devices.pp, place[s], place[s + 1], softness)
            cost += terms.hop_s[s]
    return cost + (1 - softness) * worst + softness * total / S


@compiled
def _pick_runs(rng, place, type_of, run_share):
    S, P = place.shape
    i, j, a, b = below(rng, S), below(rng, S), below(rng, P), below(rng, P)
    length = 1
    if unit(rng) < run_share:
        length = 1 + below(rng, np.int64(4))
        if i + length > S or j + length > S or a == b or (i != j and abs(i - j) < length):
            length = 0
    elif type_of[place[i, a]] == type_of[place[j, b]]:
        length = 0
    return RunSwap(i, a, j, b, length)


@compiled
def _swap_runs(place, swap):
    i, a, j, b, length = swap
    for k in range(length):
        place[i + k, a], place[j + k, b] = place[j + k, b], place[i + k, a]


@compiled
def _soft_cost(devices, place, swap, softness, terms, trial, sums):
    """Softened cost after a swap of runs, from the terms before; those after go to `trial`."""
    S = place.shape[0]
    i = swap.stage
    j = swap.other_stage
    length = swap.length
    worst = 0.0
    total = 0.0
    cost = 0.0
    for s in range(S):
        changed = 0 <= s - i < length or 0 <= s - j < length
        trial.stage_s[s] = terms.stage_s[s]
        if changed and i != j:
            trial.stage_s[s] = sum_exchanges(devices.dp, place[s], sums)
        worst = max(worst, trial.stage_s[s])
        total += trial.stage_s[s]
        if s + 1 < S:
            trial.hop_s[s] = terms.hop_s[s]
            if changed or 0 <= s + 1 - i < length or 0 <= s + 1 - j < length:
                trial.hop_s[s] = _soft_hop(devices.pp, place[s], place[s + 1], softness)
            cost += trial.hop_s[s]
    return cost + (1 - softness) * worst + softness * total / S


class SoftWalk(NamedTuple):
    """The arrays of softened annealing: the placement, its terms, the terms of the next move, and scratch [P]."""

    place: np.ndarray
    terms: SoftTerms
    trial: SoftTerms
    sums: np.ndarray


def soft_walk_from(place: np.ndarray) -> SoftWalk:
    """A walk of `anneal_softened` that begins at `place` [S, P]."""
    S, P = place.shape
    terms, trial = (SoftTerms(np.zeros(S), np.zeros(S)) for _ in range(2))
    return SoftWalk(place, terms, trial, np.zeros(P))


@compiled
def anneal_softened(
    devices: Devices, walk: SoftWalk, rng: np.ndarray, cooling: Cooling, softness: Softness, run_share: float
) -> float:
    """Anneal the walk's placement in place while temperature and softness fall. Returns the softened cost reached."""
    place, terms, trial, sums = walk
    ratio = (cooling.cold_s / cooling.hot_s) ** (1.0 / max(1, cooling.n_moves))
    temperature = cooling.hot_s
    soft = softness.first
    cost = 0.0
    for move in range(cooling.n_moves):
        if move % SOFTNESS_MOVES == 0:
            soft = softness.first + (softness.last - softness.first) * move / cooling.n_moves
            cost = _soft_start(devices, place, soft, terms, sums)
        temperature *= ratio
        swap = _pick_runs(rng, place, devices.type_of, run_share)
        if swap.length == 0:
            continue
        _swap_runs(place, swap)
        new_cost = _soft_cost(devices, place, swap, soft, terms, trial, sums)
        if new_cost <= cost - temperature * np.log(1.0 - unit(rng)):
            cost = new_cost
            terms, trial = trial, terms
        else:
            _swap_runs(place, swap)
    return cost


# ---------------------------------------------------------------------------------------------------------- compilation


def compile_anneal():
    """Compile `anneal`, or read it from the cache."""
    walk = walk_from(_two_by_two(), 4)
    anneal(_four_devices(), walk, NOTHING, generator(0), Cooling(1.0, 1.0, 1), MoveShares(0.0, 0.0))


def compile_anneal_softened():
    """Compile `anneal_softened`, or read it from the cache."""
    walk = soft_walk_from(_two_by_two())
    anneal_softened(_four_devices(), walk, generator(0), Cooling(1.0, 1.0, 1), Softness(1.0, 0.0), 0.0)


def _four_devices() -> Devices:
    return Devices(np.zeros((4, 4)), np.zeros((4, 4)), np.arange(4))


def _two_by_two() -> np.ndarray:
    return np.arange(4).reshape(2, 2)
