"""One training run of the ablation in one process: the stage functions of a cut model, called in order, with every
boundary tensor encoded and decoded on its way, forward and back. That is the arithmetic of the same stages on many
hosts, without their machines and sockets."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxdt.ablation.grid import Case, bytes_per_step, codec_of, cut, model_of
from jaxdt.codec.base import decode, encode
from jaxdt.model.data import TokenFile
from jaxdt.model.optim import optimizer
from jaxdt.model.stage import StageFunctions, StageOptions, build_stage
from jaxdt.model.vectors import TIED_GROUP
from jaxdt.spec.config import RunConfig


@functools.cache  # compiling takes as long as a good part of a short run, and seeds share it
def stages_of(config: RunConfig, case: Case) -> list[StageFunctions]:
    """The functions of the case's stages."""
    model, rule = model_of(config, case), optimizer(config.optim)
    options = StageOptions(config.train.microbatch_size, config.remat, config.dtype)
    return [build_stage(model, lo, hi, rule, options) for lo, hi in cut(model, case.stages)]


class Chain:
    """Stages and their state, from the first to the last; `params[s]` and `states[s]` belong to `stages[s]`."""

    def __init__(self, config: RunConfig, case: Case):
        self.stages = stages_of(config, replace(case, seed=0))
        self.params = [stage.init(case.seed) for stage in self.stages]
        self.states = [stage.init_optimizer(params) for stage, params in zip(self.stages, self.params, strict=True)]
        self._spec, self._clip_norm = codec_of(case), config.optim.clip_norm

    def crossed(self, x):
        """What arrives of a tensor that crosses a boundary."""
        if self._spec.is_identity:
            return x
        return decode(self._spec, encode(self._spec, x), x.shape, x.dtype)

    def accumulate(self, tokens_BT: np.ndarray, accs: list) -> tuple[jax.Array, list]:
        """(loss sum, accumulators) after one microbatch, forward and backward; tokens are [B, T+1]."""
        x, residuals = tokens_BT[:, :-1], []
        for stage, params in zip(self.stages[:-1], self.params, strict=False):
            y, residual = stage.forward(params, x)
            residuals.append(residual)
            x = self.crossed(y)
        loss, gx, accs[-1] = self.stages[-1].loss_backward(self.params[-1], x, tokens_BT[:, 1:], accs[-1])
        for s in reversed(range(len(residuals))):
            gx, accs[s] = self.stages[s].backward(self.params[s], residuals[s], self.crossed(gx), accs[s])
        return loss, accs

    def step(self, microbatches: list[np.ndarray]) -> float:
        """One update; the mean loss of its samples, before it."""
        accs, losses = [stage.zeros() for stage in self.stages], []
        for tokens_BT in microbatches:
            loss, accs = self.accumulate(tokens_BT, accs)
            losses.append(loss)
        n_samples = sum(len(tokens_BT) for tokens_BT in microbatches)
        vectors = [stage.gradient_vectors(acc) for stage, acc in zip(self.stages, accs, strict=True)]
        del accs
        self._update(_with_one_tied_table(vectors), n_samples)
        return float(sum(losses)) / n_samples

    def _update(self, vectors: list[dict], n_samples: int) -> None:
        groups = {(name if name == TIED_GROUP else s): v for s, own in enumerate(vectors) for name, v in own.items()}
        norm = float(_norm(list(groups.values()))) / n_samples
        clip = min(1.0, self._clip_norm / norm) if self._clip_norm and norm else 1.0
        for s, stage in enumerate(self.stages):
            self.params[s], self.states[s] = stage.update(
                self.params[s], self.states[s], vectors[s], np.float32(clip / n_samples)
            )

    def evaluate(self, batches: list[np.ndarray]) -> float:
        """Mean held-out loss, nats per token; boundaries are encoded as in training."""
        total = 0.0
        for tokens_BT in batches:
            x = tokens_BT[:, :-1]
            for stage, params in zip(self.stages[:-1], self.params, strict=False):
                x = self.crossed(stage.evaluate(params, x))
            total += float(self.stages[-1].eval_loss(self.params[-1], x, tokens_BT[:, 1:]))
        return total / sum(len(tokens_BT) for tokens_BT in batches)


def _with_one_tied_table(vectors: list[dict]) -> list[dict]:
    """A tied table's gradient is the sum of both ends'."""
    if len(vectors) == 1 or TIED_GROUP not in vectors[0]:
        return vectors
    total = {TIED_GROUP: vectors[0][TIED_GROUP] + vectors[-1][TIED_GROUP]}
    return [vectors[0] | total, *vectors[1:-1], vectors[-1] | total]


@jax.jit
def _norm(vectors: list) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(jnp.square(vector)) for vector in vectors))


def train(config: RunConfig, case: Case, data: TokenFile, told: Callable[[int], None]) -> dict:
    """The record of a run: its case, held-out losses as [updates done, nats per token], bytes a step. `told` gets the
    number of every step that is done."""
    chain, steps = Chain(config, case), config.train.steps
    sizes = (config.train.microbatch_size, config.model.seq_len)
    n_evals = min(config.train.eval_microbatches, data.n_eval_batches(*sizes))
    held_out = [data.eval_batch(index, *sizes) for index in range(n_evals)]
    curve = []
    for step in range(steps):
        if config.train.eval_every_steps and step % config.train.eval_every_steps == 0:
            curve.append([step, chain.evaluate(held_out)])
        microbatches = range(config.plan.microbatches)
        size, seq_len = config.train.microbatch_size, config.seq_lengths.at(step)
        batch = [data.train_batch(case.seed, step, m, size, seq_len, len(microbatches)) for m in microbatches]
        chain.step(batch)
        told(step)
    curve.append([steps, chain.evaluate(held_out)])
    return {"case": vars(case), "eval": curve, "bytes_per_step": bytes_per_step(config, case)}
