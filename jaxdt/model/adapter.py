"""The functions of a model with an adapter (jaxdt.run.adapter): those of the model itself, to whose layers each adapted
matrix goes as three, of which the product with a weight knows (jaxdt.model.kernels). A module of one's own may multiply
as it likes: its layers get the sum of the matrices.

D, F the axes of a matrix, K the rank."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.model import kernels
from jaxdt.model.base import Auxiliary, Begins, Boundary, Entries, Logits, Model, Params, Tokens, model_of
from jaxdt.model.kernels import Adapted
from jaxdt.run.adapter import LORA, SCALE, A, B
from jaxdt.run.model_spec import ModelSpec


def without_adapter(tree: Any) -> Any:
    """An entry as the model itself has it, its adapted matrices computed; of jax or of numpy arrays."""
    return _joined(tree, lambda matrix_DF, a_DK, b_KF: matrix_DF + a_DK @ b_KF)


def _joined(tree: Any, join: Callable[[Any, Any, Any], Any]) -> Any:
    """An entry with join(matrix, a, SCALE b) in the place of each adapted matrix."""

    def joined(inner: Any, adapters: Any) -> Any:
        if not isinstance(inner, dict):
            return join(inner, adapters[A], SCALE * adapters[B])
        return {name: joined(part, adapters[name]) if name in adapters else part for name, part in inner.items()}

    if not isinstance(tree, dict) or LORA not in tree:
        return tree
    return joined({name: inner for name, inner in tree.items() if name != LORA}, tree[LORA])


def held(options: ModelSpec, name: str, tree: Any, dtype: str) -> Any:
    """An entry as a peer holds it that computes in `dtype`: frozen matrices and tables are in bf16 where the peer
    computes in it, or where all their numbers are numbers of bf16, as in most published files: nothing is lost then.
    A module of one's own gets all in fp32."""
    entry = next(entry for entry in options.facts.entries if entry.name == name)
    narrow = {leaf.path for leaf in entry.leaves if leaf.is_narrow}
    if options.has_own_sources:
        return tree

    def narrowed(keys: Any, leaf: Any) -> Any:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        is_narrow = path in narrow and (dtype == "bfloat16" or _is_bf16(leaf))
        return kernels.narrowed(leaf) if is_narrow else leaf

    return jax.tree_util.tree_map_with_path(narrowed, tree)


def _is_bf16(leaf: Any) -> bool:
    """Whether an array of fp32 that was read has numbers of bf16 only: the lower half of each is 0. Drawn ones have
    others."""
    return isinstance(leaf, np.ndarray) and not np.ascontiguousarray(leaf).reshape(-1).view("<u2")[::2].any()


def _as_adapted(tree: Any) -> Any:
    return _joined(tree, Adapted)


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
    read_by = without_adapter if base.has_own_sources else _as_adapted
    read = {name: read_by(params[name]) for name in model.entries(base).layers[layer]}
    return model.layer(base, layer, params | read, x, begins_BT)


def apply_head(options: ModelSpec, params: Params, x: Boundary) -> Logits:
    model, base = _base(options)
    return model.head(base, params, x)


def _base(options: ModelSpec) -> tuple[Model, ModelSpec]:
    base = options.without_adapter()
    return model_of(base), base


# The facts of a model with an adapter follow from those of the model: they ask for no roles here.
MODEL = Model(entries=entries, init=init_entry, embed=embed, layer=apply_layer, head=apply_head, complete=complete)
