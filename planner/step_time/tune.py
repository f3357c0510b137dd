"""From a placement to a layout that could run: layer ranges, microbatches of each pipeline, forwards in flight.

Everything here goes by the compiled estimate; the simulator has the last word (planner.step_time.simulate).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxdt.run.config import SyncConfig
from jaxdt.run.plan import even_shares
from planner.cost.compiled import at_once, generator, interpreted, is_compiled
from planner.model.layer_cuts import Ranges
from planner.model.prices import HOUR_S, StepPrice, step_price
from planner.search.charges import NOTHING, VIOLATION, Charges, seat_scratch
from planner.search.seats import Before, Seats
from planner.step_time.estimate import (
    Heat,
    Memory,
    Prices,
    StepData,
    StepWalk,
    anneal_step,
    balance,
    egress,
    estimate,
)
from planner.step_time.workload import StepWorkload

DEPTH_GROWTHS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
FEW_DEPTH_GROWTHS = (1.0, 3.0)
SLICE_BYTES = float(SyncConfig().slice_bytes)
WORTH_IT = 0.995
SLICE_WORK = 4_000_000  # Works that a slice of annealing times, some tens of milliseconds
N_INTERPRETED = 16  # microbatches above the forwards in flight, from which a step before compilation is extrapolated


@dataclass(frozen=True, eq=False)
class Layout:
    """placement [S, P] of device indices, and the devices left out; step_s is the estimate of a step."""

    placement: np.ndarray
    spare: np.ndarray
    stages: Ranges
    shares: tuple[int, ...]
    depth: tuple[int, ...]
    step_s: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.placement.shape

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for layouts that run in the same way."""
        return self.placement.tobytes(), self.stages, self.shares, self.depth


def depths(n_stages: int, share: int, growths: tuple[float, ...]) -> Iterator[tuple[int, ...]]:
    """Forwards in flight per stage. The first are 1F1B's usual ones; then each stage has more and more above the stage
    that follows it, which hides the latency of slow links. Never more than the microbatches there are."""
    seen = set()
    for growth in growths:
        depth = tuple(min(share, 1 + round(growth * (n_stages - 1 - s))) for s in range(n_stages))
        if depth not in seen:
            seen.add(depth)
            yield depth


def shallow_depths(n_stages: int, share: int) -> Iterator[tuple[int, ...]]:
    """Fewer forwards in flight than usual, for stages short of memory."""
    for most in range(n_stages - 1, 0, -1):
        yield tuple(min(share, most, n_stages - s) for s in range(n_stages))


def tune(workload: StepWorkload, placement: np.ndarray, growths: tuple[float, ...] = DEPTH_GROWTHS) -> Layout | None:
    """The best layout for a placement; None if no split fits its memory."""
    placement = np.ascontiguousarray(placement, dtype=np.int64)
    n_stages, n_pipelines = placement.shape
    shares = even_shares(workload.n_microbatches, n_pipelines)
    if workload.schedule == "gpipe":
        return _layout(workload, placement, shares, (shares[0],) * n_stages)
    best = None
    for depth in depths(n_stages, shares[0], growths):
        layout = _layout(workload, placement, shares, depth)
        if layout is None or (best is not None and layout.step_s > WORTH_IT * best.step_s):
            break
        best = layout
    if best is None:
        fitting = (_layout(workload, placement, shares, depth) for depth in shallow_depths(n_stages, shares[0]))
        best = next((layout for layout in fitting if layout is not None), None)
    return _balanced(workload, best) if best and is_compiled(balance) else best


def _layout(
    workload: StepWorkload, placement: np.ndarray, shares: tuple[int, ...], depth: tuple[int, ...]
) -> Layout | None:
    stages = workload.split(placement, depth)
    return None if stages is None else layout_of(workload, placement, stages, shares, depth)


def layout_of(
    workload: StepWorkload, placement: np.ndarray, stages: Ranges, shares: tuple[int, ...], depth: tuple[int, ...]
) -> Layout:
    """The layout with its estimate; devices that are not in the placement are left out."""
    spare = np.setdiff1d(np.arange(workload.network.n_devices), placement)
    layout = Layout(np.ascontiguousarray(placement, np.int64), spare, stages, shares, depth, 0.0)
    return replace(layout, step_s=estimate_s(workload, layout))


def _balanced(workload: StepWorkload, layout: Layout) -> Layout:
    """The layout with more microbatches for faster pipelines, where that is worth it."""
    data = step_data(workload, layout)
    balance(data, layout.placement)
    balanced = replace(layout, shares=tuple(int(n) for n in data.shares))
    balanced = replace(balanced, step_s=estimate_s(workload, balanced))
    if balanced.step_s >= WORTH_IT * layout.step_s:
        return layout
    fits = workload.fits(balanced.placement, balanced.stages, balanced.depth, balanced.shares)
    return balanced if fits else layout


def step_data(workload: StepWorkload, layout: Layout, shares: tuple[int, ...] | None = None) -> StepData:
    """The data of the compiled estimate, with other shares than the layout's if given."""
    gradient_bytes, tied_bytes = workload.gradient_bytes(layout.stages)
    return StepData(
        kind_of=workload.kind_of,
        work_s=workload.work_table(layout.stages),
        latency_s=workload.latency_s,
        boundary_s=workload.s_per_byte * workload.boundary_bytes,
        s_per_byte=workload.s_per_byte,
        gradient_bytes=gradient_bytes,
        tied_bytes=tied_bytes,
        slice_bytes=SLICE_BYTES,
        exchanges_per_step=workload.exchanges_per_step,
        shares=np.array(shares or layout.shares),
        depth=np.array(layout.depth),
        boundary_bytes=float(workload.boundary_bytes),
        host_of=workload.line_host_of,
        out_s=workload.line_out_s,
        in_s=workload.line_in_s,
    )


