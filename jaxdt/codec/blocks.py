"""Blocks of K numbers in memory order with one fp32 absmax each, which the codecs of one byte per number share (SWARM
App. I).

The wire is one array: n codes, then the absmax of each block, 4 bytes each. A last partial block is filled with zeros
while encoding, and these are not sent. A block that holds NaN or Inf gets the absmax NaN and decodes to NaN throughout.

n numbers, N blocks of K numbers."""

# Parts of jax have no complete annotations.
# pyright: reportUnknownMemberType=false

from math import prod
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int8, Int32, UInt8

from jaxdt.codec.base import Shape

LANES = 32  # numbers in two vector registers of a CPU


def split_blocks(x: Float[Array, "..."], block: int) -> Float32[Array, "N K"]:
    """The numbers of x in blocks; a tensor smaller than a block is one block."""
    block = min(block, x.size)
    flat = x.reshape(-1).astype(jnp.float32)
    return jnp.pad(flat, (0, -x.size % block)).reshape(-1, block)


def join_blocks(x_NK: Float32[Array, "N K"], shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
    """The tensor whose numbers stand in blocks, without the zeros that fill the last one."""
    return x_NK.reshape(-1)[: prod(shape)].reshape(shape).astype(dtype)


def absmax(x_NK: Float32[Array, "N K"]) -> Float32[Array, " N"]:
    """The largest magnitude of each block: NaN if the block holds NaN, else Inf if it holds Inf.

    The bits of the magnitudes are compared, because as integers they have the order of the numbers, with NaN above all,
    while XLA's reduction of floats on a CPU loses NaN. Its reduction of integers on a CPU is serial; halving the rows
    first, lane by lane, makes it use vectors."""
    bits_NK = lax.bitcast_convert_type(jnp.abs(x_NK), jnp.int32)
    bits_N = cast(jax.Array, lax.platform_dependent(bits_NK, cpu=_max_by_halves, default=_max))
    return lax.bitcast_convert_type(bits_N, jnp.float32)


def _max(bits_NK: Int32[Array, "N K"]) -> Int32[Array, " N"]:
    return jnp.max(bits_NK, axis=1)


def _max_by_halves(bits_NK: Int32[Array, "N K"]) -> Int32[Array, " N"]:
    while bits_NK.shape[1] % 2 == 0 and bits_NK.shape[1] > LANES:
        half = bits_NK.shape[1] // 2
        bits_NK = jnp.maximum(bits_NK[:, :half], bits_NK[:, half:])
    return jnp.max(bits_NK, axis=1)


def pack(
    codes_NK: Int8[Array, "N K"] | UInt8[Array, "N K"], absmax_N: Float32[Array, " N"], n: int
) -> UInt8[Array, " wire_bytes"]:
    """The wire of n codes and the absmax of each block: [n + 4N]."""
    absmax_N = jnp.where(jnp.isfinite(absmax_N), absmax_N, jnp.nan)
    return jnp.concatenate([_raw_bytes(codes_NK)[:n], _raw_bytes(absmax_N)])


def _raw_bytes(x: jax.Array) -> UInt8[Array, " n_bytes"]:
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def unpack(
    wire: UInt8[Array, " wire_bytes"], shape: Shape, block: int
) -> tuple[UInt8[Array, "N K"], Float32[Array, " N"]]:
    """(codes, absmax) of a wire; codes that fill the last block are 0."""
    n = prod(shape)
    block = min(block, n)
    codes_NK = jnp.pad(wire[:n], (0, -n % block)).reshape(-1, block)
    return codes_NK, lax.bitcast_convert_type(wire[n:].reshape(-1, 4), jnp.float32)
