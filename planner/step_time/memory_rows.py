"""Rows of devices for stages, so that every stage has the memory that it needs: a start where memory decides who may
stand where, such as large devices at both ends.

A row has as much room as its smallest device, so the devices are cut into rows by their room. Rows of about equal room
are interchangeable; how many layers the first stages can hold then depends only on how many rows of each size they
have.
"""

import itertools
import math

import numpy as np

from jaxdt.run.plan import even_shares
from planner.step_time.workload import LEAST_LOAD, StepWorkload, even_split

MAX_SIZES = 4  # of rows that are told apart; the room of others is rounded down
MAX_STATES = 20_000  # of numbers of rows of each size that are looked at


def rows_for_memory(workload: StepWorkload, devices: np.ndarray, n_stages: int) -> np.ndarray | None:
    """A placement [S, P] of the devices in which some cut of the layers fits, with as many forwards in flight as usual
    or, if need be, with one; None if even layers fit on any device, or if none fits."""
    room = np.array(workload.memory_bytes)[devices]
    stages = even_split(workload, n_stages)
    if all(workload.stage_bytes(lo, hi, LEAST_LOAD) <= room.min() for lo, hi in stages):
        return None
    rows = devices[np.lexsort((devices, -room))].reshape(n_stages, -1)
    row_room = np.array(workload.memory_bytes)[rows].min(axis=1)
    shares = even_shares(workload.n_microbatches, rows.shape[1])
    for most in (n_stages, 1):
        depth = tuple(min(shares[0], most, n_stages - s) for s in range(n_stages))
        order = _order(workload, row_room, depth, shares)
        if order is not None:
            return rows[order]
    return None


def _sizes(row_room: np.ndarray) -> list[list[int]]:
    """The rows of each size, the largest first; the least room of a list counts."""
    lists = [list(group) for _, group in itertools.groupby(range(len(row_room)), key=lambda row: row_room[row])]
    while len(lists) > MAX_SIZES or math.prod(len(rows) + 1 for rows in lists) > MAX_STATES:
        gaps = [row_room[one[-1]] - row_room[other[-1]] for one, other in itertools.pairwise(lists)]
        at = int(np.argmin(gaps))
        lists[at : at + 2] = [lists[at] + lists[at + 1]]
    return lists


def _order(
    workload: StepWorkload, row_room: np.ndarray, depth: tuple[int, ...], shares: tuple[int, ...]
) -> list[int] | None:
    """The row of each stage in an order in which the layers fit; None if there is none."""
    cuts = workload.cuts
    loads = workload.loads(depth, shares)
    lists = _sizes(row_room)
    n_stages = len(depth)
    # numbers of rows of each size that the first stages have -> (index of the last cut that they reach, the numbers
    # without the last of these stages, the size of its row)
    reached: dict[tuple[int, ...], tuple[int, tuple[int, ...], int]] = {(0,) * len(lists): (0, (), -1)}
    for used in sorted(itertools.product(*(range(len(rows) + 1) for rows in lists)), key=sum):
        if used not in reached or (stage := sum(used)) == n_stages:
            continue
        lo = reached[used][0]
        last = len(cuts) - 1 - (n_stages - stage - 1)  # each later stage needs a layer
        for size, rows in enumerate(lists):
            if used[size] == len(rows):
                continue
            hi = lo
            while hi < last and workload.stage_bytes(cuts[lo], cuts[hi + 1], loads[stage]) <= row_room[rows[-1]]:
                hi += 1
            extended = (*used[:size], used[size] + 1, *used[size + 1 :])
            if hi > lo and (extended not in reached or hi > reached[extended][0]):
                reached[extended] = (hi, used, size)
    used = tuple(len(rows) for rows in lists)
    if reached.get(used, (0,))[0] < len(cuts) - 1:
        return None
    sizes = []
    while sum(used):
        _, used, size = reached[used]
        sizes.append(size)
    left = [list(rows) for rows in lists]
    return [left[size].pop(0) for size in reversed(sizes)]
