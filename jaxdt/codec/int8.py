"""Codecs of one byte a number: blocks of K numbers in memory order share one fp32 absmax (SWARM App. I).

The wire is one array: n codes, then the absmax of each block, 4 bytes each. A last partial block is filled with zeros
while encoding; they are not sent. A block that holds NaN or Inf gets the absmax NaN and decodes to NaN throughout.

n numbers, N blocks of K numbers."""

import jax.numpy as jnp
import numpy as np
from jax import lax

# Adding 1.5 * 2^23 rounds an fp32 number below 2^22 to an integer, nearest even, and leaves it in the low bits: one
# instruction where round and convert would be two passes over more.
ROUNDER = np.float32(12582912.0)
# With a smaller absmax its 127th part, or the reciprocal of that, is no normal fp32 number; such a block becomes zeros.
SMALLEST_ABSMAX = np.float32(1e-35)
LANES = 32  # two vector registers' worth


def encode_linear(x, block: int):
    """codes = round(127 x / absmax), as int8."""
    x_NK = _blocks(x, block)
    absmax_N = _absmax(x_NK)
    scale_N = 127.0 / jnp.where(absmax_N >= SMALLEST_ABSMAX, absmax_N, jnp.inf)
    sums_NK = x_NK * scale_N[:, None] + ROUNDER
    return _pack(lax.bitcast_convert_type(sums_NK, jnp.int32).astype(jnp.int8), absmax_N, x.size)


def decode_linear(wire, shape: tuple[int, ...], dtype, block: int):
    """x = code * absmax / 127."""
    codes_NK, absmax_N = _unpack(wire, shape, block)
    scale_N = absmax_N * np.float32(1 / 127)
    return _tensor(lax.bitcast_convert_type(codes_NK, jnp.int8).astype(jnp.float32) * scale_N[:, None], shape, dtype)


# --------------------------------------------------------------------------------------------------- the dynamic map


def _dynamic_values() -> np.ndarray:
    """[256] fp32, sorted: 0, 1 and +-10^(i-6) times the midpoints of 2^i equal cells of [0.1, 1], i = 0..6 (the signed
    dynamic map of Dettmers 2015 and Dettmers et al. 2022, 8-bit Optimizers)."""
    cells = [10.0 ** (i - 6) * (0.1 + 0.9 * (np.arange(2**i) + 0.5) / 2**i) for i in range(7)]
    positive = np.concatenate(cells)
    return np.sort(np.concatenate([-positive, [0.0], positive, [1.0]])).astype(np.float32)


DYNAMIC_VALUES = _dynamic_values()
ZERO_CODE = 127  # where 0 stands among them

# Magnitudes are looked up by the bits of their fp32 number: exponent and 6 bits of the mantissa name a bucket, narrower
# than any step of the map, so that at most one of the points half-way between two values lies inside.
BUCKET_BITS = 17


def _dynamic_buckets() -> tuple[int, np.ndarray]:
    """(first, words). For a magnitude with the bits b, (words[b >> 17 - first] + low 17 bits of b) >> 17 is its rank
    among the values 0, 5.5e-7, .., 1: a word holds the rank at the bucket's start, and below it how far the low bits
    may go without a carry into the rank, which is up to the half-way point."""
    values = DYNAMIC_VALUES[ZERO_CODE:].astype(np.float64)
    middles = (values[:-1] + values[1:]) / 2
    below = middles.astype(np.float32)  # the largest fp32 numbers not above: those, and only those, are nearer to less
    below = np.where(below > middles, np.nextafter(below, np.float32(0)), below)
    bits = below.view(np.int32).astype(np.int64)
    size = 1 << BUCKET_BITS
    first = int(bits[0] >> BUCKET_BITS) - 1
    starts = np.arange(first, (int(np.float32(1).view(np.int32)) >> BUCKET_BITS) + 1) * size
    rank = np.searchsorted(bits, starts, side="left")  # half-way points strictly below a bucket
    point = np.append(bits, np.iinfo(np.int64).max)[rank] - starts
    return first, (rank * size + (size - 1) - np.minimum(point, size - 1)).astype(np.int32)


