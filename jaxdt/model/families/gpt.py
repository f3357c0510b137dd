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
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jaxdt.model import kernels
from jaxdt.model.base import Boundary, Entries, Half, Logits, Model, Params, Tokens
from jaxdt.model.layers import INIT_STD, Dense, LayerNorm, Receiver, Sender
from jaxdt.run.model import GPTConfig
from jaxdt.run.model_facts import MATRIX, TABLE, VECTOR

ROTARY_BASE = 10000.0
# Each entry of the parameters draws its random numbers from a key of its own: the seed's, folded with one of these
# numbers. Blocks, senders and receivers count on from theirs.
_EMBEDDING_ID, _HEAD_ID, _FIRST_BLOCK_ID = 0, 1, 2
_FIRST_SENDER_ID, _FIRST_RECEIVER_ID = 1 << 20, 1 << 21


class Block(nn.Module):
    """Pre-norm attention and feed-forward, [B,T,D] -> [B,T,D] in the dtype of its input."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        # The two projections onto the residual stream start smaller, so its variance does not grow with depth
        # (Radford et al. 2019, GPT-2, Sec. 2.3).
        narrow = INIT_STD / (2 * c.n_layers) ** 0.5
        qkv = Dense(3 * c.d_model, name="qkv")(LayerNorm(name="ln1")(x_BTD))
        x_BTD = x_BTD + Dense(c.d_model, nn.initializers.normal(narrow), name="proj")(_attend(c, qkv))
        up = Dense(c.d_ff * (2 if c.activation == "geglu" else 1), name="up")(LayerNorm(name="ln2")(x_BTD))
        return x_BTD + Dense(c.d_model, nn.initializers.normal(narrow), name="down")(_activate(c, up))


class Embedding(nn.Module):
    """tokens [B,T] int32 -> [B,T,D] in `dtype`, for any T up to max_len."""

    config: GPTConfig
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        c = self.config
        normal = nn.initializers.normal(INIT_STD)
        x_BTD = self.param("tok", normal, (c.vocab_size, c.d_model), jnp.float32)[tokens_BT]
        if c.positions == "learned":
            pos = self.param("pos", normal, (c.max_len, c.d_model), jnp.float32)
            x_BTD = x_BTD + pos[None, : tokens_BT.shape[1]]
        return x_BTD.astype(self.dtype)


class Head(nn.Module):
    """[B,T,D] -> logits [B,T,V] in fp32; tok_VD is the token table of a tied head, None of an untied one."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"], tok_VD: Float32[Array, "V D"] | None) -> Float32[Array, "B T V"]:
        c = self.config
        x_BTD = LayerNorm(name="ln")(x_BTD)
        if c.tied_head:
            assert tok_VD is not None
            out_DV = tok_VD.T
        else:
            out_DV = self.param("out", nn.initializers.normal(INIT_STD), (c.d_model, c.vocab_size), jnp.float32)
        return kernels.product(x_BTD, out_DV).astype(jnp.float32)


def _attend(c: GPTConfig, qkv_BT3D):
    """Causal attention of all heads, [B,T,3D] -> [B,T,D]. Heads go before tokens first: the two products then are
    plain batched matrix products, a third faster on CPU than with heads in the middle."""
    b, t, _ = qkv_BT3D.shape
    k = c.d_model // c.n_heads
    q_BHTK, k_BHTK, v_BHTK = (
        jnp.transpose(part_BTD.reshape(b, t, c.n_heads, k), (0, 2, 1, 3))
        for part_BTD in jnp.split(qkv_BT3D, 3, axis=-1)
    )
    if c.positions == "rotary":
        q_BHTK, k_BHTK = _rotate(q_BHTK), _rotate(k_BHTK)
    scores_BHTT = jnp.einsum("bhqk,bhtk->bhqt", q_BHTK * k**-0.5, k_BHTK)
    mixed_BHTK = jnp.einsum("bhqt,bhtk->bhqk", kernels.causal_softmax(scores_BHTT), v_BHTK)
    return jnp.transpose(mixed_BHTK, (0, 2, 1, 3)).reshape(b, t, c.d_model)


