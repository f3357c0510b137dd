"""The order of clusters as stages: the shortest open path through them, exactly or by simulated annealing.

The exact one is Held-Karp's; annealing takes over where that has too many states. A path and its reverse are as long:
stage 1 is the end whose first cluster is lower.
"""

import math
import random

import numpy as np

from planner.cost.communication import held_karp

EXACT_CLUSTERS = 10
N_RUNS, MOVES_PER_CLUSTER = 4, 250  # of annealing
COLDEST = 1e-3  # the last temperature, of the first


def stage_order(distance: np.ndarray, seed: int) -> list[int]:
    """The clusters [K] in the order of their stages; distance: [K, K], symmetric and finite."""
    exact = len(distance) <= EXACT_CLUSTERS
    order = exact_order(distance) if exact else annealed_order(distance, seed)
    return min(order, order[::-1])


def exact_order(distance: np.ndarray) -> list[int]:
    order = np.empty(len(distance), np.int64)
    held_karp(np.ascontiguousarray(distance, dtype=float), order)
    return order.tolist()


def annealed_order(distance: np.ndarray, seed: int) -> list[int]:
    """The shortest of N_RUNS annealed paths: moves reverse a part of the path or swap two clusters, and the temperature
    falls geometrically from the mean distance."""
    dice = random.Random(seed)
    table = distance.tolist()
    paths = [_annealed(table, dice) for _ in range(N_RUNS)]
    return min(paths, key=lambda path: (length_s(table, path), min(path, path[::-1])))


def length_s(table: list[list[float]], path: list[int]) -> float:
    """The length of an open path."""
    return sum(table[a][b] for a, b in zip(path, path[1:], strict=False))


def _annealed(table: list[list[float]], dice: random.Random) -> list[int]:
    """One run from a random path; the best path that it saw."""
    n = len(table)
    path = dice.sample(range(n), n)
    if n < 3:
        return path
    n_moves = n * MOVES_PER_CLUSTER
    warmth = sum(map(sum, table)) / (n * (n - 1))
    cooling = COLDEST ** (1 / n_moves)
    now_s = best_s = length_s(table, path)
    best = list(path)
    for _ in range(n_moves):
        i, j = sorted((int(n * dice.random()), int(n * dice.random())))
        reverses = dice.random() < 0.5
        edges = {i - 1, j} if reverses else {i - 1, i, j - 1, j}  # by the position before each
        edges -= {-1, n - 1}
        before_s = _edges_s(table, path, edges)
        _move(path, i, j, reverses)
        change_s = _edges_s(table, path, edges) - before_s
        if change_s > 0 and (warmth == 0 or dice.random() >= math.exp(-change_s / warmth)):
            _move(path, i, j, reverses)  # undoes itself
        else:
            now_s += change_s
            if now_s < best_s:
                best, best_s = list(path), now_s
        warmth *= cooling
    return best


def _edges_s(table: list[list[float]], path: list[int], edges: set[int]) -> float:
    return sum(table[path[e]][path[e + 1]] for e in edges)


def _move(path: list[int], i: int, j: int, reverses: bool) -> None:
    if reverses:
        path[i : j + 1] = path[i : j + 1][::-1]
    else:
        path[i], path[j] = path[j], path[i]
