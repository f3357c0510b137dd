"""Reads the facts of a model (jaxdt.run.model_facts) off the functions of its family. No array is made: jax.eval_shape
gives the sizes of parameters, and the products of each distinct layer stand in its jaxpr.

As a script it answers questions of processes without jax: a line of JSON with a model's options in, a line with the
facts and a digest of its sources out, or why there are none."""

import json
import math
import os
import re
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdt.model import facts_process, kernels
from jaxdt.model.base import Model, Params, apply_layer, model_of
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.model import read_options
from jaxdt.run.model_facts import Entry, LayerFacts, Leaf, ModelFacts
from jaxdt.run.model_spec import ModelSpec

# Of the values that a layer's backward computes at once: so many per result of a product with a weight, and per result
# of a product of activations that has a number for each pair of tokens (attention scores). Read off XLA's own figures
# for fp32 on CPU; good to a third.
WORKING_PRODUCTS, WORKING_SCORES = 2, 4 / 3
IDLE_S = 60.0  # without a question, after which the process of this script ends
Function = Callable[[Params, Any], Any]
LENGTHS = (2, 3)  # of the samples for which a layer is traced; what differs between them grows with the length


class _Products(NamedTuple):
    """What the products of a part of a model take for one token: FLOP and numbers of the results; and the weights of
    experts to which it is not sent."""

    weight_flops: int
    weight_numbers: int
    other_flops: int
    other_numbers: int
    unused_weights: int


def facts(options: ModelSpec) -> ModelFacts:
    """The facts of a model with these options."""
    model = model_of(options)
    reads = model.entries(options)
    n_layers = len(reads.layers)
    readers: dict[str, set[int]] = {}
    for layer, names in ((0, reads.embedding), *enumerate(reads.layers), (n_layers - 1, reads.head)):
        for name in names:
            readers.setdefault(name, set()).add(layer)
    names = sorted(readers)
    trees = jax.eval_shape(lambda: {name: model.init(options, name, jax.random.key(0)) for name in names})
    entries = {
        name: Entry(name, tuple(sorted(readers[name])), _leaves(model, options, name, trees[name])) for name in trees
    }

    embedding = {name: trees[name] for name in reads.embedding}
    embed = partial(model.embed, options, jnp.dtype(jnp.float32))
    (first,), x = _traced(embed, embedding, _tokens, LENGTHS[:1])
    known: dict[str, LayerFacts] = {}
    layers: list[LayerFacts] = []
    in_width = width = x.shape[-1]
    for layer, names in enumerate(reads.layers):
        params = {name: trees[name] for name in names}
        shapes = [[(leaf.path, leaf.shape, leaf.trained) for leaf in entries[name].leaves] for name in names]
        kind = f"{width} {shapes}"
        if options.has_own_sources:  # blocks with equal leaves may compute something else
            kind += _program(partial(model.layer, options, layer), params, width)
        if kind not in known:
            known[kind] = replace(_layer(partial(apply_layer, options, layer), params, width), like=layer)
        splits_no_entry = layer == 0 or not set(names) & set(reads.layers[layer - 1])
        layers.append(replace(known[kind], cut=splits_no_entry))
        width = layers[-1].out_width
    head = {name: trees[name] for name in reads.head}
    (last,), logits = _traced(partial(model.head, options), head, partial(_activation, width), LENGTHS[:1])
    return ModelFacts(
        vocab_size=logits.shape[-1],
        max_len=options.max_len,
        in_width=in_width,
        layers=tuple(layers),
        entries=tuple(entries.values()),
        first_flops=first.weight_flops,
        last_flops=last.weight_flops,
    )


def _leaves(model: Model, options: ModelSpec, entry: str, tree: Any) -> tuple[Leaf, ...]:
    assert model.role is not None, "it is that of a family, without an adapter"
    found = []
    for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        is_trained = model.trained is None or model.trained(options, entry, path)
        found.append(Leaf(path, leaf.shape, model.role(entry, path, leaf.shape), is_trained))
    return tuple(found)


def _layer(function: Function, params: Params, in_width: int) -> LayerFacts:
    (short, long), (y, beside) = _traced(function, params, partial(_activation, in_width), LENGTHS)
    n_more = LENGTHS[1] - LENGTHS[0]
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    return LayerFacts(
        out_width=y.shape[-1],
        flops=short.weight_flops,
        flops_per_token=(long.other_flops - short.other_flops) // n_more,
        saved=short.weight_numbers,
        working=float(WORKING_PRODUCTS * short.weight_numbers),
        working_per_token=WORKING_SCORES * ((long.other_numbers - short.other_numbers) // n_more),
        n_params=n_params,
        n_used=n_params - short.unused_weights,
        cut=True,
        like=0,
        n_experts=sum(len(one.load) for one in beside),
    )


def _program(function: Function, params: Params, in_width: int) -> str:
    """The text of a layer's jaxpr; functions in it stand with their addresses, which say nothing."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(function)(params, _activation(in_width, LENGTHS[0]))))


def _tokens(length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length), jnp.int32)


def _activation(width: int, length: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length, width), jnp.float32)


def _traced(
    function: Function, params: Params, x: Callable[[int], Any], lengths: tuple[int, ...]
) -> tuple[list[_Products], Any]:
    """(products with samples of each of these lengths, shapes of the result)."""
    found, result = [], None
    for length in lengths:
        jaxpr, result = jax.make_jaxpr(function, return_shape=True)(params, x(length))
        counts = [_product(eqn, length) for eqn in _equations(jaxpr.jaxpr)]
        found.append(_Products(*(sum(column) // length for column in zip((0,) * 5, *counts, strict=True))))
    return found, result


def _equations(jaxpr: Any) -> Iterator[Any]:
    """The products of a jaxpr, with those of the jaxprs in it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is kernels.grouped_product_p or eqn.primitive.name == "dot_general":
            yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


def _product(eqn: Any, n_tokens: int) -> tuple[int, int, int, int, int]:
    """What a product takes for n_tokens. It has weights if nothing in it is a batch dimension."""
    n_numbers = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive is kernels.grouped_product_p:
        rows, weights = eqn.invars[0].aval, eqn.invars[1].aval
        unused = n_tokens * weights.size - rows.shape[0] * math.prod(weights.shape[1:])
        return 2 * n_numbers * rows.shape[-1], n_numbers, 0, 0, unused
    (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
    flops = 2 * n_numbers * math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return (0, 0, flops, n_numbers, 0) if batch else (flops, n_numbers, 0, 0, 0)


if __name__ == "__main__":
    # A module of one's own may print: that is not an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while select.select([sys.stdin], [], [], IDLE_S)[0] and (question := sys.stdin.readline()):
        try:
            found = read_options(json.loads(question), "model").facts
            answer = {"sources": facts_process.sources(), "facts": serialize.write(found)}
        except BadInput as error:
            answer = {"refused": str(error)}
        print(json.dumps(answer), file=answers, flush=True)
