"""The search of a pool's plan: one level for each number of stages, scored by Eq. 2 with Eq. 3 (hybrid parameter
servers). Every level is also scored by Eq. 1 and 2 in full."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.pool import PoolCost, PoolStep, pool_cost
from planner.model.pool import PoolOptions, PoolStage
from planner.model.pool_problem import PoolProblem
from planner.model.proof import ROUNDING
from planner.search.pool.clustering import Cluster, clusterings
from planner.search.pool.path import stage_order
from planner.search.pool.stages import Owners, Staged, owners_of, staged


@dataclass(frozen=True)
class Level:
    """One number of stages.

    clusters   in the order of their stages
    path_s     length of that order, in mean seconds of a unit there and back between clusters
    search_s   seconds of a step by Eq. 2 with Eq. 3, infinite where memory or links allow no plan
    staged     the stages, None where memory allows none
    cost       by Eq. 1 and 2 in full, None without stages
    """

    clusters: tuple[Cluster, ...]
    path_s: float
    search_s: float
    staged: Staged | None
    cost: PoolCost | None

    @property
    def n_stages(self) -> int:
        return len(self.clusters)


def levels(problem: PoolProblem, options: PoolOptions, seed: int) -> Iterator[Level]:
    """Every number of stages from 1 on, as far as there are reliable devices and layers."""
    devices = np.flatnonzero(problem.reliable)
    for parts in clusterings(problem.delay_s[np.ix_(devices, devices)]):
        if len(parts) > len(problem.cuts) - 1:
            return
        yield level_of(problem, [tuple(devices[list(part)].tolist()) for part in parts], options, seed)


def level_of(problem: PoolProblem, clusters: Sequence[Cluster], options: PoolOptions, seed: int) -> Level:
    """The level of these clusters in their best order."""
    distance = between(problem.delay_s, clusters)
    finite = np.isfinite(distance)
    order = stage_order(np.where(finite, distance, 1.0 + 2 * distance.sum(where=finite)), seed)
    ordered = tuple(clusters[c] for c in order)
    path_s = float(sum(distance[a, b] for a, b in zip(order, order[1:], strict=False)))
    found = staged(problem, ordered)
    if found is None:
        return Level(ordered, path_s, math.inf, None, None)
    hops_s = hops(problem, owners_of(problem, ordered))
    search_s = problem.n_minibatches * (max(hops_s, default=0.0) + stage_s(problem, len(clusters), options.eq3))
    cost = pool_cost(problem.network, found.stages, step_of(problem, found.stages))
    return Level(ordered, path_s, search_s if math.isfinite(cost.total_s) else math.inf, found, cost)


def between(delay_s: np.ndarray, clusters: Sequence[Cluster]) -> np.ndarray:
    """Mean seconds [K, K] of a unit there and back between the devices of two clusters; 0 within one."""
    means = [[float(delay_s[np.ix_(a, b)].mean()) if a != b else 0.0 for b in clusters] for a in clusters]
    return np.array(means)


def hops(problem: PoolProblem, owners: Sequence[Owners]) -> list[float]:
    """Seconds of a mini-batch there and back between each stage and the next, the mean over pairs of owners."""
    exchange_s = problem.exchange_s(problem.unit_bytes * problem.minibatch_units)
    pairs = zip(owners, owners[1:], strict=False)
    return [float(exchange_s[np.ix_(one.back, after.front)].mean()) for one, after in pairs]


def stage_s(problem: PoolProblem, n_stages: int, eq3: str) -> float:
    """Eq. 3: seconds of a mini-batch at any stage, by the power of the reliable devices."""
    ideal_s = problem.minibatch_units / float(problem.power[problem.reliable].sum())
    return ideal_s / n_stages if eq3 == "paper" else ideal_s


def step_of(problem: PoolProblem, stages: Sequence[PoolStage]) -> PoolStep:
    """The values of a problem that Eq. 1 and 2 need for these stages."""
    unit_s = {d: problem.work.unit_s(d, stage.lo, stage.hi) for stage in stages for d in stage.units}
    return PoolStep(problem.unit_bytes, problem.minibatch_units, problem.n_minibatches, unit_s)


@dataclass(frozen=True)
class Found:
    """The chosen level and all that were looked at, from one stage on."""

    chosen: Level
    levels: tuple[Level, ...]


def search(problem: PoolProblem, options: PoolOptions, n_stages: int | None, seed: int) -> Found:
    """The level of `n_stages`, or the one that the options choose. The chosen level may have no stages."""
    seen: list[Level] = []
    for level in levels(problem, options, seed):
        if n_stages is None and options.stop == "first_rise" and seen and _is_above(level, seen[-1]):
            return Found(seen[-1], (*seen, level))
        seen.append(level)
        if level.n_stages == n_stages:
            return Found(level, tuple(seen))
    able = [level for level in seen if level.staged] or seen
    least = min(able, key=lambda level: level.search_s)
    return Found(next(level for level in able if not _is_above(level, least)), tuple(seen))


def _is_above(level: Level, other: Level) -> bool:
    """Whether a level is slower than another one, by more than sums round."""
    return level.search_s > other.search_s * (1 + ROUNDING)
