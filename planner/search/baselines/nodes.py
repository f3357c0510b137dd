"""Devices by node, as planners for GPU clusters see them: a node here is a region of the network file.

Those planners know machines with several GPUs, one bandwidth inside a machine and one between machines. The region of a
network file comes nearest: it is a machine in some files, a city in others. A device without a region is a node of its
own.
"""

import numpy as np

from planner.model.problem import Problem


def nodes_of(problem: Problem) -> list[np.ndarray]:
    """The devices of each node, nodes and devices in the order of the network file."""
    return [np.flatnonzero(problem.region == node) for node in np.unique(problem.region)]


def stages_in_turn(sequence: np.ndarray, problem: Problem) -> np.ndarray:
    """Groups [S, P]: stage s takes the s-th run of P devices of the sequence [N]."""
    return sequence.reshape(problem.n_stages, problem.n_pipelines)
