"""Types of devices: sets of interchangeable ones, and clusters of near-equal ones where every link differs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.model.problem import Problem

TINY_S = 1e-9  # a free link has no logarithm
Members = tuple[tuple[int, ...], ...]
Pool = Callable[[np.ndarray], float]


@dataclass(frozen=True, eq=False)
class Types:
    """members[k] are the devices of type k. dp_s and pp_s [K, K] hold the cost of a pair of types; their diagonals are
    for two devices of one type. `exact` if all devices of a type have equal links, so that the matrices lose
    nothing."""

    members: Members
    dp_s: np.ndarray
    pp_s: np.ndarray
    exact: bool

    @property
    def sizes(self) -> list[int]:
        return [len(group) for group in self.members]


def interchangeable(problem: Problem) -> np.ndarray:
    """label[d], equal for devices whose links to all others are equal: swapping two of them changes no cost. Only
    devices whose sorted links are equal need a comparison."""
    matrices = problem.dp_s, problem.pp_s
    label = np.empty(problem.n_devices, np.int64)
    heads: dict[bytes, list[int]] = {}
    n_labels = 0
    for d in range(problem.n_devices):
        alike = heads.setdefault(b"".join(np.sort(m[d]).tobytes() for m in matrices), [])
        head = next((h for h in alike if _same_links(matrices, d, h)), None)
        if head is None:
            alike.append(d)
            label[d] = n_labels
            n_labels += 1
        else:
            label[d] = label[head]
    return label


def _same_links(matrices: tuple[np.ndarray, ...], a: int, b: int) -> bool:
    same = np.logical_and.reduce([m[a] == m[b] for m in matrices])
    same[[a, b]] = True
    return bool(same.all())


def near_equal(problem: Problem, most: int) -> list[np.ndarray]:
    """labels[k - 1][d] of k clusters, for k = 1..most. Average linkage: repeatedly merge the two clusters that differ
    least. The distance of two devices is the mean relative difference of their hop costs to all others, plus an N-th of
    the logarithm of their own hop cost."""
    n = problem.n_devices
    log_cost = np.log(np.maximum(problem.pp_s, TINY_S))
    np.fill_diagonal(log_cost, 0.0)
    distance = np.array([np.abs(log_cost - row).mean(axis=1) for row in log_cost]) + log_cost / n
    np.fill_diagonal(distance, np.inf)
    weight = np.ones(n)
    label = np.arange(n)
    labels = [label.copy()]
    for _ in range(n - 1):
        i, j = sorted(np.unravel_index(np.argmin(distance), distance.shape))
        merged = (weight[i] * distance[i] + weight[j] * distance[j]) / (weight[i] + weight[j])
        distance[i] = merged
        distance[:, i] = merged
        distance[j] = np.inf
        distance[:, j] = np.inf
        distance[i, i] = np.inf
        weight[i] += weight[j]
        label[label == j] = i
        labels.append(label.copy())
    return [np.unique(merged, return_inverse=True)[1] for merged in labels[: -most - 1 : -1]]


def types_of(problem: Problem, label: np.ndarray, pool: Pool = np.mean) -> Types:
    """Types from labels. `pool` joins the costs of all pairs of two types: np.mean estimates, and np.min keeps lower
    bounds for types valid for devices."""
    members = tuple(tuple(int(d) for d in np.flatnonzero(label == k)) for k in range(label.max() + 1))
    dp_s, pp_s = (_pooled(matrix, members, pool) for matrix in (problem.dp_s, problem.pp_s))
    spread = max(_spread(matrix, members) for matrix in (problem.dp_s, problem.pp_s))
    return Types(members, dp_s, pp_s, spread == 0.0)


def groups_from(types: Types, counts: np.ndarray) -> np.ndarray:
    """Groups [S, P] with counts[k][s] devices of type k in stage s."""
    stages = [[] for _ in range(counts.shape[1])]
    for members, row in zip(types.members, counts, strict=True):
        ends = np.cumsum(row)
        for s, stage in enumerate(stages):
            stage += members[ends[s] - row[s] : ends[s]]
    return np.array(stages)


def _pairs(matrix: np.ndarray, a: tuple[int, ...], b: tuple[int, ...]) -> np.ndarray:
    block = matrix[np.ix_(a, b)]
    if a != b:
        return block.ravel()
    return block[~np.eye(len(a), dtype=bool)] if len(a) > 1 else np.zeros(1)


def _pooled(matrix: np.ndarray, members: Members, pool: Pool) -> np.ndarray:
    return np.array([[pool(_pairs(matrix, a, b)) for b in members] for a in members])


def _spread(matrix: np.ndarray, members: Members) -> float:
    return max(float(np.ptp(_pairs(matrix, a, b))) for a in members for b in members)