def _rotate(x_BHTK):
    """Rotary positions (Su et al. 2021, RoFormer, Eq. 34): the pairs (i, i + K/2) turn by t * base^(-2i/K)."""
    t, k = x_BHTK.shape[-2:]
    angle = np.arange(t)[:, None] * ROTARY_BASE ** (-np.arange(0, k, 2) / k)
    cos, sin = (jnp.asarray(f(angle), x_BHTK.dtype)[None, None] for f in (np.cos, np.sin))
    left, right = jnp.split(x_BHTK, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def _activate(c: GPTConfig, up):
    """GELU [B,T,F] -> [B,T,F], or GeGLU (Shazeer 2020, Eq. 6) [B,T,2F] -> [B,T,F]: gelu(first half) * second half."""
    if c.activation == "gelu":
        return kernels.gelu(up)
    gate, value = jnp.split(up, 2, axis=-1)
    return kernels.gelu(gate) * value


def block_name(block: int) -> str:
    """The entry of a block, by the first layer that applies it."""
    return f"block_{block:03d}"


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


def role(entry: str, path: str, shape: tuple[int, ...]) -> str:
    """Biases and the scales of LayerNorms are vectors."""
    del path
    if len(shape) < 2:
        return VECTOR
    return TABLE if entry in ("tok", "pos") else MATRIX


def embed(config: GPTConfig, dtype: jnp.dtype, params: Params, tokens_BT: Tokens) -> Boundary:
    """tokens [B,T] int32 -> [B,T,D] in `dtype`, for any T up to max_len."""
    tables = {name: params[name] for name in ("tok", "pos") if name in params}
    x_BTD: Any = Embedding(config, dtype).apply({"params": tables}, tokens_BT)
    return x_BTD


def apply_layer(config: GPTConfig, layer: int, params: Params, x: Boundary) -> Boundary:
    """One layer, with the half of a compression pair on either side of it."""
    y: Any = x
    if layer in config.compression_after:
        y = _receiver(config).apply({"params": params[receiver_name(layer)]}, y)
    y = Block(config).apply({"params": params[block_name(config.block_of(layer))]}, y)
    if layer + 1 in config.compression_after:
        y = _sender(config).apply({"params": params[sender_name(layer + 1)]}, y)
    return y


def apply_head(config: GPTConfig, params: Params, x: Boundary) -> Logits:
    """Logits [B,T,V] in fp32."""
    logits: Any = Head(config).apply({"params": params["head"]}, x, params.get("tok"))
    return logits


def _sender(config: GPTConfig) -> Sender:
    return Sender(config.compression_kind, config.compression_ratio)


def _receiver(config: GPTConfig) -> Receiver:
    return Receiver(config.d_model)


def init_entry(config: GPTConfig, name: str, key: jax.Array) -> Any:
    """Fresh fp32 parameters of an entry; `key` is the seed's."""
    kind, _, number = name.partition("_")
    if not number:
        if kind == "head":
            return _init_head(config, jax.random.fold_in(key, _HEAD_ID))
        return _init_table(config, name, jax.random.fold_in(key, _EMBEDDING_ID))
    first_id, init = {
        "block": (_FIRST_BLOCK_ID, _init_block),
        "sender": (_FIRST_SENDER_ID, _init_sender),
        "receiver": (_FIRST_RECEIVER_ID, _init_receiver),
    }[kind]
    return init(config, jax.random.fold_in(key, first_id + int(number)))


@partial(jax.jit, static_argnums=(0, 1))
def _init_table(config: GPTConfig, name: str, key: jax.Array) -> Array:
    tokens_BT = jnp.zeros((1, config.max_len), jnp.int32)
    return _init(Embedding(config, jnp.dtype(jnp.float32)), key, tokens_BT)[name]


@partial(jax.jit, static_argnums=0)
def _init_block(config: GPTConfig, key: jax.Array) -> Params:
    return _init(Block(config), key, jnp.zeros((1, 1, config.d_model)))


@partial(jax.jit, static_argnums=0)
def _init_sender(config: GPTConfig, key: jax.Array) -> Params:
    return _init(_sender(config), key, jnp.zeros((1, 1, config.d_model)))


@partial(jax.jit, static_argnums=0)
def _init_receiver(config: GPTConfig, key: jax.Array) -> Params:
    narrow = config.d_model // config.compression_ratio
    return _init(_receiver(config), key, jnp.zeros((1, 1, narrow)))


@partial(jax.jit, static_argnums=0)
def _init_head(config: GPTConfig, key: jax.Array) -> Params:
    tok_VD = jnp.zeros((config.vocab_size, config.d_model))
    return _init(Head(config), key, jnp.zeros((1, 1, config.d_model)), tok_VD)


def _init(module: nn.Module, key: jax.Array, *inputs: jax.Array) -> Params:
    variables: Any = module.init(key, *inputs)
    return variables["params"]


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
