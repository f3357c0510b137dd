"""The codec none: the tensor travels as it is."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxdt.codec.base import Codec, Shape
from jaxdt.run.codec import CodecSpec


def build(spec: CodecSpec) -> Codec:
    """The codec; it has no blocks."""
    del spec
    return Codec(encode, decode)


def encode(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x as it is."""
    return x


def decode(wire: Float[Array, "..."], shape: Shape, dtype: DTypeLike) -> Float[Array, "..."]:
    """The numbers of the wire in the given dtype."""
    return wire.reshape(shape).astype(dtype)
