"""Compiled annealing of seats: COMM-COST plus what a move of devices costs, under constraints, with devices left over.

It is the annealing of planner.search.anneal with three additions. A device may wait outside of the plan (spare). Every
violated constraint costs `violation_s`, so that a walk gets past plans that are not allowed; the best plan that it
returns violates none. And a device that changes its stage costs seconds, as the state of its new stage has to come over
a link.

Where constraints are about pipelines, column p of a placement is pipeline p, and a hop costs its slowest pair.
Elsewhere every hop has its best matching.

S stages, P pipelines, N devices, N - S * P of them spare.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planner.cost.communication import matching_scratch, sum_exchanges
from planner.cost.compiled import below, compiled, copy_row, copy_rows, generator, unit
from planner.model.constraints import Rules
from planner.model.problem import Problem, placement_s
from planner.search.anneal import (
    ALL_SLOTS,
    UNCHANGED,
    Cooling,
    Devices,
    MoveShares,
    Softness,
    Walk,
    _copy_changed,
    anneal_softened,
    cost_scale_s,
    evaluate,
    new_state,
    propose,
    soft_walk_from,
    start_state,
)
from planner.search.annealing_chains import in_threads, n_cores
from planner.search.incumbent import Incumbent

SLICE_MOVES, SHORTEST_SLICE = 650_000, 2000  # over the number of devices, but not below the second
HEATS = (0.01, 0.03, 0.15)  # hottest temperatures of a thread's chains in turn, as parts of the cost
COLD = 3e-4
CHAIN_FRAC = 0.45  # of the time or the evaluations, for one chain
SOFTENED_FRAC = 0.25  # of the same, for the softened cost
SOFTENED_HEATS = (0.004, 0.0004)  # its temperatures, first and last
VIOLATION = 0.03  # of the cost, for each constraint that a plan on the way violates
MEAN_WEIGHT = 0.3  # of the mean of the devices' moves beside the longest one: a maximum alone hides progress
SETTLE_HOT, SETTLE_COLD, SETTLE_MOVES = 1e-6, 1e-8, 60_000
N_THREADS_REPRODUCIBLE = 2


class SeatRules(NamedTuple):
    """Constraints for compiled code. seat_ok [N, S, P], or [N, S, 1] where none is about pipelines; stage_mate [N] and
    pipeline_mate [N] are the device with which a device shares its stage or pipeline, or itself. A stage may have most
    [R] devices of a region, and region [N] is that of each device."""

    seat_ok: np.ndarray
    stage_mate: np.ndarray
    pipeline_mate: np.ndarray
    region: np.ndarray
    most: np.ndarray


class Extra(NamedTuple):
    """The costs of a placement besides Eq. 1-4: move_s [N, S] seconds in which a device gets the state of a stage (a
    step is charged the part `per_step` of them); violation_s for a violated constraint."""

    rules: SeatRules
    move_s: np.ndarray
    per_step: float
    violation_s: float


class SeatScratch(NamedTuple):
    """Scratch of `extra_terms`: stage and pipeline of each device [N], devices of each region in a stage [R]."""

    stage_of: np.ndarray
    pipeline_of: np.ndarray
    count: np.ndarray


class SeatWalk(NamedTuple):
    """The arrays that annealing works on: see Walk; the spare devices [R], now and with the best placement; whether
    columns are pipelines; scratch, the last one for exchanges [P]."""

    walk: Walk
    spare: np.ndarray
    best_spare: np.ndarray
    columns: bool
    scratch: SeatScratch
    sums: np.ndarray


def seat_rules(rules: Rules | None, n_devices: int, shape: tuple[int, int]) -> SeatRules:
    """The arrays of constraints; of none, arrays that allow everything."""
    n_stages, n_pipelines = shape
    width = n_pipelines if rules is not None and rules.about_pipelines else 1
    seat_ok = np.ones((n_devices, n_stages, width), np.bool_)
    mates = [np.arange(n_devices), np.arange(n_devices)]
    region = np.zeros(n_devices, np.int64)
    most = [n_devices]
    if rules is not None:
        for d, s, p in rules.pin:
            ok = np.zeros((n_stages, width), np.bool_)
            ok[slice(None) if s is None else s, slice(None) if p is None else p] = True
            seat_ok[d] &= ok
        for d, s, p in rules.forbid:
            seat_ok[d, slice(None) if s is None else s, slice(None) if p is None else p] = False
        for mate, lists in zip(mates, (rules.same_stage, rules.same_pipeline), strict=True):
            for group in lists:
                _join(mate, group)
        of_members: dict[tuple[int, ...], int] = {}
        for members, limit in rules.limits:
            of_members[members] = min(limit, of_members.get(members, limit))
        for members, limit in of_members.items():
            region[list(members)] = len(most)
            most.append(limit)
    return SeatRules(seat_ok, mates[0], mates[1], region, np.array(most))


def _join(mate: np.ndarray, group: tuple[int, ...]):
    """Let all devices of a group, and of the groups that it touches, have one mate."""
    heads = np.unique(mate[list(group)])
    mate[np.isin(mate, heads)] = heads[0]


@compiled
def extra_terms(extra, place, scratch):
    """(violated constraints, seconds of moving that a step is charged) of place [S, P]."""
    S, P = place.shape
    rules = extra.rules
    for d in range(scratch.stage_of.shape[0]):
        scratch.stage_of[d] = -1
    n_bad = 0
    longest = 0.0
    total = 0.0
    for s in range(S):
        for r in range(scratch.count.shape[0]):
            scratch.count[r] = 0
        for p in range(P):
            d = place[s, p]
            scratch.stage_of[d] = s
            scratch.pipeline_of[d] = p
            if not rules.seat_ok[d, s, p if rules.seat_ok.shape[2] > 1 else 0]:
                n_bad += 1
            scratch.count[rules.region[d]] += 1
            longest = max(longest, extra.move_s[d, s])
            total += extra.move_s[d, s]
        for r in range(scratch.count.shape[0]):
            n_bad += max(0, scratch.count[r] - rules.most[r])
    for d in range(scratch.stage_of.shape[0]):
        if scratch.stage_of[d] >= 0:
            mate = rules.stage_mate[d]
            if mate != d and scratch.stage_of[mate] >= 0 and scratch.stage_of[mate] != scratch.stage_of[d]:
                n_bad += 1
            mate = rules.pipeline_mate[d]
            if mate != d and scratch.stage_of[mate] >= 0 and scratch.pipeline_of[mate] != scratch.pipeline_of[d]:
                n_bad += 1
    return n_bad, extra.per_step * (longest + MEAN_WEIGHT * total / (S * P))


@compiled
def columns_s(devices, place, sums):
    """COMM-COST of place [S, P] with its own stage order and its columns as pipelines."""
    S, P = place.shape
    worst = 0.0
    total = 0.0
    for s in range(S):
        worst = max(worst, sum_exchanges(devices.dp, place[s], sums))
        if s + 1 < S:
            hop = 0.0
            for p in range(P):
                hop = max(hop, devices.pp[place[s, p], place[s + 1, p]])
            total += hop
    return worst + total


@compiled
def _propose_seat(rng, devices, seats, shares):
    """Write a random move into the trial placement. Returns (whether there is one; stage, slot and index of the spare
    device of a swap with one, else -1 each)."""
    state, trial, changed, _, _ = seats.walk
    S, P = state.place.shape
    choice = below(rng, S * P + seats.spare.shape[0])
    if choice >= S * P:
        i, a = below(rng, S), below(rng, P)
        trial.place[i, a] = seats.spare[choice - S * P]
        changed[i] = a
        return True, i, a, choice - S * P
    if seats.columns and unit(rng) < 0.3:
        i, a, b = below(rng, S), below(rng, P), below(rng, P)
        trial.place[i, a], trial.place[i, b] = state.place[i, b], state.place[i, a]
        changed[i] = ALL_SLOTS
        return a != b, -1, -1, -1
    return propose(rng, devices, state, trial.place, changed, shares), -1, -1, -1


@compiled
def _anneal_seats(devices, seats, extra, rng, cooling, shares):
    """Anneal seats.walk.state.place. Returns (best cost, infinite if no plan on the way was allowed; cost at the end),
    both with what moves are charged."""
    state, trial, changed, best, scratch = seats.walk
    S, P = state.place.shape
    cost = start_state(devices, state, scratch)
    if seats.columns:
        cost = columns_s(devices, state.place, seats.sums)
        for s in range(S):
            for a in range(P):
                state.match[s, a] = a
    for s in range(S):
        changed[s] = ALL_SLOTS
    _copy_changed(changed, state, trial)
    for s in range(S):
        changed[s] = UNCHANGED
    n_bad, move_s = extra_terms(extra, state.place, seats.scratch)
    cost += move_s + n_bad * extra.violation_s
    best_cost = np.inf
    if n_bad == 0:
        best_cost = cost
    copy_rows(state.place, best)
    copy_row(seats.spare, seats.best_spare)
    ratio = (cooling.cold_s / cooling.hot_s) ** (1.0 / max(1, cooling.n_moves))
    temperature = cooling.hot_s
    for _ in range(cooling.n_moves):
        temperature *= ratio
        moved, i, a, r = _propose_seat(rng, devices, seats, shares)
        new_cost = cost
        if moved:
            n_bad, move_s = extra_terms(extra, trial.place, seats.scratch)
            extra_s = move_s + n_bad * extra.violation_s
            allowed_s = cost - temperature * np.log(1.0 - unit(rng))
            if extra_s > allowed_s:
                moved = False
            else:
                if seats.columns:
                    new_cost = columns_s(devices, trial.place, seats.sums) + extra_s
                else:
                    new_cost = evaluate(devices, state, trial, changed, allowed_s - extra_s, scratch) + extra_s
                moved = new_cost <= allowed_s
        if moved:
            cost = new_cost
            if r >= 0:
                seats.spare[r] = state.place[i, a]
            _copy_changed(changed, trial, state)
            if n_bad == 0 and cost < best_cost * (1 - 1e-12):
                best_cost = cost
                copy_rows(state.place, best)
                copy_row(seats.spare, seats.best_spare)
        else:
            _copy_changed(changed, state, trial)
        for s in range(S):
            changed[s] = UNCHANGED
    return best_cost, cost


# ------------------------------------------------------------------------------------------------------------- threads


def seat_scratch(n_devices: int, extra: Extra) -> SeatScratch:
    return SeatScratch(
        np.empty(n_devices, np.int64), np.empty(n_devices, np.int64), np.empty(len(extra.rules.most), np.int64)
    )


def new_walk(place: np.ndarray, n_devices: int, extra: Extra) -> SeatWalk:
    """The arrays of annealing from a placement [S, P]; devices that are not in the placement are spare."""
    n_stages, n_pipelines = place.shape
    place = np.ascontiguousarray(place, np.int64)
    spare = np.setdiff1d(np.arange(n_devices), place)
    changed = np.full(n_stages, UNCHANGED, np.int64)
    state = new_state(place.copy())
    walk = Walk(state, new_state(place.copy()), changed, place.copy(), matching_scratch(n_pipelines))
    return SeatWalk(
        walk=walk,
        spare=spare,
        best_spare=spare.copy(),
        columns=extra.rules.seat_ok.shape[2] > 1,
        scratch=seat_scratch(n_devices, extra),
        sums=np.empty(n_pipelines),
    )


def anneal_seats(
    problem: Problem, incumbent: Incumbent, extra: Extra, seed: int, start: np.ndarray, softened: bool = False
):
    """Anneal from an allowed placement [S, P] on all cores until the incumbent is done, and offer what is found, at its
    cost with what its moves are charged. `softened`: there are no constraints, so every second thread may begin with
    the softened cost, which gets further from its start."""
    limit = incumbent.budget.evaluations
    n_threads = n_cores() if limit is None else N_THREADS_REPRODUCIBLE
    most = None if limit is None else max(1, limit // n_threads)
    search = SeatSearch(problem, incumbent, extra, start, softened)
    calls = [functools.partial(search.run, seed, thread, most) for thread in range(n_threads)]
    with in_threads(calls[1:]):
        calls[0]()


def settle(problem: Problem, extra: Extra, place: np.ndarray, seed: int) -> np.ndarray:
    """An allowed placement that costs no more than `place` [S, P], with fewer and shorter moves: annealing at
    temperatures at which moves count and costs do not rise."""
    scale_s = cost_scale_s(problem, placement_s(problem, place))
    cooling = Cooling(scale_s * SETTLE_HOT, scale_s * SETTLE_COLD, SETTLE_MOVES)
    walk = new_walk(place, problem.n_devices, extra)
    shares = MoveShares(reorder=0.02, runs=0.1)
    best_s, _ = _anneal_seats(devices_apart(problem), walk, extra, generator(seed), cooling, shares)
    return walk.walk.best if np.isfinite(best_s) else place


@dataclass(eq=False)
class SeatSearch:
    """Annealing of seats in several threads, from the placement `start`."""

    problem: Problem
    incumbent: Incumbent
    extra: Extra
    start: np.ndarray
    softened: bool

    def run(self, seed: int, thread: int, most: int | None):
        """The work of one thread: chains from the best placement that it knows, each from hot to cold. `most` moves, or
        None where the incumbent's clock counts."""
        problem, incumbent = self.problem, self.incumbent
        rng = generator(seed * 1009 + thread)
        best, best_s = self.start, np.inf
        n_moves = 0
        chain = thread
        while not incumbent.done and self._spent(n_moves, most) < 1.0:
            scale_s = cost_scale_s(problem, min(best_s, incumbent.best_s))
            hot, cold = HEATS[chain % len(HEATS)] * scale_s, COLD * scale_s
            if most is None and chain > thread and incumbent.best is not None:
                best = incumbent.best  # of any thread
            place = best
            began = now = self._spent(n_moves, most)
            if self.softened and chain == thread and thread % 2:
                place, moves = self._soften(rng, place, scale_s, began, most)
                n_moves += moves
                now = self._spent(n_moves, most)
            step_frac = 0.01
            while now < min(1.0, began + CHAIN_FRAC) and not incumbent.done:
                first = (now - began) / CHAIN_FRAC
                last = min(1.0, first + step_frac / CHAIN_FRAC)
                cooling = Cooling(hot * (cold / hot) ** first, hot * (cold / hot) ** last, self._slice_moves)
                walk = new_walk(place, problem.n_devices, self.extra)
                found_s, _ = _anneal_seats(devices_apart(problem), walk, self.extra, rng, cooling, self._shares)
                place = walk.walk.state.place
                if found_s < best_s:
                    best, best_s = walk.walk.best.copy(), found_s
                    incumbent.offer(best, best_s, thread, "seats")
                n_moves += self._slice_moves
                incumbent.count(self._slice_moves)
                step_frac = self._spent(n_moves, most) - now
                now += step_frac
            chain += 1

    def _soften(
        self, rng: np.ndarray, place: np.ndarray, scale_s: float, began: float, most: int | None
    ) -> tuple[np.ndarray, int]:
        """A placement from annealing on the softened cost for a part of a chain, and the moves that took."""
        place = np.ascontiguousarray(place).copy()
        hot, cold = (heat * scale_s for heat in SOFTENED_HEATS)
        n_moves = 0
        done = step = 0.0
        while done < 1.0 and not self.incumbent.done:
            last = min(1.0, done + max(step, 0.02))
            cooling = Cooling(hot * (cold / hot) ** done, hot * (cold / hot) ** last, 2 * self._slice_moves)
            softness = Softness(1.0 - done, 1.0 - last)
            walk = soft_walk_from(place)
            anneal_softened(devices_apart(self.problem), walk, rng, cooling, softness, self._shares.runs)
            n_moves += cooling.n_moves
            self.incumbent.count(cooling.n_moves)
            spent = (self._spent(n_moves, most) - (0.0 if most is not None else began)) / SOFTENED_FRAC
            step, done = spent - done, spent
        return place, n_moves

    def _spent(self, n_moves: int, most: int | None) -> float:
        """The part of the budget that is spent."""
        return self.incumbent.elapsed_s / self.incumbent.time_limit_s if most is None else n_moves / most

    @property
    def _slice_moves(self) -> int:
        return max(SHORTEST_SLICE, SLICE_MOVES // self.problem.n_devices)

    @property
    def _shares(self) -> MoveShares:
        return MoveShares(reorder=0.3 if self.problem.n_pipelines <= 2 else 0.02, runs=0.3)


def devices_apart(problem: Problem) -> Devices:
    """The devices for annealing, none interchangeable with another: constraints and moves tell them apart."""
    return Devices(problem.dp_s, problem.pp_s, np.arange(problem.n_devices))
