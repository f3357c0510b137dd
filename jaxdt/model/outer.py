"""Outer optimizers: what replicas do with the mean of their changes (DiLoCo, Douillard et al. 2023, Alg. 1).

The anchor holds the parameters that the last outer update has left; a replica's change is the anchor minus its
parameters. Their mean is taken for a gradient. With a learning rate of 1 and no momentum the new anchor is the mean of
the parameters.

n numbers of a vector."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float32

from jaxdt.spec.config import GroupsConfig

Vector = Float32[np.ndarray, " n"]


def outer_update(config: GroupsConfig, anchor: Vector, momentum: Vector, change: Vector) -> tuple[Vector, Vector]:
    """(the next anchor, the next momentum) after a mean change of the replicas."""
    momentum = np.float32(config.outer_momentum) * momentum + change
    direction = DIRECTIONS[config.outer](config, momentum, change)
    return anchor - np.float32(config.outer_lr) * direction, momentum


def _heavy_ball(config: GroupsConfig, momentum: Vector, change: Vector) -> Vector:
    del config, change
    return momentum


def _nesterov(config: GroupsConfig, momentum: Vector, change: Vector) -> Vector:
    return change + np.float32(config.outer_momentum) * momentum


# Name -> (config, the new momentum, the mean change) -> what is subtracted from the anchor, times the learning rate.
DIRECTIONS: dict[str, Callable[[GroupsConfig, Vector, Vector], Vector]] = {"sgd": _heavy_ball, "nesterov": _nesterov}
