"""One training run of the ablation in one process: the arithmetic of a run of peers, without machines and sockets."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
from experiments.ablation.grid import Case, bytes_per_step, codec_of, cut, model_of

from jaxdt.codec.base import decode, encode
from jaxdt.model.batches import Samples
from jaxdt.model.chain import Chain
from jaxdt.model.data import TokenFile
from jaxdt.model.optim import by_facts, optimizer
from jaxdt.model.stage import StageFunctions, StageOptions, build_stage
from jaxdt.run.codec import CodecSpec
from jaxdt.run.config import RunConfig


@functools.cache  # compiling takes as long as a good part of a short run, and all seeds share the functions
def stages_of(config: RunConfig, case: Case) -> list[StageFunctions]:
    model = model_of(config, case)
    rule = optimizer(config.optim, roles=by_facts(model.facts))
    options = StageOptions(config.train.microbatch_size, config.remat, config.dtype, seq_len=config.seq_len)
    return [build_stage(model, lo, hi, rule, options) for lo, hi in cut(model, case.stages)]


def chain_of(config: RunConfig, case: Case) -> Chain:
    """The case's stages with new parameters, and its codec at every boundary."""
    stages = stages_of(config, replace(case, seed=0))
    return Chain(stages, case.seed, config.optim.clip_norm, functools.partial(transmitted, codec_of(case)))


def transmitted(spec: CodecSpec, x: jax.Array) -> jax.Array:
    """The tensor that arrives when `x` crosses a boundary."""
    if spec.is_identity:
        return x
    return decode(spec, encode(spec, x), x.shape, x.dtype)


def train(config: RunConfig, case: Case, data: TokenFile, on_step: Callable[[int], None]) -> dict:
    """The record of a run: its case, held-out losses as [updates done, nats per token], bytes a step. `on_step` is
    called with the number of each step that is done."""
    chain = chain_of(config, case)
    steps = config.train.steps
    together = range(config.plan.microbatches)
    samples = Samples(data, config.train, len(together), config.data.borders)
    n_evals = min(config.train.eval_microbatches, samples.n_held_out(config.seq_len))
    held_out = [samples.held_out(index, config.seq_len) for index in range(n_evals)]
    curve = []
    for step in range(steps):
        if config.train.eval_every_steps and step % config.train.eval_every_steps == 0:
            curve.append([step, chain.evaluate(held_out)])
        seq_len = config.seq_lengths.at(step)
        chain.step([samples.train(case.seed, step, m, seq_len, together) for m in together])
        on_step(step)
    curve.append([steps, chain.evaluate(held_out)])
    return {"case": vars(case), "eval": curve, "bytes_per_step": bytes_per_step(config, case)}
