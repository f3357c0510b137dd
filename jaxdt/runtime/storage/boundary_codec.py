"""A peer's boundary tensors on their way out and in: the codec that the plan names for each link, and what error
feedback remembers. Encoding is dispatched right behind the stage function that made the tensor, on its device; waiting
for it and the copy to the host are the sender thread's, beside the next Work. (On a CPU, where programs run in the
thread that calls them, the compute thread encodes: that takes about 1 ms for 2 MB of fp32.)"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.codec import base as codec
from jaxdt.model.stage import StageFunctions
from jaxdt.protocol.events import Key
from jaxdt.spec import codec as codecs
from jaxdt.spec.codec import CodecSpec
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.plan import Plan

ACTIVATION, GRADIENT, HELD_OUT = "act", "grad", "eval"


class Direction(NamedTuple):
    """Tensors of one kind over one boundary, [B,T,width] with the T of their step, and the codec of each pipeline."""

    specs: tuple[CodecSpec, ...]
    batch: int
    width: int
    feeds_back: bool


class BoundaryCodec:
    """`outgoing` and `incoming` are called by the compute thread; `leaf` by anyone. A tensor's codec is the one of its
    microbatch's pipeline, whoever sends it and to whom."""

    def __init__(self, config: RunConfig, plan: Plan, peer: int, functions: StageFunctions):
        self._plan, self._dtype, self._lengths = plan, jnp.dtype(functions.boundary_dtype), config.seq_lengths
        self._errors: dict[str, jax.Array] = {}
        stage, _ = plan.seat(peer)

        def direction(boundary: int, forward: bool, shape: tuple[int, ...], feeds_back: bool = False) -> Direction:
            names = [plan.codec_of(boundary, pipeline, forward) for pipeline in range(plan.n_pipelines)]
            specs = tuple(codecs.parse(name, f"plan.codec[{boundary}]") for name in names)
            return Direction(specs, shape[0], shape[-1], feeds_back and config.error_feedback)

        self._out: dict[str, Direction] = {}
        self._in: dict[str, Direction] = {}
        if not functions.first:
            self._in[ACTIVATION] = self._in[HELD_OUT] = direction(stage - 1, True, functions.in_shape)
            self._out[GRADIENT] = direction(stage - 1, False, functions.in_shape, feeds_back=True)
        if not functions.last:
            self._in[GRADIENT] = direction(stage, False, functions.out_shape)
            self._out[HELD_OUT] = direction(stage, True, functions.out_shape)
            self._out[ACTIVATION] = direction(stage, True, functions.out_shape, feeds_back=True)

    def outgoing(self, key: Key, tensor) -> jax.Array:
        """What to send for a tensor; computed as soon as the tensor is. What was lost of a tensor of another length is
        forgotten."""
        spec = self._spec(self._out, key)
        if not self._out[key.kind].feeds_back or not codecs.loses(spec, self._dtype.itemsize):
            return tensor if spec.is_identity else codec.encode(spec, tensor)
        error = self._errors.get(key.kind)
        if error is None or error.shape != tensor.shape:
            error = jnp.zeros(tensor.shape, jnp.float32)
        wire, self._errors[key.kind] = codec.encode_with_feedback(spec, tensor, error)
        return wire

    def incoming(self, key: Key, wire):
        """The tensor that came as `wire`."""
        spec = self._spec(self._in, key)
        return wire if spec.is_identity else codec.decode(spec, wire, self._shape(key), self._dtype)

    def leaf(self, key: Key) -> tuple[np.dtype, tuple[int, ...]]:
        """(dtype, shape) of the array that a tensor comes as; BadInput for one that nobody sends here."""
        if key.kind not in self._in:
            raise BadInput(f"boundary tensor: got kind {key.kind!r}, expected one of {', '.join(self._in) or 'none'}")
        if key.kind != HELD_OUT and not 0 <= key.microbatch < self._plan.n_microbatches:
            raise BadInput(f"boundary tensor {key}: expected one of {self._plan.n_microbatches} microbatches")
        return codec.wire_leaf(self._spec(self._in, key), self._shape(key), self._dtype)

    def _spec(self, directions: dict[str, Direction], key: Key) -> CodecSpec:
        return directions[key.kind].specs[self._plan.pipeline_of(key.microbatch, key.kind == HELD_OUT)]

    def _shape(self, key: Key) -> tuple[int, int, int]:
        """Of a tensor that comes; held-out samples have the full length."""
        _, batch, width, _ = self._in[key.kind]
        return batch, self._lengths.full if key.kind == HELD_OUT else self._lengths.at(key.step), width

    def forget(self) -> None:
        """Error feedback begins anew."""
        self._errors.clear()
