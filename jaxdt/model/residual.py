"""What a microbatch leaves on a stage between its forward and its backward, without the stage's weights.

`jax.vjp` returns a pytree whose leaves are the values the backward needs. Among them are the weights, and a jitted
forward would return a copy of them for every microbatch in flight. Inside one trace these leaves are the very objects
that went in, so they can be told apart by identity, dropped, and put back from the caller's parameters later.
Only documented behaviour is needed for a right answer: where a JAX version hands on new objects instead, the leaf is
kept, and the residual is larger but as correct. (JAX 0.10 can blank `VJP.args_res`, which is private.)"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax


@partial(jax.tree_util.register_dataclass, data_fields=["kept"], meta_fields=["tree", "weight_of"])
@dataclass(frozen=True)
class Residual:
    """`kept` are the leaves of the pullback `tree` that are not weights; `weight_of` says for each leaf of the tree
    which leaf of the parameters it is, or None for a kept one."""

    kept: list
    tree: jax.tree_util.PyTreeDef
    weight_of: tuple[int | None, ...]


def take_weights_out(pullback, params) -> Residual:
    """`pullback` as `jax.vjp` returned it in this trace, for a function of `params`."""
    index = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(params))}
    leaves, tree = jax.tree.flatten(pullback)
    weight_of = tuple(index.get(id(leaf)) for leaf in leaves)
    kept = [leaf for leaf, weight in zip(leaves, weight_of, strict=True) if weight is None]
    return Residual(kept, tree, weight_of)


def put_weights_back(residual: Residual, params) -> Callable:
    """The pullback again. `params` must be the ones its forward ran with."""
    weights, kept = jax.tree.leaves(params), iter(residual.kept)
    leaves = [next(kept) if weight is None else weights[weight] for weight in residual.weight_of]
    return jax.tree.unflatten(residual.tree, leaves)
