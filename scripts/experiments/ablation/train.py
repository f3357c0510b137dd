"""One training run of the ablation in one process: the arithmetic of a run of peers, without machines and sockets."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
from experiments.ablation.grid import Case, bytes_per_step, codec_of, cut, model_of, run_of
from experiments.one_process import Batches, stages_of

from jaxdt.codec.base import decode, encode
from jaxdt.model.chain import Chain
from jaxdt.model.data import TokenFile
from jaxdt.model.stage import StageFunctions
from jaxdt.run.codec import CodecSpec
from jaxdt.run.config import RunConfig


@functools.cache  # compiling takes as long as a good part of a short run, and all seeds share the functions
def compiled_stages(config: RunConfig, case: Case) -> list[StageFunctions]:
    model = model_of(config, case)
    return stages_of(config, model, cut(model, case.stages))


def chain_of(config: RunConfig, case: Case) -> Chain:
    """The case's stages with new parameters, and its codec at every boundary."""
    stages = compiled_stages(config, replace(case, seed=0))
    return Chain(stages, case.seed, config.optim.clip_norm, functools.partial(transmitted, codec_of(case)))


def transmitted(spec: CodecSpec, x: jax.Array) -> jax.Array:
    """The tensor that arrives when `x` crosses a boundary."""
    if spec.is_identity:
        return x
    return decode(spec, encode(spec, x), x.shape, x.dtype)


def train(config: RunConfig, case: Case, data: TokenFile, on_step: Callable[[int], None]) -> dict:
    """The record of a run: its case, held-out losses as [updates done, nats per token], bytes a step. `on_step` is
    called with the number of each step that is done."""
    chain, batches = chain_of(config, case), Batches(run_of(config, case)[0], data)
    steps, held_out = config.train.steps, batches.held_out()
    curve = []
    for step in range(steps):
        if config.train.eval_every_steps and step % config.train.eval_every_steps == 0:
            curve.append([step, chain.evaluate(held_out)])
        chain.step(batches.of_step(step))
        on_step(step)
    curve.append([steps, chain.evaluate(held_out)])
    return {"case": vars(case), "eval": curve, "bytes_per_step": bytes_per_step(config, case)}
