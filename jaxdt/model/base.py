"""The table of models, and the functions that stage code asks of each.

A model's parameters are a dict by GLOBAL names, one entry per block, table or head. So the parameters of the stages of
any split merge by name, and can be cut again. A stage holds the layers lo..hi-1, with the embedding on the first stage
and the head on the last.

A new model is one file with a MODEL, an entry in MODELS, and a config with its sizes beside GPTConfig in
jaxdt.run.model.

B samples, T tokens, V vocabulary, W boundary width."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdt.run.model import ModelConfig

Params = dict[str, Any]
Tokens = Int[Array, "B T"]
Boundary = Float[Array, "B T W"]
Logits = Float[Array, "B T V"]


class Model(NamedTuple):
    """The functions of one model. They refuse layers that no stage can have with BadInput."""

    # (config, lo, hi) -> the top-level names of a stage's parameters, sorted
    entries: Callable[[Any, int, int], list[str]]
    # (config, entry) -> the layer to which it belongs: tables to the first, the head to the last
    entry_layer: Callable[[Any, str], int]
    # (config, lo, hi, seed) -> fresh fp32 parameters; every entry depends on the seed and its name only, so that all
    # splits start from the same bits
    init: Callable[[Any, int, int, int], Params]
    # (config, lo, hi, dtype, params, x) -> y; x is tokens on the first stage, y logits in fp32 on the last; all others
    # are boundary tensors in `dtype`
    apply: Callable[[Any, int, int, jnp.dtype, Params, Tokens | Boundary], Boundary | Logits]


# The kind of a config -> the module whose MODEL has the functions. A module is imported when its model is used.
MODELS = {"gpt": "jaxdt.model.gpt"}


def model_of(config: ModelConfig) -> Model:
    """The functions of a config's model."""
    return import_module(MODELS[config.kind]).MODEL
