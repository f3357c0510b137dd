"""Codecs: what crosses a stage boundary. A codec is a pair of pure functions between a tensor and one array of bytes
on the wire, whose size is that of jaxdt.spec.codec; gradients go straight through (nothing here is differentiated).

The functions below are jitted, once per codec, shape and dtype. Sizes and names: jaxdt.spec.codec."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdt.codec import cast, int8
from jaxdt.spec.codec import BF16, DYNAMIC, INT8, NONE, CodecSpec, wire_bytes


class Codec(NamedTuple):
    """`block` is that of the CodecSpec; a codec without blocks ignores it."""

    encode: Callable  # (x, block) -> wire
    decode: Callable  # (wire, shape, dtype, block) -> x


CODECS = {
    NONE: Codec(cast.keep, cast.restore),
    BF16: Codec(cast.encode, cast.restore),
    INT8: Codec(int8.encode_linear, int8.decode_linear),
    DYNAMIC: Codec(int8.encode_dynamic, int8.decode_dynamic),
}


@partial(jax.jit, static_argnums=0)
def encode(spec: CodecSpec, x) -> jax.Array:
    """The wire array of a floating tensor of any shape: raw bytes [wire_bytes] uint8, or for the codecs without blocks
    the numbers themselves."""
    return CODECS[spec.name].encode(x, spec.block)


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode(spec: CodecSpec, wire, shape: tuple[int, ...], dtype) -> jax.Array:
    """The tensor of a wire array."""
    return CODECS[spec.name].decode(wire, shape, dtype, spec.block)


@partial(jax.jit, static_argnums=0)
def encode_with_feedback(spec: CodecSpec, x, error) -> tuple[jax.Array, jax.Array]:
    """(wire, next error): what the codec lost of the tensors before, in fp32, is added before encoding (error feedback,
    Seide et al. 2014). An error that is not finite is forgotten."""
    wanted = x.astype(jnp.float32) + error
    wire = CODECS[spec.name].encode(wanted, spec.block)
    lost = wanted - CODECS[spec.name].decode(wire, x.shape, jnp.float32, spec.block)
    return wire, jnp.where(jnp.isfinite(lost), lost, 0.0)


@lru_cache(maxsize=256)
def wire_leaf(spec: CodecSpec, shape: tuple[int, ...], dtype) -> tuple[jnp.dtype, tuple[int, ...]]:
    """(dtype, shape) of the wire array of such a tensor. Remembered: every message is checked against it, and tracing
    holds the interpreter for about a millisecond."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    wire = jax.eval_shape(partial(encode, spec), x)
    assert wire.size * wire.dtype.itemsize == wire_bytes(spec, x.size, x.dtype.itemsize)
    return wire.dtype, wire.shape
