"""The functions that stage code asks of each family of models.

A model's parameters are a dict by GLOBAL names, one entry per block, table or head. So the parameters of the stages of
any split merge by name, and can be cut again. A stage holds the layers lo..hi-1, with the embedding on the first stage
and the head on the last.

A new family is two files of its name, with a MODEL in jaxdt/model/families and OPTIONS in jaxdt/run/families, which
needs no jax, and its name in the table of jaxdt.run.model. Everything else asks for its facts (jaxdt.model.derive).

Samples may be made of several documents: `begins` [B,T] says of each token where in its sample the document begins; a
token sees no earlier ones, and learned positions count from there. None: a sample is one document.

B samples, T tokens, V vocabulary, W boundary width, E experts."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxdt.run.model_spec import ModelSpec

Params = dict[str, Any]
Tokens = Int[Array, "B T"]
Boundary = Float[Array, "B T W"]
Logits = Float[Array, "B T V"]
Begins = Int[Array, "B T"] | None
Half = tuple[Callable[[Any, Boundary], Boundary], str]


class Auxiliary(NamedTuple):
    """What a layer may give beside its output. It follows from the layer and each sample alone, so that no cut and no
    share of microbatches changes the sums. `loss`: a sum over the samples, with its weight; its gradient joins that of
    the cross-entropy, and the loss that is reported leaves it out. `load`: how often the layer chose each of
    its experts, of which there are some."""

    loss: Float32[Array, ""]
    load: Float32[Array, " E"]


class Entries(NamedTuple):
    """The names of the entries that each part of a model reads."""

    embedding: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]


class Model(NamedTuple):
    """The functions of a family. `params` has at least the entries that the part reads."""

    entries: Callable[[Any], Entries]
    # (options, entry, key of the seed) -> fresh fp32 parameters; they depend on these only, so that all splits start
    # from the same bits
    init: Callable[[Any, str, jax.Array], Any]
    # (options, dtype, params, tokens, begins=None) -> x in this dtype
    embed: Callable[..., Boundary]
    # (options, layer, params, x, begins=None) -> y, or (y, what the layer gives beside it)
    layer: Callable[..., Boundary | tuple[Boundary, Auxiliary]]
    head: Callable[[Any, Params, Boundary], Logits]  # (options, params, y) -> logits in fp32
    # (entry, path of a leaf, its shape) -> its role (jaxdt.run.model_facts); None where the facts do not ask
    role: Callable[[str, str, tuple[int, ...]], str] | None = None
    # (options, layer) -> (function of parameters and x, its entry) of either half of the compression pair behind the
    # first `layer` layers; None for a family that has none
    pair: Callable[[Any, int], tuple[Half, Half]] | None = None
    # (options, entry, path of a leaf) -> whether it is trained; None: all are
    trained: Callable[[Any, str, str], bool] | None = None
    # (options, entry, its parameters in the model folder with which a run begins, key of the seed) -> its parameters;
    # None: the same
    complete: Callable[[Any, str, Any, jax.Array], Any] | None = None


def entry_and_path(keys: Any) -> tuple[str, str]:
    """The entry of a leaf of parameters and its path there, as the facts name them, from the leaf's keys."""
    return keys[0].key, jax.tree_util.keystr(keys[1:], simple=True, separator="/")


def model_of(options: ModelSpec) -> Model:
    """The functions of a model's family. Its module is imported when the family is used."""
    return import_module(options.functions).MODEL


def stage_entries(options: ModelSpec, lo: int, hi: int) -> list[str]:
    """The top-level names of a stage's parameters, sorted. BadInput for layers that no stage can have."""
    options.facts.check_range(lo, hi)
    return [entry.name for entry in options.facts.entries_in(lo, hi)]


def init_stage(options: ModelSpec, lo: int, hi: int, seed: int) -> Params:
    """Fresh fp32 parameters of layers lo..hi-1. Few small programs are compiled, however many layers there are."""
    return {name: init_entry(options, name, seed) for name in stage_entries(options, lo, hi)}


def init_entry(options: ModelSpec, name: str, seed: int) -> Any:
    """Fresh fp32 parameters of one entry."""
    return model_of(options).init(options, name, jax.random.key(seed))


def completed(options: ModelSpec, name: str, tree: Any, seed: int) -> Any:
    """The parameters of an entry of a run that begins with a model whose entry this is."""
    complete = model_of(options).complete
    return complete(options, name, tree, jax.random.key(seed)) if complete else tree


def apply_layer(
    options: ModelSpec, layer: int, params: Params, x: Boundary, begins_BT: Begins = None
) -> tuple[Boundary, tuple[Auxiliary, ...]]:
    """(y, what the layer gives beside it, if it does)."""
    result = model_of(options).layer(options, layer, params, x, begins_BT)
    return (result[0], result[1:]) if isinstance(result, tuple) else (result, ())


def stage_outputs(
    options: ModelSpec,
    lo: int,
    hi: int,
    dtype: jnp.dtype,
    params: Params,
    x: Tokens | Boundary,
    begins_BT: Begins = None,
) -> tuple[Boundary | Logits, tuple[Auxiliary, ...]]:
    """(the output of layers lo..hi-1, what those of them that give something beside it give). x is tokens [B,T] int32
    on the first stage, else [B,T,W] in `dtype` with W the boundary width at lo. The output is logits [B,T,V] fp32 on
    the last stage, else [B,T,W] in `dtype` with W the boundary width at hi."""
    model = model_of(options)
    y: Any = model.embed(options, dtype, params, x, begins_BT) if lo == 0 else x
    found: tuple[Auxiliary, ...] = ()
    for layer in range(lo, hi):
        y, beside = apply_layer(options, layer, params, y, begins_BT)
        found += beside
    return (model.head(options, params, y) if hi == options.facts.n_layers else y), found


def apply_stage(
    options: ModelSpec,
    lo: int,
    hi: int,
    dtype: jnp.dtype,
    params: Params,
    x: Tokens | Boundary,
    begins_BT: Begins = None,
) -> Boundary | Logits:
    """The output alone."""
    return stage_outputs(options, lo, hi, dtype, params, x, begins_BT)[0]
