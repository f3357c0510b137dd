"""The gradient of a stage as one flat vector per sync group; replicas exchange these vectors.

The group "stage" is averaged among the replicas of the stage. A token table that is both the first stage's embedding
and the last stage's head is a group of its own, "tied", averaged among the replicas of both stages. Where replicas may
differ it is the first stage's alone (jaxdt.sync.shared_table).

n numbers of a group."""

from math import prod

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from jaxdt.model.base import Params, model_of
from jaxdt.run.model import ModelConfig

STAGE_GROUP, TIED_GROUP = "stage", "tied"


def group_entries(config: ModelConfig, lo: int, hi: int) -> dict[str, list[str]]:
    """Sync group -> the names of its entries, in the order of the vector."""
    names = model_of(config).entries(config, lo, hi)
    whole_model = lo == 0 and hi == config.n_layers
    if not config.tied_head or whole_model or "tok" not in names:
        return {STAGE_GROUP: names}
    return {STAGE_GROUP: [name for name in names if name != "tok"], TIED_GROUP: ["tok"]}


def own_params(config: ModelConfig, lo: int, hi: int, params: Params) -> Params:
    """The parameters of a stage without a table that belongs to the first stage."""
    borrowed = group_entries(config, lo, hi).get(TIED_GROUP, []) if lo else []
    return {name: tree for name, tree in params.items() if name not in borrowed}


def group_sizes(config: ModelConfig, lo: int, hi: int) -> dict[str, int]:
    """Sync group -> how many numbers its vector has."""
    sizes = {STAGE_GROUP: config.stage_params(lo, hi)}
    if TIED_GROUP in group_entries(config, lo, hi):
        sizes[TIED_GROUP] = config.token_table_params
        sizes[STAGE_GROUP] -= sizes[TIED_GROUP]
    return sizes


def gradient_vectors(config: ModelConfig, lo: int, hi: int, tree: Params) -> dict[str, Float32[Array, " n"]]:
    """The leaves of each group, raveled and joined."""
    return {
        group: jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(_pick(tree, names))])
        for group, names in group_entries(config, lo, hi).items()
    }


def gradient_tree(
    config: ModelConfig,
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
