"""The table of codecs, and the jitted functions that encode and decode with one of them.

A codec is a pair of pure functions between a tensor and one array, the wire, whose size is that of jaxdt.run.codec.
Gradients go straight through: nothing here is differentiated. The functions below are compiled once per codec, shape
and dtype.

A new codec is one file with a function build(spec), an entry in CODECS, and a size in jaxdt.run.codec."""

# Parts of jax have no complete annotations.
# pyright: reportUnknownMemberType=false

from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped

from jaxdt.run.codec import BF16, DYNAMIC, INT8, NONE, CodecSpec, wire_bytes

Shape = tuple[int, ...]
Wire = Shaped[Array, "..."]


class Codec(NamedTuple):
    """The two functions of a codec. `encode(x)` takes a floating tensor of any shape and gives its wire: raw bytes
    uint8 [wire_bytes], or for the codecs without blocks the numbers themselves. `decode(wire, shape, dtype)` gives the
    tensor."""

    encode: Callable[[Float[Array, "..."]], Wire]
    decode: Callable[[Wire, Shape, DTypeLike], Float[Array, "..."]]


# Name -> the module whose build(spec) makes the Codec. A module is imported when its codec is used.
CODECS = {
    NONE: "jaxdt.codec.identity",
    BF16: "jaxdt.codec.bf16",
    INT8: "jaxdt.codec.int8",
    DYNAMIC: "jaxdt.codec.int8_dynamic",
}


def codec_of(spec: CodecSpec) -> Codec:
    """The functions of a codec, built from its name and its block."""
    return import_module(CODECS[spec.name]).build(spec)


@partial(jax.jit, static_argnums=0)
def encode(spec: CodecSpec, x: Float[Array, "..."]) -> Wire:
    """The wire of a tensor."""
    return codec_of(spec).encode(x)


@partial(jax.jit, static_argnums=(0, 2, 3))
def decode(spec: CodecSpec, wire: Wire, shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
    """The tensor of a wire."""
    return codec_of(spec).decode(wire, shape, dtype)


@partial(jax.jit, static_argnums=0)
def encode_with_feedback(
    spec: CodecSpec, x: Float[Array, "*shape"], error: Float32[Array, "*shape"]
) -> tuple[Wire, Float32[Array, "*shape"]]:
    """(wire, next error). The rounding errors of former tensors, in fp32, are added before encoding (error feedback,
    Seide et al. 2014). Errors that are not finite become 0."""
    codec = codec_of(spec)
    corrected = x.astype(jnp.float32) + error
    # Else XLA may compute the codes a second time for the error, fused with it, and round a few numbers otherwise.
    wire = lax.optimization_barrier(codec.encode(corrected))
    lost = corrected - codec.decode(wire, x.shape, jnp.float32)
    return wire, jnp.where(jnp.isfinite(lost), lost, 0.0)


@lru_cache(maxsize=256)
def wire_leaf(spec: CodecSpec, shape: Shape, dtype: DTypeLike) -> tuple[np.dtype, Shape]:
    """(dtype, shape) of the wire of a tensor. Results are kept, since every message is checked against them, and
    tracing holds the interpreter for about a millisecond."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    wire = jax.eval_shape(partial(encode, spec), x)
    assert wire.size * wire.dtype.itemsize == wire_bytes(spec, x.size, x.dtype.itemsize)
    return wire.dtype, wire.shape
