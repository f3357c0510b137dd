"""The codec int8-dynamic: one byte per number by the signed dynamic map, in blocks with one absmax each
(jaxdt.codec.blocks).

n numbers, N blocks of K numbers."""

# Parts of jax have no complete annotations.
# pyright: reportUnknownMemberType=false

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxdt.codec.base import Codec, Shape
from jaxdt.codec.blocks import absmax, join_blocks, pack, split_blocks, unpack
from jaxdt.run.codec import CodecSpec


def _values() -> np.ndarray:
    """The map [256] fp32, sorted: 0, 1 and +-10^(i-6) times the midpoints of 2^i equal cells of [0.1, 1], i = 0..6 (the
    signed dynamic map of Dettmers 2015 and Dettmers et al. 2022, 8-bit Optimizers)."""
    cells = [10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(2**i, dtype=np.float64) + 0.5) / 2**i) for i in range(7)]
    positive = np.concatenate(cells)
    ends = np.array([0.0, 1.0])
    return np.sort(np.concatenate([-positive, positive, ends])).astype(np.float32)


DYNAMIC_VALUES = _values()
ZERO_CODE = 127  # the index of 0 in them

# Magnitudes are looked up by the bits of their fp32 number: exponent and 6 bits of the mantissa name a bucket, narrower
# than any step of the map, so that at most one of the points half-way between two values lies inside.
BUCKET_BITS = 17


def _buckets() -> tuple[int, np.ndarray]:
    """(first, words). For a magnitude with the bits b, (words[b >> 17 - first] + low 17 bits of b) >> 17 is its rank
    among the values 0, 5.5e-7, .., 1. A word holds the rank at the bucket's start, and in the bits below it the
    distance that the low bits may go without a carry into the rank: the distance to the half-way point."""
    values = DYNAMIC_VALUES[ZERO_CODE:].astype(np.float64)
    middles = (values[:-1] + values[1:]) / 2
    below = middles.astype(np.float32)  # the largest fp32 numbers that are nearer to the smaller value
    below = np.where(below > middles, np.nextafter(below, np.float32(0)), below)
    bits = below.view(np.int32).astype(np.int64)
    size = 1 << BUCKET_BITS
    first = int(bits[0] >> BUCKET_BITS) - 1
    starts = np.arange(first, (int(np.float32(1).view(np.int32)) >> BUCKET_BITS) + 1) * size
    rank = np.searchsorted(bits, starts, side="left")  # half-way points strictly below a bucket
    point = np.append(bits, np.iinfo(np.int64).max)[rank] - starts
    return first, (rank * size + (size - 1) - np.minimum(point, size - 1)).astype(np.int32)


FIRST_BUCKET, BUCKETS = _buckets()


def build(spec: CodecSpec) -> Codec:
    """The codec with the blocks of `spec`."""
    return Codec(partial(encode, spec.block), partial(decode, spec.block))


def encode(block: int, x: Float[Array, "..."]) -> UInt8[Array, " wire_bytes"]:
    """code = index of the value nearest to x / absmax in DYNAMIC_VALUES, exactly."""
    x_NK = split_blocks(x, block)
    absmax_N = absmax(x_NK)
    ratio_NK = x_NK / jnp.where(absmax_N > 0, absmax_N, 1.0)[:, None]
    bits_NK = lax.bitcast_convert_type(jnp.abs(ratio_NK), jnp.int32)
    bucket_NK = jnp.clip((bits_NK >> BUCKET_BITS) - FIRST_BUCKET, 0, BUCKETS.size - 1)
    low_NK = bits_NK & ((1 << BUCKET_BITS) - 1)
    rank_NK = (jnp.asarray(BUCKETS).at[bucket_NK].get(mode="promise_in_bounds") + low_NK) >> BUCKET_BITS
    # The map has a 1 but no -1.
    index_NK = ZERO_CODE + jnp.where(ratio_NK < 0, -jnp.minimum(rank_NK, ZERO_CODE), rank_NK)
    return pack(index_NK.astype(jnp.uint8), absmax_N, x.size)


def decode(block: int, wire: UInt8[Array, " wire_bytes"], shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
    """x = DYNAMIC_VALUES[code] * absmax."""
    codes_NK, absmax_N = unpack(wire, shape, block)
    values_NK = jnp.asarray(DYNAMIC_VALUES).at[codes_NK].get(mode="promise_in_bounds")
    return join_blocks(values_NK * absmax_N[:, None], shape, dtype)
