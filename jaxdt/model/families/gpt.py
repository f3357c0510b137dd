"""A GPT in Flax, cut at any layer. The parameters of a stage are a dict by GLOBAL names (jaxdt.model.base):

  "tok" [V, D]            on the first stage; with a tied head on the last as well (once, where they are the same)
  "pos" [T, D]            on the first stage, where positions are learned
  "block_000", ...        one per block that the stage's layers apply (with shared blocks, fewer than layers)
  "head"                  on the last stage: final LayerNorm "ln", and "out" [D, V] unless tied
  "sender_006"            with compression behind the first 6 layers, the narrowing half: on the stage that holds
                          layer 5, so that the stage which ends there sends the narrow tensor
  "receiver_006"          its widening half: on the stage that holds layer 6

B samples, T tokens, D width, H heads, K head width, F feed-forward width, V vocabulary, W boundary width (D, or less
with compression)."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdt.model import kernels
from jaxdt.model.base import Begins, Boundary, Entries, Half, Logits, Model, Params, Tokens
from jaxdt.model.layers import (
    INIT_STD,
    TABLES,
    Dense,
    Embedding,
    Head,
    LayerNorm,
    Receiver,
    Sender,
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
from jaxdt.run.families.gpt import GPTConfig

ROTARY_BASE = 10000.0


class Block(nn.Module):
    """Pre-norm attention and feed-forward, [B,T,D] -> [B,T,D] in the dtype of its input."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"], begins_BT: Begins = None) -> Float[Array, "B T D"]:
        c = self.config
        # The two projections onto the residual stream start smaller, so its variance does not grow with depth
        # (Radford et al. 2019, GPT-2, Sec. 2.3).
        narrow = INIT_STD / (2 * c.n_layers) ** 0.5
        qkv = Dense(3 * c.d_model, name="qkv")(LayerNorm(name="ln1")(x_BTD))
        mixed_BTD = _attend(c, qkv, begins_BT)
        x_BTD = x_BTD + Dense(c.d_model, nn.initializers.normal(narrow), name="proj")(mixed_BTD)
        up = Dense(c.d_ff * (2 if c.activation == "geglu" else 1), name="up")(LayerNorm(name="ln2")(x_BTD))
        return x_BTD + Dense(c.d_model, nn.initializers.normal(narrow), name="down")(_activate(c, up))


