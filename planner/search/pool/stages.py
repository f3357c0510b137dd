"""From clusters in the order of their stages to stages: owners, workers, layers, shares (hybrid parameter servers)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.model.layer_cuts import Ranges, split
from planner.model.pool import PoolStage
from planner.model.pool_problem import PoolProblem
from planner.search.pool.clustering import Cluster


@dataclass(frozen=True)
class Owners:
    """The servers of a stage: those that own what enters it from before, and those that own what enters from behind."""

    front: tuple[int, ...]
    back: tuple[int, ...]


@dataclass(frozen=True)
class Staged:
    """Stages whose devices can hold their layers, and (device, why) of those that can be in no stage."""

    stages: tuple[PoolStage, ...]
    left_out: tuple[tuple[int, str], ...]


# ------------------------------------------------------------------------------------------------------------- owners


def owners_of(problem: PoolProblem, clusters: Sequence[Cluster]) -> list[Owners]:
    """The roles of each cluster's servers, clusters in the order of their stages. A server is in front if the stage
    before is nearer to it than the one behind; with one side empty, the weakest of the other moves there."""
    return [_owners(problem, clusters, k) for k in range(len(clusters))]


def _owners(problem: PoolProblem, clusters: Sequence[Cluster], k: int) -> Owners:
    own = clusters[k]
    if len(own) == 1:
        return Owners(own, own)
    delay_s = problem.delay_s
    before = delay_s[np.ix_(own, clusters[k - 1])].mean(axis=1) if k > 0 else np.full(len(own), np.inf)
    last = k == len(clusters) - 1
    behind = np.full(len(own), np.inf) if last else delay_s[np.ix_(own, clusters[k + 1])].mean(axis=1)
    front = [d for d, before_s, behind_s in zip(own, before, behind, strict=True) if before_s < behind_s]
    back = [d for d in own if d not in front]
    for empty, full in ((front, back), (back, front)):
        if not empty:
            mean_s = {d: float(delay_s[d, list(own)].mean()) for d in full}
            weakest = min(full, key=lambda d: (problem.power[d], -mean_s[d], d))
            full.remove(weakest)
            empty.append(weakest)
    return Owners(tuple(front), tuple(back))


# ------------------------------------------------------------------------------------------------------------ workers


def nearest_stages(problem: PoolProblem, clusters: Sequence[Cluster], worker: int) -> list[int]:
    """The stages whose servers a worker reaches, the nearest in the mean first."""
    means = [float(problem.delay_s[worker, list(cluster)].mean()) for cluster in clusters]
    return sorted((k for k in range(len(clusters)) if math.isfinite(means[k])), key=lambda k: (means[k], k))


# ------------------------------------------------------------------------------------------------------------- layers


def largest_remainder(total: int, weights: Sequence[float], least: int = 0) -> list[int]:
    """`total` cut in proportion to the weights, each part at least `least`; ties go to the lower index."""
    sum_of_weights = sum(weights)
    quotas = [total * weight / sum_of_weights for weight in weights]
    parts = [max(least, math.floor(quota)) for quota in quotas]
    while sum(parts) != total:
        change = 1 if sum(parts) < total else -1
        able = [i for i, part in enumerate(parts) if part + change >= least]
        most = max(able, key=lambda i: (change * (quotas[i] - parts[i]), -i))
        parts[most] += change
    return parts


def layers_by_power(problem: PoolProblem, owners: Sequence[Owners], power: Sequence[float]) -> Ranges | None:
    """Layers in proportion to the power of each stage. Where a server could not hold them, the ranges that it and the
    others can hold with the least seconds of the slowest stage; None if there are none."""
    cuts, n_stages = problem.cuts, len(owners)
    if n_stages > len(cuts) - 1:
        return None

    def fits(stage: int, lo: int, hi: int) -> bool:
        return servers_fit(problem, owners[stage], lo, hi, n_stages - stage)

    ends = np.cumsum([0, *largest_remainder(len(cuts) - 1, power, least=1)]).tolist()
    ranges = tuple((cuts[a], cuts[b]) for a, b in zip(ends, ends[1:], strict=False))
    if all(fits(stage, lo, hi) for stage, (lo, hi) in enumerate(ranges)):
        return ranges
    return split(list(cuts), n_stages, lambda stage, lo, hi: (hi - lo) / power[stage], fits)


def servers_fit(problem: PoolProblem, owners: Owners, lo: int, hi: int, n_in_flight: int) -> bool:
    """Whether the servers of a stage can hold its state, what they compute, and until the commit the tensors that they
    own: activations and gradients of a whole step, which the owners of a side share. Tokens count nothing."""
    state_bytes = problem.work.server_bytes(lo, hi, n_in_flight)
    for device in {*owners.front, *owners.back}:
        n_owned = 0
        if device in owners.front and lo > problem.cuts[0]:
            n_owned += -(-problem.n_units // len(owners.front))
        if device in owners.back and hi < problem.cuts[-1]:
            n_owned += -(-problem.n_units // len(owners.back))
        if state_bytes + n_owned * problem.unit_bytes > problem.room_bytes[device]:
            return False
    return True


# ------------------------------------------------------------------------------------------------------------- stages


def staged(problem: PoolProblem, clusters: Sequence[Cluster]) -> Staged | None:
    """The stages of a chain of clusters; None if no cut into layers fits the servers' memory. A worker joins the stage
    that it reaches soonest; one that cannot hold those layers joins the next one whose layers it can hold."""
    owners = owners_of(problem, clusters)
    workers = np.flatnonzero(~problem.reliable).tolist()
    nearest = {worker: nearest_stages(problem, clusters, worker) for worker in workers}
    power = [float(problem.power[list(cluster)].sum()) for cluster in clusters]
    for worker, reached in nearest.items():
        if reached:
            power[reached[0]] += float(problem.power[worker] * problem.available[worker])
    ranges = layers_by_power(problem, owners, power)
    if ranges is None:
        return None
    pools: list[list[int]] = [[] for _ in clusters]
    left_out: list[tuple[int, str]] = []
    for worker, reached in nearest.items():
        able = [k for k in reached if problem.work.worker_bytes(*ranges[k]) <= problem.room_bytes[worker]]
        if able:
            pools[able[0]].append(worker)
        else:
            left_out.append((worker, _why(problem, worker, reached, ranges)))
    stages = [_stage(problem, *parts) for parts in zip(owners, pools, ranges, strict=True)]
    return Staged(tuple(stages), tuple(left_out))


def _why(problem: PoolProblem, worker: int, reached: Sequence[int], ranges: Ranges) -> str:
    """The reason why a worker is in no stage."""
    if not reached:
        return "has no link to all servers of any stage"
    least = min(problem.work.worker_bytes(*ranges[k]) for k in reached)
    return f"has {problem.room_bytes[worker] / 1e9:.2f} GB, the smallest stage that it reaches needs {least / 1e9:.2f}"


def _stage(problem: PoolProblem, owners: Owners, workers: list[int], layers: tuple[int, int]) -> PoolStage:
    devices = sorted({*owners.front, *owners.back, *workers})
    power = [1 / sum(problem.work.unit_s(d, *layers)) for d in devices]
    units = largest_remainder(problem.minibatch_units, power)
    return PoolStage(*layers, owners.front, owners.back, tuple(workers), dict(zip(devices, units, strict=True)))
