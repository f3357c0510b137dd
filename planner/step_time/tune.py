"""From a placement to a layout that could run: layer ranges, microbatches of each pipeline, forwards in flight.

All by the compiled estimate; the simulator has the last word (planner.step_time.simulate).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jaxdt.spec.config import SyncConfig
from jaxdt.spec.plan import even_shares
from planner.model.layers import Ranges
from planner.step_time.estimate import anneal_step, balance, estimate
from planner.step_time.workload import Job

DEPTH_GROWTH = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
FEW_GROWTHS = (1.0, 3.0)
SLICE_BYTES = float(SyncConfig().slice_bytes)
WORTH_IT = 0.995
SLICE_WORK = 4_000_000  # Works that a slice of annealing times, some tens of milliseconds


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


def depths(n_stages: int, share: int, growths: tuple[float, ...]) -> Iterator[tuple[int, ...]]:
    """Forwards in flight per stage, from 1F1B's usual ones to more and more per stage that follows: those hide the
    latency of slow links. Never more than the microbatches there are."""
    seen = set()
    for growth in growths:
        depth = tuple(min(share, 1 + round(growth * (n_stages - 1 - s))) for s in range(n_stages))
        if depth not in seen:
            seen.add(depth)
            yield depth


def shallow(n_stages: int, share: int) -> Iterator[tuple[int, ...]]:
    """Fewer forwards in flight than usual, for stages short of memory."""
    for most in range(n_stages - 1, 0, -1):
        yield tuple(min(share, most, n_stages - s) for s in range(n_stages))


def tune(job: Job, placement: np.ndarray, growths: tuple[float, ...] = DEPTH_GROWTH) -> Layout | None:
    """The best layout found for a placement; None if no split fits its memory."""
    placement = np.ascontiguousarray(placement, dtype=np.int64)
    n_stages, n_pipelines = placement.shape
    shares = np.array(even_shares(job.n_microbatches, n_pipelines))
    if job.schedule == "gpipe":
        return _layout(job, placement, shares, (int(shares[0]),) * n_stages)
    best = None
    for depth in depths(n_stages, int(shares[0]), growths):
        found = _layout(job, placement, shares, depth)
        if found is None or (best is not None and found.step_s > WORTH_IT * best.step_s):
            break
        best = found
    if best is None:
        fitting = (_layout(job, placement, shares, depth) for depth in shallow(n_stages, int(shares[0])))
        best = next((found for found in fitting if found is not None), None)
    return best and _balanced(job, best)


def _layout(job: Job, placement: np.ndarray, shares: np.ndarray, depth: tuple[int, ...]) -> Layout | None:
    stages = job.split(placement, depth)
    if stages is None:
        return None
    spare = np.setdiff1d(np.arange(job.network.n_devices), placement)
    layout = Layout(placement, spare, stages, tuple(int(n) for n in shares), depth, 0.0)
    return replace(layout, step_s=estimate_s(job, layout))


def _balanced(job: Job, layout: Layout) -> Layout:
    """With more microbatches for faster pipelines, where that is worth it."""
    shares = np.array(layout.shares)
    place, work, links = layout.placement, job.work_table(layout.stages), _links(job)
    balance(place, job.kind_of, work, links[0], links[1], shares, np.array(layout.depth))
    found = replace(layout, shares=tuple(int(n) for n in shares))
    found = replace(found, step_s=estimate_s(job, found))
    return found if found.step_s < WORTH_IT * layout.step_s else layout


def _links(job: Job) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Latency [s], one boundary tensor's time on a link [s], seconds per byte, all [N, N]."""
    return job.latency_s, job.s_per_byte * job.boundary_bytes, job.s_per_byte


def estimate_s(job: Job, layout: Layout, shares: tuple[int, ...] | None = None) -> float:
    """Estimated seconds of a step, with other shares than the layout's if given."""
    work, sizes = job.work_table(layout.stages), job.gradient_bytes(layout.stages)
    counts = np.array(shares or layout.shares)
    longest = np.empty(len(counts))
    return estimate(
        layout.placement, job.kind_of, work, *_links(job), *sizes, SLICE_BYTES, counts, np.array(layout.depth), longest
    )


def improve(job: Job, layout: Layout, bits: np.ndarray, heat: float, n_moves: int) -> Layout:
    """Anneal a layout by swaps of devices; its layers, shares and depth are chosen anew at the end."""
    place, spare = layout.placement.copy(), layout.spare.copy()
    best, best_spare = place.copy(), spare.copy()
    work, sizes = job.work_table(layout.stages), job.gradient_bytes(layout.stages)
    need = [job.stage_bytes(*r, d) for r, d in zip(layout.stages, layout.depth, strict=True)]
    room = np.array(job.memory_bytes)
    counts, depth = np.array(layout.shares), np.array(layout.depth)
    anneal_step(
        place,
        spare,
        best,
        best_spare,
        job.kind_of,
        work,
        *_links(job),
        *sizes,
        SLICE_BYTES,
        counts,
        depth,
        room,
        np.array(need, dtype=float),
        bits,
        heat,
        n_moves,
    )
    moved = replace(layout, placement=best, spare=best_spare)
    moved = replace(moved, step_s=estimate_s(job, moved))
    tuned = tune(job, best)
    return min((found for found in (layout, moved, tuned) if found is not None), key=lambda found: found.step_s)


def slice_moves(layout: Layout) -> int:
    """Swaps that take some tens of milliseconds."""
    n_stages, n_pipelines = layout.shape
    a_move = 4 * n_stages * max(layout.shares) + 8 * n_stages * n_pipelines**2
    return max(20, SLICE_WORK // a_move)
