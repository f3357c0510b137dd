"""The codec bf16: numbers rounded to bfloat16."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float

from jaxdt.codec.base import Codec, Shape
from jaxdt.run.codec import CodecSpec


def build(spec: CodecSpec) -> Codec:
    """The codec; it has no blocks."""
    del spec
    return Codec(encode, decode)


def encode(x: Float[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """x rounded to bfloat16, to nearest even."""
    return x.astype(jnp.bfloat16)


def decode(wire: BFloat16[Array, "..."], shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
    """The numbers of the wire in the given dtype."""
    return wire.reshape(shape).astype(dtype)
