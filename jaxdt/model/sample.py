"""Text from a trained model: merge the stages' parameters, then draw one token after another.

T tokens (the window), V vocabulary."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.model.gpt import apply_stage, stage_entries
from jaxdt.spec.errors import BadInput
from jaxdt.spec.model import GPTConfig


def assemble(config: GPTConfig, stages: list[dict]) -> dict:
    """One parameter tree from those of the stages of any split, in any order. The two copies of a tied table are equal
    after every update, so either serves. Raises BadInput when the stages do not make up the model."""
    params = {name: entry for stage in stages for name, entry in stage.items()}
    wanted = set(stage_entries(config, 0, config.n_layers))
    if params.keys() != wanted:
        missing, foreign = sorted(wanted - params.keys()), sorted(params.keys() - wanted)
        raise BadInput(f"stages: missing {missing or 'nothing'}, not of this model {foreign or 'nothing'}")
    return params


def generate(
    config: GPTConfig, params: dict, prompt: Sequence[int], n_tokens: int, temperature: float, seed: int
) -> list[int]:
    """The n_tokens token ids that follow `prompt`. Temperature 0 takes the likeliest token each time. The model sees
    the last seq_len tokens; one program of that shape serves every prompt and length. Raises BadInput."""
    tokens = [int(token) for token in prompt]
    if not tokens or not all(0 <= token < config.vocab_size for token in tokens):
        raise BadInput(f"prompt: got {tokens}, expected one or more token ids below {config.vocab_size}")
    if temperature < 0:
        raise BadInput(f"temperature: got {temperature!r}, expected a number >= 0")
    key, n_prompt = jax.random.key(seed), len(tokens)
    for i in range(n_tokens):
        seen = tokens[-config.seq_len :]
        window_T = np.zeros(config.seq_len, np.int32)
        window_T[: len(seen)] = seen
        tokens.append(int(_next_token(config, params, window_T, len(seen), temperature, jax.random.fold_in(key, i))))
    return tokens[n_prompt:]


@partial(jax.jit, static_argnums=0)
def _next_token(config: GPTConfig, params: dict, window_T, n_seen, temperature, key):
    """The token after the first n_seen of the window; attention is causal, so what fills the rest does not matter."""
    logits_V = apply_stage(config, 0, config.n_layers, jnp.float32, params, window_T[None])[0, n_seen - 1]
    drawn = jax.random.categorical(key, logits_V / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits_V))
