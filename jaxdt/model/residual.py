"""A residual: the values that a microbatch leaves on a stage between its forward and its backward, without the weights.

`jax.vjp` returns a pytree whose leaves are the values that the backward needs. Among them are the weights, and a jitted
forward would return a copy of them for every microbatch in flight. Inside one trace these leaves are the very objects
that went in, so they can be recognised by identity, dropped, and put back from the caller's parameters later.
A right answer needs documented behaviour only: where a JAX version passes new objects instead, the leaf is saved, and
the residual is larger but as correct. (JAX 0.10 can blank `VJP.args_res`, a private field.)"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax


@partial(jax.tree_util.register_dataclass, data_fields=["saved"], meta_fields=["tree", "weight_of"])
@dataclass(frozen=True)
class Residual:
    """`saved` are the leaves of the pullback `tree` that are not weights. For each leaf of the tree `weight_of` has the
    index of the same leaf among the parameters, or None if the leaf is saved."""

    saved: list[Any]
    tree: Any
    weight_of: tuple[int | None, ...]


def take_weights_out(pullback: Any, params: Any) -> Residual:
    """`pullback` as `jax.vjp` returned it in this trace, for a function of `params`."""
    index = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(params))}
    leaves, tree = jax.tree.flatten(pullback)
    weight_of = tuple(index.get(id(leaf)) for leaf in leaves)
    saved = [leaf for leaf, weight in zip(leaves, weight_of, strict=True) if weight is None]
    return Residual(saved, tree, weight_of)


def put_weights_back(residual: Residual, params: Any) -> Callable:
    """The pullback again. `params` must be the ones that its forward ran with."""
    weights = jax.tree.leaves(params)
    saved = iter(residual.saved)
    leaves = [next(saved) if weight is None else weights[weight] for weight in residual.weight_of]
    return jax.tree.unflatten(residual.tree, leaves)