def _attend(c: GPTConfig, qkv_BT3D, begins_BT: Begins):
    """Causal attention of all heads, [B,T,3D] -> [B,T,D]."""
    q_BHTK, k_BHTK, v_BHTK = (split_heads(part_BTD, c.n_heads) for part_BTD in jnp.split(qkv_BT3D, 3, axis=-1))
    if c.positions == "rotary":
        turns = frequencies(c.d_model // c.n_heads, ROTARY_BASE)
        q_BHTK, k_BHTK = rotate(q_BHTK, turns), rotate(k_BHTK, turns)
    return attend(q_BHTK, k_BHTK, v_BHTK, begins_BT)


def _activate(c: GPTConfig, up):
    """GELU [B,T,F] -> [B,T,F], or GeGLU (Shazeer 2020, Eq. 6) [B,T,2F] -> [B,T,F]: gelu(first half) * second half."""
    if c.activation == "gelu":
        return kernels.gelu(up)
    gate, value = jnp.split(up, 2, axis=-1)
    return kernels.gelu(gate) * value


def sender_name(layer: int) -> str:
    """The entry of the narrowing half behind the first `layer` layers."""
    return f"sender_{layer:03d}"


def receiver_name(layer: int) -> str:
    """The entry of the widening half behind the first `layer` layers."""
    return f"receiver_{layer:03d}"


def entries(config: GPTConfig) -> Entries:
    """The entries that each part reads. Of a pair of compression layers, the layer before it has the narrowing half and
    the layer behind it the widening half."""
    layers = []
    for layer in range(config.n_layers):
        names = [block_name(config.block_of(layer))]
        if layer in config.compression_after:
            names.append(receiver_name(layer))
        if layer + 1 in config.compression_after:
            names.append(sender_name(layer + 1))
        layers.append(tuple(names))
    embedding = ("tok", "pos") if config.positions == "learned" else ("tok",)
    return Entries(embedding, tuple(layers), ("head", "tok") if config.tied_head else ("head",))


def _embedding(c: GPTConfig, dtype: jnp.dtype) -> Embedding:
    return Embedding(c.vocab_size, c.d_model, c.max_len if c.positions == "learned" else 0, dtype)


def embed(config: GPTConfig, dtype: jnp.dtype, params: Params, tokens_BT: Tokens, begins_BT: Begins = None) -> Boundary:
    """tokens [B,T] int32 -> [B,T,D] in `dtype`, for any T up to max_len."""
    tables = {name: params[name] for name in TABLES if name in params}
    x_BTD: Any = _embedding(config, dtype).apply({"params": tables}, tokens_BT, begins_BT)
    return x_BTD


def apply_layer(config: GPTConfig, layer: int, params: Params, x: Boundary, begins_BT: Begins = None) -> Boundary:
    """One layer, with the half of a compression pair on either side of it."""
    y: Any = x
    if layer in config.compression_after:
        y = _receiver(config).apply({"params": params[receiver_name(layer)]}, y)
    y = Block(config).apply({"params": params[block_name(config.block_of(layer))]}, y, begins_BT)
    if layer + 1 in config.compression_after:
        y = _sender(config).apply({"params": params[sender_name(layer + 1)]}, y)
    return y


def apply_head(config: GPTConfig, params: Params, x: Boundary) -> Logits:
    """Logits [B,T,V] in fp32."""
    tok_VD = params["tok"] if config.tied_head else None
    logits: Any = Head(config.vocab_size, LayerNorm).apply({"params": params["head"]}, x, tok_VD)
    return logits


def _sender(config: GPTConfig) -> Sender:
    return Sender(config.compression_kind, config.compression_ratio)


def _receiver(config: GPTConfig) -> Receiver:
    return Receiver(config.d_model)


def init_entry(config: GPTConfig, name: str, key: jax.Array) -> Any:
    """Fresh fp32 parameters of an entry; `key` is the seed's."""
    return _init(config, name if name in TABLES else kind_of(name), entry_key(name, key))


@partial(jax.jit, static_argnums=(0, 1))
def _init(config: GPTConfig, kind: str, key: jax.Array) -> Any:
    """One program for all blocks."""
    d_model, x_BTD = config.d_model, jnp.zeros((1, 1, config.d_model))
    match kind:
        case "block":
            return init(kind, key, Block(config), x_BTD)
        case "head":
            tok_VD = jnp.zeros((config.vocab_size, d_model)) if config.tied_head else None
            return init(kind, key, Head(config.vocab_size, LayerNorm), x_BTD, tok_VD)
        case "sender":
            return init(kind, key, _sender(config), x_BTD)
        case "receiver":
            return init(kind, key, _receiver(config), jnp.zeros((1, 1, d_model // config.compression_ratio)))
    return init(kind, key, _embedding(config, jnp.dtype(jnp.float32)), jnp.zeros((1, config.max_len), jnp.int32))


def pair(config: GPTConfig, layer: int) -> tuple[Half, Half]:
    """The narrowing and the widening half behind the first `layer` layers."""

    def send(params: Any, x: Boundary) -> Boundary:
        y: Any = _sender(config).apply({"params": params}, x)
        return y

    def receive(params: Any, x: Boundary) -> Boundary:
        y: Any = _receiver(config).apply({"params": params}, x)
        return y

    return (send, sender_name(layer)), (receive, receiver_name(layer))


MODEL = Model(entries=entries, init=init_entry, role=role, embed=embed, layer=apply_layer, head=apply_head, pair=pair)