def estimate_s(workload: StepWorkload, layout: Layout, shares: tuple[int, ...] | None = None) -> float:
    """Estimated seconds of a step, with other shares than the layout's if given. Until the estimate is compiled, steps
    of fewer microbatches are estimated: beyond those that fill the pipelines each one takes as long as any other."""
    shares = shares or layout.shares
    if is_compiled(estimate):
        return estimate(step_data(workload, layout, shares), layout.placement)
    seconds = lambda n: interpreted(estimate)(step_data(workload, layout, scaled_shares(shares, n)), layout.placement)  # noqa: E731
    most, fewer, few = (max(shares), layout.depth[0] + 2 * N_INTERPRETED, layout.depth[0] + N_INTERPRETED)
    if most <= fewer:
        return seconds(most)
    fewer_s = seconds(fewer)
    return fewer_s + (most - fewer) * (fewer_s - seconds(few)) / N_INTERPRETED


def scaled_shares(shares: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Shares in proportion to these, the largest of which is `most`."""
    return tuple(max(1, round(share * most / max(shares))) for share in shares)


def prices_of(workload: StepWorkload) -> Prices:
    """The prices of the compiled search."""
    rules = workload.price_rules
    most_per_s = np.inf if rules.budget_per_hour is None else rules.budget_per_hour / HOUR_S
    return Prices(workload.price_per_s, workload.egress_per_byte, rules.is_minimised, most_per_s)


def price_of(workload: StepWorkload, layout: Layout, step_s: float) -> StepPrice:
    """The price of a layout's step if the step takes step_s seconds."""
    egress_per_step = at_once(egress)(step_data(workload, layout), prices_of(workload), layout.placement)
    return step_price(workload.network, layout.placement.ravel(), step_s, egress_per_step)


def score(workload: StepWorkload, layout: Layout, step_s: float | None = None, seats: Seats | None = None) -> float:
    """The value that is minimised: seconds of a step (step_s None: as estimated) with what seats are charged, or its
    price."""
    seconds = layout.step_s if step_s is None else step_s
    if workload.price_rules.is_minimised:
        return price_of(workload, layout, seconds).per_step
    return seconds + (seats.charged_s(layout.stages, layout.placement) if seats else 0.0)


def kept(workload: StepWorkload, before: Before, placement: np.ndarray) -> Layout | None:
    """The placement with the layers and forwards in flight of a plan that runs; None if it does not fit."""
    plan, n_pipelines = before.plan, placement.shape[1]
    shares = even_shares(workload.n_microbatches, n_pipelines)
    depth = tuple(min(shares[0], plan.depth(s)) for s in range(plan.n_stages))
    if workload.schedule == "gpipe":
        depth = (shares[0],) * plan.n_stages
    if not workload.fits(placement, plan.stages, depth, shares):
        return None
    return layout_of(workload, placement, plan.stages, shares, depth)


def compile_kernels(workload: StepWorkload, layout: Layout) -> bool:
    """Compile what estimates and annealing call, or load it from the disk. Returns True."""
    data = step_data(workload, layout)
    estimate(data, layout.placement)
    balance(data, layout.placement)
    egress(data, prices_of(workload), layout.placement)
    improve(workload, layout, generator(0), Heat(0.0, 1))
    return True


def anneal_layout(
    workload: StepWorkload, layout: Layout, bits: np.ndarray, heat: Heat, charges: Charges = NOTHING
) -> Layout:
    """The layout with the least estimate and charges that annealing by swaps of devices meets; its layers, shares and
    depth stay."""
    loads = workload.loads(layout.depth, layout.shares)
    need = [workload.stage_bytes(lo, hi, load) for (lo, hi), load in zip(layout.stages, loads, strict=True)]
    memory = Memory(np.array(workload.memory_bytes), np.array(need, dtype=float))
    n_devices = workload.network.n_devices
    place = np.array(layout.placement, np.int64, order="C")
    walk = StepWalk(place, layout.spare.copy(), place.copy(), seat_scratch(n_devices, charges))
    anneal_step(step_data(workload, layout), memory, prices_of(workload), charges, walk, bits, heat)
    return layout_of(workload, walk.best, layout.stages, layout.shares, layout.depth)


def improve(workload: StepWorkload, layout: Layout, bits: np.ndarray, heat: Heat, seats: Seats | None = None) -> Layout:
    """Anneal a layout by swaps of devices; its layers, shares and depth are chosen again at the end."""
    charges = seats.charges(layout.stages, VIOLATION * layout.step_s) if seats else NOTHING
    moved = anneal_layout(workload, layout, bits, heat, charges)
    tuned = tune(workload, moved.placement)
    fits = workload.fits(moved.placement, moved.stages, moved.depth, moved.shares)  # hosts have memory, too
    layouts = [candidate for candidate in (layout, moved if fits else None, tuned) if candidate is not None]
    allowed = [candidate for candidate in layouts if seats is None or seats.allows(candidate.placement)]
    return min(allowed, key=lambda candidate: score(workload, candidate, seats=seats))


def slice_moves(layout: Layout) -> int:
    """Swaps that take some tens of milliseconds."""
    n_stages, n_pipelines = layout.shape
    work_per_move = 4 * n_stages * max(layout.shares) + 8 * n_stages * n_pipelines**2
    return max(20, SLICE_WORK // work_per_move)
