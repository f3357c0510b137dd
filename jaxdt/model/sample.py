"""Text from a trained model: merge the stages' parameters, then draw one token after another.

T tokens that the model sees, V vocabulary."""

import math
from collections.abc import Collection, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxdt.model.base import Params, apply_stage, stage_entries
from jaxdt.run.errors import BadInput
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.options import SEED_MAX


def assemble(config: ModelSpec, stages: list[Params]) -> Params:
    """One parameter tree from those of the stages of any split, in any order. The two copies of a tied table are equal
    after every update, so either serves. Raises BadInput when the stages do not make up the model."""
    params = {name: entry for stage in stages for name, entry in stage.items()}
    wanted = set(stage_entries(config, 0, config.facts.n_layers))
    if params.keys() != wanted:
        missing, foreign = sorted(wanted - params.keys()), sorted(params.keys() - wanted)
        raise BadInput(f"stages: missing {missing or 'nothing'}, not of this model {foreign or 'nothing'}")
    return params


def generate(
    config: ModelSpec,
    params: Params,
    prompt: Sequence[int],
    n_tokens: int,
    temperature: float,
    seed: int,
    seq_len: int = 0,
    *,
    ends: Collection[int] = (),
    vocab_size: int = 0,
) -> list[int]:
    """The n_tokens token ids that follow `prompt`, or fewer: up to the first of `ends`, the tokens that end a text.
    Temperature 0 takes the likeliest token each time. The model sees the last `seq_len` tokens (0: model.max_len); one
    program of that shape serves every prompt and length. `vocab_size`: that of the text, 0 for the model's; tokens
    with which the model's is padded are never drawn. Raises BadInput."""
    tokens = [int(token) for token in prompt]
    vocab_size = vocab_size or config.facts.vocab_size
    if not tokens or not all(0 <= token < vocab_size for token in tokens):
        raise BadInput(f"prompt: got {tokens}, expected one or more token ids below {vocab_size}")
    if not 0 <= temperature < math.inf:
        raise BadInput(f"temperature: got {temperature!r}, expected a finite number >= 0")
    if not abs(seed) <= SEED_MAX:
        raise BadInput(f"seed: got {seed}, expected an integer of 64 bits, at most {SEED_MAX}")
    key, seq_len = jax.random.key(seed), seq_len or config.max_len
    for i in range(n_tokens):
        seen = tokens[-seq_len:]
        tokens_T = np.zeros(seq_len, np.int32)
        tokens_T[: len(seen)] = seen
        drawn = jax.random.fold_in(key, i)
        token = int(_next_token(config, vocab_size, params, tokens_T, len(seen), temperature=temperature, key=drawn))
        if token in ends:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@partial(jax.jit, static_argnums=(0, 1))
def _next_token(
    config: ModelSpec,
    vocab_size: int,
    params: Params,
    tokens_T: Int[Array, " T"],
    n_seen: int,
    *,
    temperature: float,
    key: jax.Array,
) -> Int[Array, ""]:
    """The token after the first n_seen; attention is causal, so the tokens behind these do not matter."""
    dtype = jnp.dtype(jnp.float32)
    logits_BTV = apply_stage(config, 0, config.facts.n_layers, dtype, params, tokens_T[None])
    logits_V: Float[Array, " V"] = logits_BTV[0, n_seen - 1, :vocab_size]
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V))
