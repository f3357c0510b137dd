"""The vectors that replicas which may differ exchange, and the new parameters that they make of the mean.

Without an outer optimizer they exchange the parameters and go on from the mean. With one (DiLoCo, Douillard et al.
2023, Alg. 1) the anchor holds the parameters that the last outer update has left; a replica's change is the anchor
minus its parameters. The mean change is taken for a gradient. With a learning rate of 1 and no momentum the new anchor
is the mean of the parameters.

Weighted by samples, a contribution is multiplied by the weight of its replica, and the sum divided by the sum of all
weights. With `average_moments` the moments of the replica's own optimizer are averaged beside the parameters.

With `mix_frac` a replica keeps this share of its own parameters (the alpha of streaming DiLoCo, Douillard et al. 2025,
Alg. 2): the local steps that it has done since its vector was frozen are not lost.

A run and its replay in one process compute both with these functions, so that they come to the same bits. Trees are
dicts by entry (jaxdt.model.base), and `names` are the names of the entries that average. n numbers of a vector."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

from jaxdt.model.base import Params
from jaxdt.model.float_vector import FloatVector
from jaxdt.run.config import GroupsConfig
from jaxdt.run.model_spec import ModelSpec

Vector = Float32[np.ndarray, " n"]


def fragment_entries(config: ModelSpec, lo: int, hi: int, n_fragments: int) -> list[list[str]]:
    """The names of the entries of each fragment of the layers lo..hi-1, sorted. A table that two stages share is in a
    fragment of the first."""
    return [[entry.name for entry in entries] for entries in config.facts.fragments(lo, hi, n_fragments)]


class ReplicaState(NamedTuple):
    """The state of a replica: its parameters (trained ones, where it is to be averaged), anchor and momentum of the
    outer optimizer (trees like the trained parameters; () without one), and its own optimizer's state."""

    params: Params
    outer: tuple[Any, ...]
    opt_state: Any


def exchanged(config: GroupsConfig, state: ReplicaState, names: Sequence[str], weight: int) -> Vector:
    """The contribution of a replica to a group, times its weight: its parameters, or with an outer optimizer their
    change since the last average; and its moments, if they are averaged."""
    trees = _averaged_trees(config, state, names)
    vector = FloatVector(trees).of(trees)
    if state.outer:
        anchor = FloatVector(trees[0]).of(_pick(state.outer[0], names))
        vector[: len(anchor)] = anchor - vector[: len(anchor)]
    return vector if weight == 1 else vector * np.float32(weight)


def averaged(config: GroupsConfig, state: ReplicaState, names: Sequence[str], mean: Vector) -> ReplicaState:
    """The state of a replica after the mean of what its group has exchanged. Other entries stay."""
    trees = _averaged_trees(config, state, names)
    layout, of_params = FloatVector(trees), FloatVector(trees[0])
    outcome, outer = mean, state.outer
    if outer:
        anchor, momentum = (of_params.of(_pick(tree, names)) for tree in outer)
        after = outer_update(config, anchor, momentum, mean[: len(anchor)])
        outcome = np.concatenate([after[0], mean[len(anchor) :]])
        outer = tuple(tree | of_params.tree(vector, 1.0) for tree, vector in zip(outer, after, strict=True))
    if config.mix_frac:
        outcome = np.float32(config.mix_frac) * layout.of(trees) + np.float32(1 - config.mix_frac) * outcome
    params, *moments = layout.tree(outcome, 1.0)
    return ReplicaState(state.params | params, outer, _with_moments(state, moments))


def _averaged_trees(config: GroupsConfig, state: ReplicaState, names: Sequence[str]) -> list[Params]:
    """The entries that average: of the parameters, and of each moment."""
    moments = [node for node in _nodes(state)[0] if _mirrors(node, state)] if config.average_moments else []
    return [_pick(tree, names) for tree in (state.params, *moments)]


def _with_moments(state: ReplicaState, moments: Sequence[Params]) -> Any:
    """The optimizer's state with these entries of its moments in place of its own; none are given if none average."""
    nodes, structure = _nodes(state)
    entries = iter(moments)
    replaced = [node | next(entries) if moments and _mirrors(node, state) else node for node in nodes]
    return jax.tree.unflatten(structure, replaced)


def _nodes(state: ReplicaState) -> tuple[list[Any], Any]:
    """The optimizer's state, in which trees like the parameters, its moments, count as leaves."""
    return jax.tree.flatten(state.opt_state, is_leaf=lambda node: _mirrors(node, state))


def _mirrors(node: Any, state: ReplicaState) -> bool:
    return isinstance(node, dict) and node.keys() == state.params.keys()


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


def _pick(tree: Params, names: Sequence[str]) -> Params:
    return {name: tree[name] for name in names}
