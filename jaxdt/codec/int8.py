"""The codec int8: one byte per number by the linear map, in blocks with one absmax each (jaxdt.codec.blocks).

n numbers, N blocks of K numbers."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxdt.codec.base import Codec, Shape
from jaxdt.codec.blocks import absmax, join_blocks, pack, split_blocks, unpack
from jaxdt.run.codec import CodecSpec

# Adding 1.5 * 2^23 rounds an fp32 number below 2^22 to an integer, nearest even, and leaves it in the low bits. That is
# one instruction; rounding and converting would be two passes over more data.
ROUNDER = np.float32(12582912.0)
# With a smaller absmax its 127th part, or the reciprocal of that, is no normal fp32 number; such a block becomes zeros.
SMALLEST_ABSMAX = np.float32(1e-35)


def build(spec: CodecSpec) -> Codec:
    """The codec with the blocks of `spec`."""
    return Codec(partial(encode, spec.block), partial(decode, spec.block))


def encode(block: int, x: Float[Array, "..."]) -> UInt8[Array, " wire_bytes"]:
    """codes = round(127 x / absmax), as int8."""
    x_NK = split_blocks(x, block)
    absmax_N = absmax(x_NK)
    scale_N = 127.0 / jnp.where(absmax_N >= SMALLEST_ABSMAX, absmax_N, jnp.inf)
    sums_NK = x_NK * scale_N[:, None] + ROUNDER
    return pack(lax.bitcast_convert_type(sums_NK, jnp.int32).astype(jnp.int8), absmax_N, x.size)


def decode(block: int, wire: UInt8[Array, " wire_bytes"], shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
    """x = code * absmax / 127."""
    codes_NK, absmax_N = unpack(wire, shape, block)
    scale_N = absmax_N * np.float32(1 / 127)
    numbers_NK = lax.bitcast_convert_type(codes_NK, jnp.int8).astype(jnp.float32) * scale_N[:, None]
    return join_blocks(numbers_NK, shape, dtype)
