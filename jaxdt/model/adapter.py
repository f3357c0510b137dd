"""The functions of a model with an adapter (jaxdt.run.adapter): those of the model itself, with each adapted matrix
computed where a layer reads it. So any family can have one, and modules of one's own too.

D, F the axes of a matrix, R the rank."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxdt.model.base import Auxiliary, Begins, Boundary, Entries, Logits, Model, Params, Tokens, model_of
from jaxdt.run.adapter import LORA, SCALE, A, B
from jaxdt.run.model_spec import ModelSpec


def matrix(kernel_DF: Any, a_DR: Any, b_RF: Any) -> Any:
    """The matrix with which a layer computes; of jax or of numpy arrays."""
    return kernel_DF + SCALE * (a_DR @ b_RF)


def without_adapter(tree: Any) -> Any:
    """An entry as the model itself has it, its adapted matrices computed; of jax or of numpy arrays."""
    if not isinstance(tree, dict) or LORA not in tree:
        return tree
    return _added({name: inner for name, inner in tree.items() if name != LORA}, tree[LORA])


def _added(tree: Any, adapters: Any) -> Any:
    if not isinstance(tree, dict):
        return matrix(tree, adapters[A], adapters[B])
    return {name: _added(inner, adapters[name]) if name in adapters else inner for name, inner in tree.items()}


def entries(options: ModelSpec) -> Entries:
    model, base = _base(options)
    return model.entries(base)


def init_entry(options: ModelSpec, name: str, key: jax.Array) -> Any:
    """Fresh fp32 parameters of an entry; `key` is the seed's."""
    model, base = _base(options)
    return complete(options, name, model.init(base, name, key), key)


def complete(options: ModelSpec, name: str, tree: Any, key: jax.Array) -> Any:
    """An entry of the model, with fresh adapters."""
    found: dict[str, Any] = {}
    entry_number, entry = next((i, e) for i, e in enumerate(options.facts.entries) if e.name == name)
    of_entry = jax.random.fold_in(jax.random.fold_in(key, ord(LORA[0])), entry_number)
    for i, leaf in enumerate(entry.leaves):
        *inner, last = leaf.path.split("/")
        if inner and inner[0] == LORA:
            node = found
            for part in inner[1:]:
                node = node.setdefault(part, {})
            node[last] = _drawn(jax.random.fold_in(of_entry, i), leaf.shape) if last == A else jnp.zeros(leaf.shape)
    return tree | {LORA: found} if found else tree


def _drawn(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform within +-1/sqrt(D), as in the published code of LoRA."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, jnp.float32, -bound, bound)


def embed(
    options: ModelSpec, dtype: jnp.dtype, params: Params, tokens_BT: Tokens, begins_BT: Begins = None
) -> Boundary:
    model, base = _base(options)
    return model.embed(base, dtype, params, tokens_BT, begins_BT)


def apply_layer(
    options: ModelSpec, layer: int, params: Params, x: Boundary, begins_BT: Begins = None
) -> Boundary | tuple[Boundary, Auxiliary]:
    model, base = _base(options)
    read = {name: without_adapter(params[name]) for name in model.entries(base).layers[layer]}
    return model.layer(base, layer, params | read, x, begins_BT)


def apply_head(options: ModelSpec, params: Params, x: Boundary) -> Logits:
    model, base = _base(options)
    return model.head(base, params, x)


def _base(options: ModelSpec) -> tuple[Model, ModelSpec]:
    base = options.without_adapter()
    return model_of(base), base


# The facts of a model with an adapter follow from those of the model: they ask for no roles here.
MODEL = Model(entries=entries, init=init_entry, embed=embed, layer=apply_layer, head=apply_head, complete=complete)
