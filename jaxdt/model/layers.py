"""What families of transformers are made of: Dense, the norms, embedding and head, attention, and the two halves of a
compression pair.

A pair stands behind a block's output, after its residual sum, and no residual goes around it (SWARM App. J). With r the
compression ratio, LN_x a LayerNorm over x features:

  bottleneck  h = LN_{D/r}(W_c LN_D(x) + b_c)      sender   | boundary |   y = W_d h + b_d   receiver
  maxout      h = LN_{D/r}(max of each r adjacent features of LN_D(x))     y = W_d h + b_d

B samples, T tokens, D width, N = D/r the narrow width, H heads, G heads of keys and values, K head width, V
vocabulary."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Shaped

from jaxdt.model import kernels
from jaxdt.run.model_facts import MATRIX, TABLE, VECTOR

INIT_STD = 0.02
# Each entry of the parameters draws its random numbers from a key of its own: the seed's, folded with one of these
# numbers. Entries with a number in their name count on from theirs.
ENTRY_IDS = {"tok": 0, "pos": 0, "head": 1, "block": 2, "sender": 1 << 20, "receiver": 1 << 21}
TABLES = ("tok", "pos")


def block_name(block: int) -> str:
    """The entry of a block, by the first layer that applies it."""
    return f"block_{block:03d}"


def kind_of(entry: str) -> str:
    """The name of an entry without its number."""
    return entry.partition("_")[0]


def init(entry: str, key: jax.Array, module: nn.Module, *inputs: Any) -> Any:
    """Fresh fp32 parameters of an entry; `key` is the seed's. An embedding has several tables."""
    variables: Any = module.init(key, *inputs)
    return variables["params"][entry] if entry in TABLES else variables["params"]


def entry_key(entry: str, key: jax.Array) -> jax.Array:
    """The key of an entry; `key` is the seed's."""
    kind, _, number = entry.partition("_")
    return jax.random.fold_in(key, ENTRY_IDS[kind] + int(number or 0))


def role(entry: str, path: str, shape: tuple[int, ...]) -> str:
    """Biases and the scales of norms are vectors."""
    del path
    if len(shape) < 2:
        return VECTOR
    return TABLE if entry in TABLES else MATRIX


class Dense(nn.Module):
    """A linear layer, [B,T,D] -> [B,T,n_out] in the dtype of its input."""

    n_out: int
    kernel_init: Callable = nn.initializers.normal(INIT_STD)
    bias_init: Callable = nn.initializers.zeros
    use_bias: bool = True

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T n_out"]:
        kernel = self.param("kernel", self.kernel_init, (x_BTD.shape[-1], self.n_out), jnp.float32)
        y = kernels.product(x_BTD, kernel)
        if not self.use_bias:
            return y
        bias = self.param("bias", self.bias_init, (self.n_out,), jnp.float32)
        return y + bias.astype(x_BTD.dtype)[None, None]


class LayerNorm(nn.Module):
    """Normalisation of each token over its features, with a learned scale and bias."""

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        d = x_BTD.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (d,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (d,), jnp.float32)
        return kernels.layer_norm(x_BTD, scale, bias)


