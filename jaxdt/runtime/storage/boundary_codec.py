"""Encodes the boundary tensors that a peer sends and decodes those that it receives, with the codec that the plan names
for each boundary, and keeps the errors for error feedback.

Encoding is dispatched right after the stage function that computes the tensor, on the same device. The thread that
sends waits for the result and copies it to the host, while the next Work is computed. On a CPU a program runs in the
thread that calls it, so there the compute thread encodes, which takes about 1 ms for 2 MB of fp32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.codec import base as codec
from jaxdt.model.stage import StageFunctions
from jaxdt.protocol import events as ev
from jaxdt.run import codec as codecs
from jaxdt.run.codec import CodecSpec
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan

ACTIVATION = "act"
GRADIENT = "grad"
HELD_OUT = "eval"


class Direction(NamedTuple):
    """Tensors of one kind over one boundary, [B,T,width] with the T of their step. specs: the codec of each
    pipeline."""

    specs: tuple[CodecSpec, ...]
    batch: int
    width: int
    feeds_back: bool


class BoundaryCodec:
    """The compute thread calls `encode` and `decode`; any thread may call `wire_leaf`. The pipeline of a tensor's
    microbatch determines its codec, whichever peers send and receive it."""

    def __init__(self, config: RunConfig, plan: Plan, peer: int, functions: StageFunctions):
        self._plan = plan
        self._dtype = jnp.dtype(functions.boundary_dtype)
        self._lengths = config.seq_lengths
        self._errors: dict[str, jax.Array] = {}
        stage, _ = plan.seat(peer)

        def direction(boundary: int, forward: bool, shape: tuple[int, ...], feeds_back: bool) -> Direction:
            names = [plan.codec_of(boundary, pipeline, forward) for pipeline in range(plan.n_pipelines)]
            specs = tuple(codecs.parse(name, f"plan.codec[{boundary}]") for name in names)
            return Direction(specs, shape[0], shape[-1], feeds_back and config.error_feedback)

        self._out: dict[str, Direction] = {}
        self._in: dict[str, Direction] = {}
        if not functions.first:
            self._in[ACTIVATION] = self._in[HELD_OUT] = direction(stage - 1, True, functions.in_shape, False)
            self._out[GRADIENT] = direction(stage - 1, False, functions.in_shape, True)
        if not functions.last:
            self._in[GRADIENT] = direction(stage, False, functions.out_shape, False)
            self._out[HELD_OUT] = direction(stage, True, functions.out_shape, False)
            self._out[ACTIVATION] = direction(stage, True, functions.out_shape, True)

    def encode(self, key: ev.Key, tensor) -> jax.Array:
        """The array to send for a tensor. Its computation is dispatched, not awaited. With error feedback, the error of
        a tensor of another length is dropped."""
        spec = self._spec(self._out, key)
        if not self._out[key.kind].feeds_back or not codecs.loses(spec, self._dtype.itemsize):
            return tensor if spec.is_identity else codec.encode(spec, tensor)
        error = self._errors.get(key.kind)
        if error is None or error.shape != tensor.shape:
            error = jnp.zeros(tensor.shape, jnp.float32)
        wire, self._errors[key.kind] = codec.encode_with_feedback(spec, tensor, error)
        return wire

    def decode(self, key: ev.Key, wire):
        """The tensor that was received as `wire`."""
        spec = self._spec(self._in, key)
        return wire if spec.is_identity else codec.decode(spec, wire, self._shape(self._in, key), self._dtype)

    def wire_leaf(self, key: ev.Key, of_worker: bool = False) -> tuple[np.dtype, tuple[int, ...]]:
        """(dtype, shape) of the array as which a tensor is received; BadInput for a tensor that no peer sends to this
        one. `of_worker`: of an output of this stage, which a pool's worker has computed for this peer."""
        directions = self._out if of_worker else self._in
        if key.kind not in directions:
            raise BadInput(f"boundary tensor: got kind {key.kind!r}, expected one of {', '.join(directions) or 'none'}")
        if key.kind != HELD_OUT and not 0 <= key.microbatch < self._plan.n_microbatches:
            raise BadInput(f"boundary tensor {key}: expected one of {self._plan.n_microbatches} microbatches")
        return codec.wire_leaf(self._spec(directions, key), self._shape(directions, key), self._dtype)

    def _spec(self, directions: dict[str, Direction], key: ev.Key) -> CodecSpec:
        return directions[key.kind].specs[self._plan.pipeline_of(key.microbatch, key.kind == HELD_OUT)]

    def _shape(self, directions: dict[str, Direction], key: ev.Key) -> tuple[int, int, int]:
        """The shape of a boundary tensor. Held-out samples have the full length."""
        direction = directions[key.kind]
        length = self._lengths.full if key.kind == HELD_OUT else self._lengths.at(key.step)
        return direction.batch, length, direction.width

    def reset_error_feedback(self) -> None:
        """Drop all errors: the tensors that follow belong to another series."""
        self._errors.clear()
