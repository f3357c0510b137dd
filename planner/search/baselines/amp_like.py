"""Search after AMP: stages are rectangles of the grid of nodes and devices per node, and annealing chooses them.

Li et al., "AMP: Automatically Finding Model Parallel Strategies with Heterogeneity Awareness", NeurIPS 2022, and the
placement search in its public code. Its rules that apply here: a stage is a rectangle of the grid, a devices of each
of b neighbouring nodes with a * b = P; simulated annealing with a temperature that falls linearly moves between
strategies; a cost model scores them.

Left out: the degrees of tensor, data and pipeline parallelism and the size of a microbatch, which are most of its
search, and its dynamic programme over layers, because shape and layers are given; tilings that mix rectangles; and its
cost model, because all solvers are scored by Eq. 1-4.

More generous than the paper: nodes may have unequal numbers of devices (a rectangle then goes on in the next node) and
may be in any order, and the order of stages and the matchings are the best for the groups.
"""

import math
from collections.abc import Sequence

import numpy as np

from planner.model.problem import Problem
from planner.search.base import SolverEntry
from planner.search.baselines.partitions import nodes_of, score, stages_in_turn
from planner.search.incumbent import Incumbent

HOT = 0.1  # the first temperature, as a part of the first strategy's cost


def tiled(nodes: Sequence[np.ndarray], order: np.ndarray, height: int) -> np.ndarray:
    """All devices [N], band after band: a band has the next `height` devices of each node, node after node."""
    n_bands = -(-max(len(node) for node in nodes) // height)
    bands = [nodes[k][band * height : (band + 1) * height] for band in range(n_bands) for k in order]
    return np.concatenate(bands)


def amp_like(problem: Problem, incumbent: Incumbent, seed: int):
    rng = np.random.default_rng(seed)
    nodes = nodes_of(problem)
    heights = [height for height in range(1, problem.n_pipelines + 1) if problem.n_pipelines % height == 0]
    order, height = np.arange(len(nodes)), heights[-1]  # ranks in the order of nodes, as Megatron places them

    def cost_s(order: np.ndarray, height: int) -> float:
        groups = stages_in_turn(tiled(nodes, order, height), problem)
        return score(problem, incumbent, groups, by="amp_like")

    own_s = cost_s(order, height)
    hot_s = HOT * own_s
    while not incumbent.spent:
        new_order, new_height = order.copy(), height
        if rng.random() < 0.5:
            new_height = int(rng.choice(heights))
        else:
            pair = rng.integers(len(nodes), size=2)
            new_order[pair] = new_order[pair[::-1]]
        new_s = cost_s(new_order, new_height)
        temperature_s = hot_s * (1 - incumbent.spent_frac)
        if new_s <= own_s or rng.random() < math.exp((own_s - new_s) / max(temperature_s, 1e-12)):
            order, height, own_s = new_order, new_height, new_s


ENTRY = SolverEntry(amp_like)