class RMSNorm(nn.Module):
    """Normalisation over the last axis, with a learned scale (Zhang and Sennrich 2019)."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return kernels.rms_norm(x, scale, self.eps)


class Embedding(nn.Module):
    """tokens [B,T] int32 -> [B,T,D] in `dtype`; with learned positions for any T up to `n_positions`. They count from
    where a document begins."""

    vocab_size: int
    d_model: int
    n_positions: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens_BT: Int[Array, "B T"], begins_BT: Any = None) -> Float[Array, "B T D"]:
        normal = nn.initializers.normal(INIT_STD)
        tok_VD = self.param("tok", normal, (self.vocab_size, self.d_model), jnp.float32)
        x_BTD = kernels.numbers(tok_VD[tokens_BT])
        if self.n_positions:
            pos = kernels.numbers(self.param("pos", normal, (self.n_positions, self.d_model), jnp.float32))
            seq_len = tokens_BT.shape[1]
            if begins_BT is None:
                x_BTD = x_BTD + pos[None, :seq_len]
            else:
                x_BTD = x_BTD + pos[jnp.arange(seq_len)[None] - begins_BT]
        return x_BTD.astype(self.dtype)


class Head(nn.Module):
    """[B,T,D] -> logits [B,T,V] in fp32, of the normalised input; tok_VD is the token table of a tied head, None of an
    untied one. `norm` makes the norm with a name."""

    vocab_size: int
    norm: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"], tok_VD: Shaped[Array, "V D"] | None) -> Float32[Array, "B T V"]:
        x_BTD = self.norm(name="ln")(x_BTD)
        if tok_VD is not None:
            return kernels.product(x_BTD, tok_VD, is_table=True).astype(jnp.float32)
        out_DV = self.param("out", nn.initializers.normal(INIT_STD), (x_BTD.shape[-1], self.vocab_size), jnp.float32)
        return kernels.product(x_BTD, out_DV).astype(jnp.float32)


def split_heads(x_BTD: Float[Array, "B T D"], n_heads: int) -> Float[Array, "B H T K"]:
    """Heads go before tokens first: the products of attention then are plain batched matrix products, a third faster on
    CPU than with heads in the middle."""
    b, t, d = x_BTD.shape
    return jnp.transpose(x_BTD.reshape(b, t, n_heads, d // n_heads), (0, 2, 1, 3))


def attend(
    q_BHTK: Float[Array, "B H T K"],
    k_BGTK: Float[Array, "B G T K"],
    v_BGTK: Float[Array, "B G T K"],
    begins_BT: Int[Array, "B T"] | None,
    window: int = 0,
) -> Float[Array, "B T HK"]:
    """Causal attention, from where a token's document begins. Each head of keys and values serves H / G consecutive
    heads of queries, whose rows stand below one another in the products. With a window, a token sees so many, itself
    included."""
    b, h, t, k = q_BHTK.shape
    g = k_BGTK.shape[1]
    q_BGRK = (q_BHTK * k**-0.5).reshape(b, g, h // g * t, k)
    scores_BHTT = jnp.einsum("bgrk,bgtk->bgrt", q_BGRK, k_BGTK).reshape(b, h, t, t)
    weights_BHTT: Any = kernels.causal_softmax(scores_BHTT, window, begins_BT)
    mixed_BGRK = jnp.einsum("bgrt,bgtk->bgrk", weights_BHTT.reshape(b, g, h // g * t, t), v_BGTK)
    mixed_BHTK = mixed_BGRK.reshape(b, h, t, k)
    return jnp.transpose(mixed_BHTK, (0, 2, 1, 3)).reshape(b, t, h * k)


def frequencies(width: int, base: float) -> np.ndarray:
    """[K/2] radians by which rotary positions turn each pair of a head's numbers from one token to the next."""
    return base ** (-np.arange(0, width, 2) / width)


def rotate(x_BHTK: Float[Array, "B H T K"], frequencies_P: np.ndarray) -> Float[Array, "B H T K"]:
    """Rotary positions (Su et al. 2021, RoFormer, Eq. 34): the pairs (i, i + K/2) turn by t times their frequency."""
    angle = np.arange(x_BHTK.shape[-2])[:, None] * frequencies_P
    cos, sin = (jnp.asarray(f(angle), x_BHTK.dtype)[None, None] for f in (np.cos, np.sin))
    left, right = jnp.split(x_BHTK, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Sender(nn.Module):
    """The narrowing half of a "bottleneck" or "maxout" pair, [B,T,D] -> [B,T,N] in the dtype of its input."""

    kind: str
    ratio: int

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T N"]:
        x_BTD = LayerNorm(name="ln_wide")(x_BTD)
        x_BTN: Any
        if self.kind == "maxout":
            x_BTN = kernels.maxout(x_BTD, self.ratio)
        else:
            d = x_BTD.shape[-1]
            x_BTN = _fan_in_dense(d, d // self.ratio, "compress")(x_BTD)
        return LayerNorm(name="ln_narrow")(x_BTN)


class Receiver(nn.Module):
    """The widening half of either pair, [B,T,N] -> [B,T,D] in the dtype of its input."""

    d_model: int

    @nn.compact
    def __call__(self, x_BTN: Float[Array, "B T N"]) -> Float[Array, "B T D"]:
        return _fan_in_dense(x_BTN.shape[-1], self.d_model, "expand")(x_BTN)


def _fan_in_dense(n_in: int, n_out: int, name: str) -> Dense:
    """Weights and biases start uniform within +-1/sqrt(n_in), as in SWARM's published code."""
    bound = n_in**-0.5

    def init(key, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return Dense(n_out, init, init, name=name)
