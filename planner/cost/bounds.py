"""Lower bounds of Eq. 1-4 that hold for every placement and need no solver."""

import numpy as np

from planner.model.problem import Problem


def datap_floor_s(problem: Problem) -> float:
    """Every device is used, so DATAP >= the P - 1 cheapest exchanges of any device."""
    n_partners = problem.n_pipelines - 1
    costs = np.sort(problem.dp_s + np.diag(np.full(problem.n_devices, np.inf)), axis=1)
    return float(costs[:, :n_partners].sum(axis=1).max())


def pipelinep_floor_s(problem: Problem) -> float:
    """The hops of cost <= t cut the P pipelines into paths that cover all devices over links <= t. A connected part
    of m devices needs at least ceil(m / S) paths, and at least m - (sum of min(degree, 2)) / 2. With p paths in all,
    ceil(p / P) - 1 hops cost more than t; summed over t this bounds PIPELINEP from below."""
    total_s = 0.0
    previous_s = 0.0
    n_dearer_hops = problem.n_stages - 1
    for limit_s, n_paths in _paths_by_threshold(problem.pp_s, problem.n_stages):
        total_s += n_dearer_hops * (limit_s - previous_s)
        previous_s = limit_s
        n_dearer_hops = -(-n_paths // problem.n_pipelines) - 1
        if n_dearer_hops <= 0:
            break
    return total_s


def _paths_by_threshold(pp_s: np.ndarray, n_stages: int):
    """(threshold, least number of paths over links <= threshold) for every threshold that matters: the weights of a
    minimum spanning tree and of every device's two cheapest links. No other weight changes the connected parts or
    the degrees, which count up to two."""
    n = len(pp_s)
    low = np.sort(pp_s + np.diag(np.full(n, np.inf)), axis=1)[:, :2]
    tree = _spanning_tree(pp_s)
    part = np.arange(n)
    for limit_s in np.unique(np.concatenate([low.ravel(), [w for w, _, _ in tree]])):
        if not np.isfinite(limit_s):
            return
        while tree and tree[0][0] <= limit_s:
            _, a, b = tree.pop(0)
            part[part == part[a]] = part[b]
        sizes = np.bincount(part, minlength=n)
        halves = np.bincount(part, weights=(low <= limit_s).sum(axis=1), minlength=n)
        n_paths = np.maximum(-(-sizes // n_stages), sizes - np.floor(halves / 2).astype(int))
        yield float(limit_s), int(n_paths.sum())


def _spanning_tree(weights: np.ndarray) -> list[tuple[float, int, int]]:
    """Links (weight, a, b) of a minimum spanning tree, ascending (Prim)."""
    n = len(weights)
    outside = np.ones(n, dtype=bool)
    outside[0] = False
    low = weights[0].copy()
    near = np.zeros(n, dtype=int)
    links = []
    for _ in range(n - 1):
        new = int(np.argmin(np.where(outside, low, np.inf)))
        links.append((float(low[new]), int(near[new]), new))
        outside[new] = False
        closer = weights[new] < low
        low[closer] = weights[new][closer]
        near[closer] = new
    return sorted(links)


def floor_s(problem: Problem) -> float:
    """A lower bound of COMM-COST."""
    return datap_floor_s(problem) + pipelinep_floor_s(problem)