FIRST_BUCKET, BUCKETS = _dynamic_buckets()


def encode_dynamic(x, block: int):
    """code = index of the value nearest to x / absmax in DYNAMIC_VALUES, exactly."""
    x_NK = _blocks(x, block)
    absmax_N = _absmax(x_NK)
    ratio_NK = x_NK / jnp.where(absmax_N > 0, absmax_N, 1.0)[:, None]
    bits_NK = lax.bitcast_convert_type(jnp.abs(ratio_NK), jnp.int32)
    bucket_NK = jnp.clip((bits_NK >> BUCKET_BITS) - FIRST_BUCKET, 0, BUCKETS.size - 1)
    low_NK = bits_NK & ((1 << BUCKET_BITS) - 1)
    rank_NK = (jnp.asarray(BUCKETS).at[bucket_NK].get(mode="promise_in_bounds") + low_NK) >> BUCKET_BITS
    # There is a 1 but no -1.
    index_NK = ZERO_CODE + jnp.where(ratio_NK < 0, -jnp.minimum(rank_NK, ZERO_CODE), rank_NK)
    return _pack(index_NK.astype(jnp.uint8), absmax_N, x.size)


def decode_dynamic(wire, shape: tuple[int, ...], dtype, block: int):
    """x = DYNAMIC_VALUES[code] * absmax."""
    codes_NK, absmax_N = _unpack(wire, shape, block)
    values_NK = jnp.asarray(DYNAMIC_VALUES).at[codes_NK].get(mode="promise_in_bounds")
    return _tensor(values_NK * absmax_N[:, None], shape, dtype)


# ------------------------------------------------------------------------------------------------------------ blocks


def _blocks(x, block: int):
    """[N,K] fp32; a tensor smaller than a block is one block."""
    block = min(block, x.size)
    flat = x.reshape(-1).astype(jnp.float32)
    return jnp.pad(flat, (0, -x.size % block)).reshape(-1, block)


def _absmax(x_NK):
    """[N]: NaN if the block holds NaN, else Inf if it holds Inf. By the bits of the magnitudes, which as integers have
    the order of the numbers with NaN above all: XLA's reduction of floats on a CPU loses NaN. Its reduction of integers
    there is serial; halving the rows first, lane by lane, makes it vectors."""

    def by_halves(bits_NK):
        while bits_NK.shape[1] % 2 == 0 and bits_NK.shape[1] > LANES:
            half = bits_NK.shape[1] // 2
            bits_NK = jnp.maximum(bits_NK[:, :half], bits_NK[:, half:])
        return jnp.max(bits_NK, axis=1)

    bits_NK = lax.bitcast_convert_type(jnp.abs(x_NK), jnp.int32)
    bits_N = lax.platform_dependent(bits_NK, cpu=by_halves, default=lambda bits_NK: jnp.max(bits_NK, axis=1))
    return lax.bitcast_convert_type(bits_N, jnp.float32)


def _pack(codes_NK, absmax_N, n: int):
    """[n + 4N] uint8."""
    absmax_N = jnp.where(jnp.isfinite(absmax_N), absmax_N, jnp.nan)
    raw = [lax.bitcast_convert_type(part, jnp.uint8).reshape(-1) for part in (codes_NK, absmax_N)]
    return jnp.concatenate([raw[0][:n], raw[1]])


def _unpack(wire, shape: tuple[int, ...], block: int):
    """(codes [N,K] uint8, absmax [N] fp32)."""
    n = int(np.prod(shape))
    block = min(block, n)
    codes_NK = jnp.pad(wire[:n], (0, -n % block)).reshape(-1, block)
    return codes_NK, lax.bitcast_convert_type(wire[n:].reshape(-1, 4), jnp.float32)


def _tensor(x_NK, shape: tuple[int, ...], dtype):
    return x_NK.reshape(-1)[: int(np.prod(shape))].reshape(shape).astype(dtype)
