"""Training in one process, in plain code, that quantises at the boundaries of a plan."""

import functools
from functools import partial

import jax
import numpy as np
import test_equivalence as equivalence

from jaxdt.codec import base as codec
from jaxdt.model.base import apply_stage, init_stage
from jaxdt.model.stage import sum_sample_losses
from jaxdt.run.codec import parse

N_STEPS = 6


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def quantised(name, x):
    """x as the receiver has it; the gradient is quantised the same way."""
    return codec.decode(parse(name), codec.encode(parse(name), x), x.shape, x.dtype)


quantised.defvjp(lambda name, x: (quantised(name, x), None), lambda name, _, g: (quantised(name, g),))


def loss_sum(config, plan, name, params, tokens_BT):
    x = tokens_BT[:, :-1]
    for lo, hi in plan.stages:
        x = apply_stage(config.model, lo, hi, np.float32, params, x)
        if hi < plan.n_layers and name != "none":
            x = quantised(name, x)
    return sum_sample_losses(x, tokens_BT[:, 1:])


@functools.cache
def in_one_process(config, plan, name):
    """(losses, final parameters) of plain training, microbatch by microbatch, with these boundaries quantised."""
    model, n = config.model, equivalence.N_MICROBATCHES
    params = init_stage(model, 0, model.n_layers, config.train.seed)
    rule = equivalence.plain_optimizer(config.optim)
    state = rule.init(params)
    gradient_of = jax.jit(jax.value_and_grad(partial(loss_sum, config, plan, name)))

    @jax.jit
    def update(params, state, gradients):
        mean = jax.tree.map(lambda *leaves: sum(leaves) / (n * equivalence.BATCH), *gradients)
        with jax.numpy_dtype_promotion("standard"):
            change, state = rule.update(mean, state, params)
        return jax.tree.map(lambda a, b: a + b, params, change), state

    losses = []
    for step in range(N_STEPS):
        batch = partial(equivalence.Tokens().train_batch, config.train.seed, step)
        parts = [gradient_of(params, batch(m, equivalence.BATCH, config.seq_lengths.at(step), n)) for m in range(n)]
        losses.append(sum(float(loss) for loss, _ in parts) / (n * equivalence.BATCH))
        params, state = update(params, state, [gradient for _, gradient in parts])
    return losses, params
