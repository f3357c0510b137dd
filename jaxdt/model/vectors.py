"""The gradient of a stage as one flat vector per sync group; replicas exchange these vectors.

The group "stage" is averaged among the replicas of the stage. Entries that other stages hold too, such as a token table
that is both the first stage's embedding and the last stage's head, are a group of their own, "tied", averaged among the
replicas of all these stages. Where replicas may differ such a table is the first stage's alone
(jaxdt.sync.shared_table).

Leaves that the facts of the model call not trained have no gradient and are in no vector: gradients, moments and
whatever replicas exchange are trees like `trained(params)`.

n numbers of a group."""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxdt.model.base import Params, entry_and_path, stage_entries
from jaxdt.run.model_spec import ModelSpec

STAGE_GROUP, TIED_GROUP = "stage", "tied"


def group_entries(config: ModelSpec, lo: int, hi: int) -> dict[str, list[str]]:
    """Sync group -> the names of its entries, in the order of the vector."""
    shared = [entry.name for entry in config.facts.shared(lo, hi)]
    own = [name for name in stage_entries(config, lo, hi) if name not in shared]
    return {STAGE_GROUP: own} | ({TIED_GROUP: shared} if shared else {})


def trained(config: ModelSpec, params: Params) -> Params:
    """The parameters with None, which is a tree without leaves, in place of each leaf that is not trained."""
    frozen = config.facts.frozen
    if not frozen:
        return params

    def kept(keys: Any, leaf: Any) -> Any:
        return None if entry_and_path(keys) in frozen else leaf

    return jax.tree_util.tree_map_with_path(kept, params)


def frozen(config: ModelSpec, params: Params) -> Params:
    """The parameters with None in place of each leaf that is trained."""
    names = config.facts.frozen

    def kept(keys: Any, leaf: Any) -> Any:
        return leaf if entry_and_path(keys) in names else None

    return jax.tree_util.tree_map_with_path(kept, params)


def with_trained(params: Params, part: Params) -> Params:
    """The parameters with the leaves of `part`, a tree like their trained ones, which need not have entries without
    any. Of `params` the frozen leaves do."""

    def newest(new: Any, own: Any) -> Any:
        return own if new is None else new

    def joined(own: Any, new: Any) -> Any:
        return jax.tree.map(newest, new, own, is_leaf=lambda leaf: leaf is None)

    return {name: joined(tree, part.get(name)) for name, tree in params.items()}


def own_params(config: ModelSpec, lo: int, hi: int, params: Params) -> Params:
    """The parameters of a stage without those that belong to a stage before it."""
    owned = {entry.name for entry in config.facts.owned(lo, hi)}
    return {name: tree for name, tree in params.items() if name in owned}


def group_sizes(config: ModelSpec, lo: int, hi: int) -> dict[str, int]:
    """Sync group -> how many numbers its vector has."""
    n_trained = {entry.name: entry.n_trained for entry in config.facts.entries_in(lo, hi)}
    return {group: sum(n_trained[name] for name in names) for group, names in group_entries(config, lo, hi).items()}


def gradient_vectors(config: ModelSpec, lo: int, hi: int, tree: Params) -> dict[str, Float32[Array, " n"]]:
    """The leaves of each group, raveled and joined."""
    return {
        group: jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(_pick(tree, names))])
        for group, names in group_entries(config, lo, hi).items()
    }


def gradient_tree(
    config: ModelSpec,
    lo: int,
    hi: int,
    like: Params,
    vectors: dict[str, Float32[Array, " n"]],
    scale: float | Float32[Array, ""],
) -> Params:
    """The inverse of gradient_vectors, times `scale`: the entries of `like` that are in these vectors."""
    tree: Params = {}
    for group, names in group_entries(config, lo, hi).items():
        if group in vectors:
            tree |= _cut(vectors[group], _pick(like, names), scale)
    return tree


def _pick(tree: Params, names: list[str]) -> Params:
    return {name: tree[name] for name in names}


def _cut(vector: Float32[Array, " n"], like: Params, scale: float | Float32[Array, ""]) -> Params:
    leaves, structure = jax.tree.flatten(like)
    parts = []
    start = 0
    for leaf in leaves:
        size = prod(leaf.shape)
        parts.append(jnp.reshape(vector[start : start + size], leaf.shape) * scale)
        start += size
    return jax.tree.unflatten(structure, parts)
