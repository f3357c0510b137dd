"""What Llama-like families share: attention with rotary positions and grouped heads, and the functions of a model whose
blocks are of one class, cut at any layer. The parameters of a stage are a dict by GLOBAL names:

  "tok" [V, D]            on the first stage; with a tied head on the last as well (once, where they are the same)
  "block_000", ...        those of a block
  "head"                  on the last stage: final RMSNorm "ln", and "out" [D, V] unless tied

B samples, T tokens, D width, H heads, G heads of keys and values, K head width, V vocabulary, P = K/2."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdt.model.base import Auxiliary, Begins, Boundary, Entries, Logits, Model, Params, Tokens
from jaxdt.model.layers import (
    INIT_STD,
    TABLES,
    Dense,
    Embedding,
    Head,
    RMSNorm,
    attend,
    block_name,
    entry_key,
    frequencies,
    init,
    kind_of,
    role,
    rotate,
    split_heads,
)

Options = Any  # those of a family that has all the fields which this file reads


def onto_residual(c: Options) -> Callable:
    """As in the GPT: the two projections onto the residual stream start smaller."""
    return nn.initializers.normal(INIT_STD / (2 * c.n_layers) ** 0.5)


def with_attention(c: Options, x_BTD: Float[Array, "B T D"], begins_BT: Begins) -> Float[Array, "B T D"]:
    """x and the attention of the normalised x. Its layers are those of the module that calls this."""
    norm = partial(RMSNorm, c.norm_eps)
    h_BTD = norm(name="ln1")(x_BTD)
    q_BHTK, k_BGTK, v_BGTK = (
        split_heads(Dense(n_heads * c.head_width, use_bias=c.qkv_bias, name=name)(h_BTD), n_heads)
        for name, n_heads in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads))
    )
    if c.qk_norm:
        q_BHTK, k_BGTK = norm(name="q_norm")(q_BHTK), norm(name="k_norm")(k_BGTK)
    mixed = attend(_turned(c, q_BHTK), _turned(c, k_BGTK), v_BGTK, begins_BT, c.window)
    return x_BTD + Dense(c.d_model, onto_residual(c), use_bias=c.o_bias, name="o")(mixed)


def _turned(c: Options, x: Float[Array, "B H T K"]) -> Float[Array, "B H T K"]:
    """With rotary positions, counted from the start of the sample: only differences of positions matter. They are
    computed in fp32: bf16 has too few digits for the angles of late tokens."""
    return rotate(x.astype(jnp.float32), _frequencies(c)).astype(x.dtype)


def _frequencies(c: Options) -> np.ndarray:
    """[P] radians from one token to the next. Llama 3 slows a pair down by `factor` if it turns fewer than `low` times
    in the original length, leaves it if it turns more than `high` times, and mixes both in between."""
    turns_P = frequencies(c.head_width, c.rope_theta)
    if not c.rope_scaling:
        return turns_P
    factor, low, high, original_len = c.rope_scaling
    share_P = np.clip((original_len * turns_P / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return share_P * turns_P + (1 - share_P) * turns_P / factor


def decoder(block: Callable[[Options], nn.Module]) -> Model:
    """The functions of a model of such blocks, options -> module."""

    def apply_layer(
        config: Options, layer: int, params: Params, x: Boundary, begins_BT: Begins = None
    ) -> Boundary | tuple[Boundary, Auxiliary]:
        result: Any = block(config).apply({"params": params[block_name(layer)]}, x, begins_BT)
        return result

    def init_entry(config: Options, name: str, key: jax.Array) -> Any:
        return _init(block, config, name if name in TABLES else kind_of(name), entry_key(name, key))

    return Model(entries=_entries, init=init_entry, role=role, embed=_embed, layer=apply_layer, head=_apply_head)


def _entries(config: Options) -> Entries:
    """The entries that each part reads."""
    layers = tuple((block_name(layer),) for layer in range(config.n_layers))
    return Entries(("tok",), layers, ("head", "tok") if config.tied_head else ("head",))


def _embedding(c: Options, dtype: jnp.dtype) -> Embedding:
    return Embedding(c.vocab_size, c.d_model, 0, dtype)


def _head(c: Options) -> Head:
    return Head(c.vocab_size, partial(RMSNorm, c.norm_eps))


def _embed(config: Options, dtype: jnp.dtype, params: Params, tokens_BT: Tokens, begins_BT: Begins = None) -> Boundary:
    """tokens [B,T] int32 -> [B,T,D] in `dtype`; there are no positions here."""
    del begins_BT
    x_BTD: Any = _embedding(config, dtype).apply({"params": {"tok": params["tok"]}}, tokens_BT)
    return x_BTD


def _apply_head(config: Options, params: Params, x: Boundary) -> Logits:
    """Logits [B,T,V] in fp32."""
    tok_VD = params["tok"] if config.tied_head else None
    logits: Any = _head(config).apply({"params": params["head"]}, x, tok_VD)
    return logits


@partial(jax.jit, static_argnums=(0, 1, 2))
def _init(block: Callable[[Options], nn.Module], config: Options, kind: str, key: jax.Array) -> Any:
    """Fresh fp32 parameters of an entry of this kind. One program for all blocks."""
    x_BTD = jnp.zeros((1, 1, config.d_model))
    match kind:
        case "block":
            return init(kind, key, block(config), x_BTD)
        case "head":
            tok_VD = jnp.zeros((config.vocab_size, config.d_model)) if config.tied_head else None
            return init(kind, key, _head(config), x_BTD, tok_VD)
    return init(kind, key, _embedding(config, jnp.dtype(jnp.float32)), jnp.zeros((1, 1), jnp.int32))
