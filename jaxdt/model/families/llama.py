"""A Llama-like decoder in Flax, cut at any layer. The parameters of a stage are a dict by GLOBAL names:

  "tok" [V, D]            on the first stage; with a tied head on the last as well (once, where they are the same)
  "block_000", ...        norms ln1, ln2, and with qk_norm q_norm, k_norm; projections q, k, v, o, gate, up, down
  "head"                  on the last stage: final RMSNorm "ln", and "out" [D, V] unless tied

B samples, T tokens, D width, H heads, G heads of keys and values, K head width, F feed-forward width, P = K/2."""

import math
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxdt.model import kernels
from jaxdt.model.base import Boundary, Entries, Logits, Model, Params, Tokens
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
from jaxdt.run.families.llama import LlamaConfig


class Block(nn.Module):
    """Pre-norm attention and feed-forward, [B,T,D] -> [B,T,D] in the dtype of its input."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        dense = partial(Dense, use_bias=False)
        # As in the GPT: the two projections onto the residual stream start smaller.
        narrow = nn.initializers.normal(INIT_STD / (2 * c.n_layers) ** 0.5)
        norm = partial(RMSNorm, c.norm_eps)
        h_BTD = norm(name="ln1")(x_BTD)
        q_BHTK, k_BGTK, v_BGTK = (
            split_heads(Dense(n_heads * c.head_width, use_bias=c.qkv_bias, name=name)(h_BTD), n_heads)
            for name, n_heads in (("q", c.n_heads), ("k", c.n_kv_heads), ("v", c.n_kv_heads))
        )
        if c.qk_norm:
            q_BHTK, k_BGTK = norm(name="q_norm")(q_BHTK), norm(name="k_norm")(k_BGTK)
        mixed = attend(_turned(c, q_BHTK), _turned(c, k_BGTK), v_BGTK, c.window)
        x_BTD = x_BTD + Dense(c.d_model, narrow, use_bias=c.o_bias, name="o")(mixed)
        h_BTD = norm(name="ln2")(x_BTD)
        up_BTF = kernels.swiglu(dense(c.d_ff, name="gate")(h_BTD), dense(c.d_ff, name="up")(h_BTD))
        return x_BTD + dense(c.d_model, narrow, name="down")(up_BTF)


def _turned(c: LlamaConfig, x: Float[Array, "B H T K"]) -> Float[Array, "B H T K"]:
    """With rotary positions. They are computed in fp32: bf16 has too few digits for the angles of late tokens."""
    return rotate(x.astype(jnp.float32), _frequencies(c)).astype(x.dtype)


def _frequencies(c: LlamaConfig) -> np.ndarray:
    """[P] radians from one token to the next. Llama 3 slows a pair down by `factor` if it turns fewer than `low` times
    in the original length, leaves it if it turns more than `high` times, and mixes both in between."""
    turns_P = frequencies(c.head_width, c.rope_theta)
    if not c.rope_scaling:
        return turns_P
    factor, low, high, original_len = c.rope_scaling
    share_P = np.clip((original_len * turns_P / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    return share_P * turns_P + (1 - share_P) * turns_P / factor


def entries(config: LlamaConfig) -> Entries:
    """The entries that each part reads."""
    layers = tuple((block_name(layer),) for layer in range(config.n_layers))
    return Entries(("tok",), layers, ("head", "tok") if config.tied_head else ("head",))


def _embedding(c: LlamaConfig, dtype: jnp.dtype) -> Embedding:
    return Embedding(c.vocab_size, c.d_model, 0, dtype)


def _head(c: LlamaConfig) -> Head:
    return Head(c.vocab_size, partial(RMSNorm, c.norm_eps))


def embed(config: LlamaConfig, dtype: jnp.dtype, params: Params, tokens_BT: Tokens) -> Boundary:
    """tokens [B,T] int32 -> [B,T,D] in `dtype`."""
    x_BTD: Any = _embedding(config, dtype).apply({"params": {"tok": params["tok"]}}, tokens_BT)
    return x_BTD


def apply_layer(config: LlamaConfig, layer: int, params: Params, x: Boundary) -> Boundary:
    """One layer."""
    y: Any = Block(config).apply({"params": params[block_name(layer)]}, x)
    return y


def apply_head(config: LlamaConfig, params: Params, x: Boundary) -> Logits:
    """Logits [B,T,V] in fp32."""
    tok_VD = params["tok"] if config.tied_head else None
    logits: Any = _head(config).apply({"params": params["head"]}, x, tok_VD)
    return logits


def init_entry(config: LlamaConfig, name: str, key: jax.Array) -> Any:
    """Fresh fp32 parameters of an entry; `key` is the seed's."""
    return _init(config, name if name in TABLES else kind_of(name), entry_key(name, key))


@partial(jax.jit, static_argnums=(0, 1))
def _init(config: LlamaConfig, kind: str, key: jax.Array) -> Any:
    """One program for all blocks."""
    x_BTD = jnp.zeros((1, 1, config.d_model))
    match kind:
        case "block":
            return init(kind, key, Block(config), x_BTD)
        case "head":
            tok_VD = jnp.zeros((config.vocab_size, config.d_model)) if config.tied_head else None
            return init(kind, key, _head(config), x_BTD, tok_VD)
    return init(kind, key, _embedding(config, jnp.dtype(jnp.float32)), jnp.zeros((1, 1), jnp.int32))


MODEL = Model(entries=entries, init=init_entry, role=role, embed=embed, layer=apply_layer, head=apply_head)
