"""What replicas that may differ exchange of their parameters, and what they make of the mean.

Without an outer optimizer they exchange the parameters and go on from the mean. With one (DiLoCo, Douillard et al.
2023, Alg. 1) the anchor holds the parameters that the last outer update has left; a replica's change is the anchor
minus its parameters. The mean change is taken for a gradient. With a learning rate of 1 and no momentum the new anchor
is the mean of the parameters.

With `mix_frac` a replica keeps this share of its own parameters (streaming DiLoCo, Douillard et al. 2025, Alg. 2, whose
alpha it is): the local steps that it has done since its vector was frozen are not lost.

A run and its replay in one process compute both with these, so that they come to the same bits. Trees are dicts by
entry (jaxdt.model.base), and `names` are those of the entries that average. n numbers of a vector."""

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32

from jaxdt.model.base import Params, model_of
from jaxdt.model.float_vector import FloatVector
from jaxdt.spec.codec import BF16, NONE
from jaxdt.spec.config import GroupsConfig
from jaxdt.spec.model import ModelConfig

Vector = Float32[np.ndarray, " n"]
Sent = Float[np.ndarray, " n"]  # in the dtype of a codec
Outer = tuple[Any, ...]  # anchor and momentum, trees like the parameters; empty without an outer optimizer


def fragment_entries(config: ModelConfig, lo: int, hi: int, n_fragments: int) -> list[list[str]]:
    """The names of the entries of each fragment of the layers lo..hi-1, sorted."""
    model = model_of(config)
    fragments: list[list[str]] = [[] for _ in range(n_fragments)]
    for name in model.entries(config, lo, hi):
        fragments[config.fragment_of(lo, model.entry_layer(config, name), n_fragments)].append(name)
    return fragments


def exchanged(params: Params, outer: Outer, names: Sequence[str]) -> Vector:
    """What a replica contributes to a group: its parameters, or with an outer optimizer what they have changed since
    the last average."""
    own = _pick(params, names)
    layout = FloatVector(own)
    vector = layout.of(own)
    return layout.of(_pick(outer[0], names)) - vector if outer else vector


def averaged(
    config: GroupsConfig, params: Params, outer: Outer, names: Sequence[str], mean: Vector
) -> tuple[Params, Outer]:
    """(parameters, outer) of a replica after the mean of what its group has exchanged. Other entries stay."""
    own = _pick(params, names)
    layout = FloatVector(own)
    outcome = mean
    if outer:
        anchor, momentum = (layout.of(_pick(tree, names)) for tree in outer)
        after = outer_update(config, anchor, momentum, mean)
        outcome = after[0]
        outer = tuple(tree | layout.tree(vector, 1.0) for tree, vector in zip(outer, after, strict=True))
    if config.mix_frac:
        outcome = np.float32(config.mix_frac) * layout.of(own) + np.float32(1 - config.mix_frac) * outcome
    return params | layout.tree(outcome, 1.0), outer


def as_sent(codec: str, vector: Vector) -> Sent:
    """The vector as it goes over a link, rounded once to the numbers of the codec (sync.codec)."""
    return vector.astype(WIRE_DTYPES[codec], copy=False)


def added(parts: Sequence[Sent]) -> Sent:
    """The sum of contributions in their order: added in fp32, and rounded once to the numbers that they have."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        np.add(total, part.astype(np.float32, copy=False), out=total)
    return total.astype(parts[0].dtype, copy=False)


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


WIRE_DTYPES = {NONE: np.dtype(np.float32), BF16: np.dtype(ml_dtypes.bfloat16)}


def _pick(tree: Params, names: Sequence[str]) -> Params:
    return {name: tree[name] for name in names}
