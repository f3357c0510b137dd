"""The layers that a GPT's blocks and its compression pairs are made of: Dense, LayerNorm, and the two halves of a pair.

A pair stands behind a block's output, after its residual sum, and no residual goes around it (SWARM App. J). With r the
compression ratio, LN_x a LayerNorm over x features:

  bottleneck  h = LN_{D/r}(W_c LN_D(x) + b_c)      sender   | boundary |   y = W_d h + b_d   receiver
  maxout      h = LN_{D/r}(max of each r adjacent features of LN_D(x))     y = W_d h + b_d

B samples, T tokens, D width, N = D/r the narrow width."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxdt.model import kernels

INIT_STD = 0.02


class Dense(nn.Module):
    """A linear layer with bias, [B,T,D] -> [B,T,n_out] in the dtype of its input."""

    n_out: int
    kernel_init: Callable = nn.initializers.normal(INIT_STD)
    bias_init: Callable = nn.initializers.zeros

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T n_out"]:
        kernel = self.param("kernel", self.kernel_init, (x_BTD.shape[-1], self.n_out), jnp.float32)
        bias = self.param("bias", self.bias_init, (self.n_out,), jnp.float32)
        return kernels.product(x_BTD, kernel) + bias.astype(x_BTD.dtype)[None, None]


class LayerNorm(nn.Module):
    """Normalisation of each token over its features, with a learned scale and bias."""

    @nn.compact
    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        d = x_BTD.shape[-1]
        scale = self.param("scale", nn.initializers.ones, (d,), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (d,), jnp.float32)
        return kernels.layer_norm(x_BTD, scale, bias)


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
