"""The vectors that replicas exchange, as a codec sends them: whole ones are encoded, and travel in slices.

Slices begin with a block of the codec, so that a slice of the wire is the wire of the slice. n numbers of a vector."""

# Parts of jax have no complete annotations.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Shaped

from jaxdt.codec.base import decode, encode, encode_with_feedback, wire_leaf
from jaxdt.run.codec import ABSMAX_BYTES, FLOAT32_BYTES, CodecSpec, loses

Vector = Float32[np.ndarray, " n"]
Wire = Shaped[np.ndarray, "..."]


class Encoded(NamedTuple):
    """A vector of n numbers, as its codec sends it."""

    spec: CodecSpec
    n: int
    wire: Wire

    def part(self, lo: int, hi: int) -> Wire:
        """The wire of the numbers lo..hi-1. With blocks, `lo` is the start of one, and `hi` too or n."""
        block = self.spec.block
        if not block:
            return self.wire[lo:hi]
        absmax = self.wire[self.n :].reshape(-1, ABSMAX_BYTES)[lo // block : -(-hi // block)]
        return np.concatenate([self.wire[lo:hi], absmax.reshape(-1)])


def encoded(spec: CodecSpec, vector: Float[Array, " n"] | Vector) -> Encoded:
    """A vector, rounded once."""
    wire = np.asarray(vector) if spec.is_identity else np.asarray(encode(spec, vector))
    return Encoded(spec, vector.size, wire)


def encoded_with_feedback(
    spec: CodecSpec, vector: Float[Array, " n"] | Vector, owed: Vector | None = None
) -> tuple[Encoded, Vector]:
    """(the vector with what is owed, rounded once; what the codec has lost of that, an array of its own)."""
    error = jnp.zeros(vector.size, jnp.float32) if owed is None else owed
    wire, lost = encode_with_feedback(spec, vector, error)
    return Encoded(spec, vector.size, np.asarray(wire)), np.array(lost)


def decoded(spec: CodecSpec, wire: Wire, n: int) -> Vector:
    """The n numbers of a wire in fp32, equal at all who hold the wire."""
    return wire if spec.is_identity else np.asarray(decode(spec, wire, (n,), np.dtype(np.float32)))


class VectorCodec:
    """What arrives of vectors that one codec sends, for whoever does a run again."""

    def __init__(self, spec: CodecSpec):
        self._spec = spec

    def arrived(self, vector: Vector) -> Vector:
        sent = encoded(self._spec, vector)
        return decoded(self._spec, sent.wire, sent.n)

    def with_feedback(self, vector: Vector, owed: Vector | None) -> tuple[Vector, Vector | None]:
        """(what arrives of a vector and what is owed; what is owed then)."""
        if not loses(self._spec, FLOAT32_BYTES):
            return vector, None
        sent, lost = encoded_with_feedback(self._spec, vector, owed)
        return decoded(self._spec, sent.wire, sent.n), lost


def vector_leaf(spec: CodecSpec, n: int) -> tuple[np.dtype, tuple[int, ...]]:
    """(dtype, shape) of the wire of n numbers."""
    return wire_leaf(spec, (n,), np.dtype(np.float32))
