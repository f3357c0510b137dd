"""Annealing on the compiled estimate of a step, plus what moves of devices cost, under constraints.

It is the annealing of planner.step_time.estimate with the additions of planner.search.seat_annealing: a violated
constraint costs seconds on the way and is not in the result; a device that changes its stage is charged for the state
that it has to fetch. Column p of a placement is pipeline p. S stages, P pipelines, N devices.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.cost.compiled import below, compiled, copy_row, copy_rows, unit
from planner.search.seat_annealing import Extra, SeatScratch, extra_terms, seat_scratch
from planner.step_time.estimate import (
    Heat,
    Memory,
    Placement,
    _allowed,
    _swap,
    _time_pipeline,
    close_step,
    new_timeline,
)
from planner.step_time.tune import Layout, estimate_s, step_data
from planner.step_time.workload import StepWorkload


class StepSeats(NamedTuple):
    """The arrays that annealing works on: the placement now and the best allowed one, and scratch."""

    now: Placement
    best: Placement
    scratch: SeatScratch


@compiled
def anneal_step_seats(data, memory, seats, extra, rng, heat):
    """Anneal seats.now.place by swaps of two devices, placed or spare. Returns the least estimate of an allowed
    placement with what its moves are charged, which seats.best receives; infinite if none was met."""
    placement = seats.now
    S, P = placement.place.shape
    timeline = new_timeline(S, P)
    saved_done = np.empty((2, S))
    saved_longest = np.empty(2)
    home = placement.place.min()
    for p in range(P):
        _time_pipeline(data, placement.place, home, p, timeline)
    step, cost = close_step(data, placement.place, home, timeline)
    n_bad, move_s = extra_terms(extra, placement.place, seats.scratch)
    cost += move_s + n_bad * extra.violation_s
    best = np.inf
    if n_bad == 0:
        best = step + move_s
        copy_rows(placement.place, seats.best.place)
        copy_row(placement.spare, seats.best.spare)
    for k in range(heat.n_moves):
        temperature = heat.hot * step * (1.0 - k / heat.n_moves) + 1e-9
        i = below(rng, S)
        p = below(rng, P)
        other = below(rng, S * P + placement.spare.shape[0])
        if not _allowed(placement, memory, i, p, other):
            continue
        q = p if other >= S * P else other % P
        for slot, pipeline in enumerate((p, q)):
            saved_done[slot] = timeline.done[pipeline]
            saved_longest[slot] = timeline.longest[pipeline]
        allowed = cost - temperature * np.log(1.0 - unit(rng))
        _swap(placement, i, p, other)
        n_bad, move_s = extra_terms(extra, placement.place, seats.scratch)
        extra_s = move_s + n_bad * extra.violation_s
        if extra_s > allowed:
            _swap(placement, i, p, other)
            continue
        _time_pipeline(data, placement.place, home, p, timeline)
        if q != p:
            _time_pipeline(data, placement.place, home, q, timeline)
        new_step, new_cost = close_step(data, placement.place, home, timeline)
        if new_cost + extra_s <= allowed:
            step = new_step
            cost = new_cost + extra_s
            if n_bad == 0 and step + move_s < best:
                best = step + move_s
                copy_rows(placement.place, seats.best.place)
                copy_row(placement.spare, seats.best.spare)
            continue
        for slot, pipeline in enumerate((p, q)):
            timeline.done[pipeline] = saved_done[slot]
            timeline.longest[pipeline] = saved_longest[slot]
        _swap(placement, i, p, other)
    return best


def improve_seats(
    workload: StepWorkload, layout: Layout, extra: Extra, rng: np.ndarray, heat: Heat
) -> tuple[float, Layout]:
    """Anneal a layout by swaps of devices; its layers, shares and depth stay. Returns the layout with the least
    estimate plus what its moves are charged, and that sum; infinite if no allowed one was met."""
    loads = workload.loads(layout.depth, layout.shares)
    need = [workload.stage_bytes(lo, hi, load) for (lo, hi), load in zip(layout.stages, loads, strict=True)]
    memory = Memory(np.array(workload.memory_bytes), np.array(need, dtype=float))
    now, best = (Placement(layout.placement.copy(), layout.spare.copy()) for _ in range(2))
    seats = StepSeats(now, best, seat_scratch(workload.network.n_devices, extra))
    charged_s = anneal_step_seats(step_data(workload, layout), memory, seats, extra, rng, heat)
    moved = replace(layout, placement=seats.best.place, spare=seats.best.spare)
    step_s = estimate_s(workload, moved)
    return charged_s, replace(moved, step_s=step_s)
