"""Measures the seconds of the parts of a step on this machine."""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from experiments.ablation.grid import LAYERS, Case, codec_of
from experiments.ablation.train import chain_of

from jaxdt.codec.base import decode, encode
from jaxdt.model.base import model_of
from jaxdt.model.batches import Batch
from jaxdt.model.chain import Chain
from jaxdt.model.stage import StageFunctions
from jaxdt.run.config import RunConfig
from jaxdt.run.work import WorkKind

N_WARM_UP, N_TIMED = 3, 15


def measure(config: RunConfig, case: Case) -> dict:
    """`seconds`: those of each stage by kind of Work, without the codec. `encode_s`, `decode_s`: those of one boundary
    tensor, by the codec or by the halves of the compression layers, which `seconds` contain already."""
    chain = chain_of(config, case)
    encode_s, decode_s = _boundary_seconds(chain, case)
    seconds = [_stage_seconds(chain, s) for s in range(case.stages)]
    return {"seconds": seconds, "encode_s": encode_s, "decode_s": decode_s}


def _stage_seconds(chain: Chain, s: int) -> dict[str, float]:
    """Seconds of stage s by kind of Work. The last stage's forward is part of its backward."""
    stage = chain.stages[s]
    params = chain.params[s]
    x = None if stage.first else _noise(stage.in_shape, stage.boundary_dtype)
    batch = _batch(stage)
    seconds_of_backward = _loss_backward_seconds if stage.last else _backward_seconds
    vectors = stage.gradient_vectors(stage.zeros())
    return {
        WorkKind.FORWARD: _forward_seconds(stage, params, x, batch),
        WorkKind.BACKWARD: seconds_of_backward(stage, params, x, batch),
        WorkKind.EVALUATE: _seconds(lambda: stage.evaluate(params, x, batch)),
        WorkKind.GATHER: _seconds(lambda: stage.gradient_vectors(params)),
        WorkKind.UPDATE: _update_seconds(stage, params, vectors),
    }


def _forward_seconds(stage: StageFunctions, params, x, batch: Batch) -> float:
    forward = stage.forward
    return 0.0 if forward is None else _seconds(lambda: forward(params, x, batch))


def _loss_backward_seconds(stage: StageFunctions, params, x, batch: Batch) -> float:
    loss_backward = stage.loss_backward
    assert loss_backward is not None  # this is the last stage
    acc = [stage.zeros()]

    def run():
        loss, gx, acc[0] = loss_backward(params, x, batch, acc[0])
        return loss, gx, acc[0]

    return _seconds(run)


def _backward_seconds(stage: StageFunctions, params, x, batch: Batch) -> float:
    forward = stage.forward
    backward = stage.backward
    assert forward is not None and backward is not None  # this is not the last stage
    _, residual = forward(params, x, batch)
    gy = _noise(stage.out_shape, stage.boundary_dtype)
    acc = [stage.zeros()]

    def run():
        gx, acc[0] = backward(params, residual, gy, acc[0])
        return gx, acc[0]

    return _seconds(run)


def _update_seconds(stage: StageFunctions, params, vectors) -> float:
    state = [stage.init_optimizer(params)]

    def run():
        updated, state[0] = stage.update(params, state[0], vectors, np.float32(1.0))
        return updated, state[0]

    return _seconds(run)


def _boundary_seconds(chain: Chain, case: Case) -> tuple[float, float]:
    """(encode, decode) seconds of one tensor over the first boundary."""
    stage = chain.stages[0]
    if case.method in LAYERS:
        return _layer_seconds(chain, case)
    spec = codec_of(case)
    x = _noise(stage.out_shape, stage.boundary_dtype)
    if spec.is_identity:
        return 0.0, 0.0
    encoded = encode(spec, x)
    return _seconds(lambda: encode(spec, x)), _seconds(lambda: decode(spec, encoded, x.shape, x.dtype))


def _layer_seconds(chain: Chain, case: Case) -> tuple[float, float]:
    stage = chain.stages[0]
    pair = model_of(stage.config).pair
    assert pair, "a family without compression layers has no such case"
    (send, sender_name), (receive, receiver_name) = pair(stage.config, stage.hi)
    send, receive = jax.jit(send), jax.jit(receive)
    sender, receiver = chain.params[0][sender_name], chain.params[1][receiver_name]
    x = _noise((*stage.out_shape[:2], stage.config.facts.in_width), stage.boundary_dtype)
    h = send(sender, x)
    return _seconds(lambda: send(sender, x)), _seconds(lambda: receive(receiver, h))


def _seconds(run: Callable) -> float:
    """Median seconds of a call. On a CPU these are CPU seconds, so that other programs count less."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    times = []
    for _ in range(N_WARM_UP + N_TIMED):
        start_s = clock()
        jax.block_until_ready(run())
        times.append(clock() - start_s)
    return statistics.median(times[N_WARM_UP:])


def _noise(shape: tuple[int, ...], dtype) -> jax.Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


def _batch(stage: StageFunctions) -> Batch:
    n_samples, seq_len, _ = stage.in_shape
    vocab_size = stage.config.facts.vocab_size
    return Batch(np.random.default_rng(0).integers(0, vocab_size, (n_samples, seq_len + 1), dtype=np.int32))
