"""All-reduce in few bytes: replicas apply the sum of rounded gradients, rounded once, and stay equal."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_equivalence import Tokens, gradient_of, train_in_pieces

from jaxdt.model.base import init_stage
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.runtime.storage.store import stage_functions
from jaxdt.sim.cluster import Simulation

pytestmark = pytest.mark.xdist_group("rounded_gradients")

SEED, SIZE, N_MICROBATCHES, N_STEPS, LR = 3, 2, 5, 5, 0.3
N_SAMPLES = SIZE * N_MICROBATCHES
MODEL = dict(preset="debug", n_layers=2, d_model=16, n_heads=2, d_ff=32, max_len=16, vocab_size=64)


def make_config(codec, stages, head):
    return run_config.parse(
        dict(
            model=MODEL | {"tied_head": head == "tied"},
            plan=dict(stages=stages, pipelines=2, microbatches=N_MICROBATCHES),
            train=dict(steps=N_STEPS, seed=SEED, microbatch_size=SIZE),
            optim=dict(name="sgd", lr=LR, momentum=0.0, clip_norm=0.05),
            sync=dict(codec=codec, slice_bytes=4096),
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
        )
    )


@functools.cache
def functions_of(config, plan, stage):
    return stage_functions(config, plan, stage)


def rounded(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16).astype(np.float32), tree)


def test_untied_replicas_train_as_plain_code_that_rounds_does():
    """Each pipeline's sum over its samples is rounded, and so is the sum of both."""
    config = make_config("bf16", 2, "untied")
    plan = run_config.default_plan(config)
    losses, norms, params, _ = train_in_pieces(config, functions_of)
    model, whole = config.model, init_stage(config.model, 0, 2, SEED)
    for step in range(N_STEPS):
        total, loss = None, 0.0
        for pipeline in range(2):
            own = plan.microbatches(pipeline)
            batch = np.concatenate([Tokens().train_batch(SEED, step, m, SIZE, 16, N_MICROBATCHES) for m in own])
            (_, mean), gradient = gradient_of(model)(whole, batch)
            part = rounded(jax.tree.map(lambda leaf, n=len(batch): leaf * n, gradient))
            total = part if total is None else jax.tree.map(np.add, total, part)
            loss += float(mean) * len(batch) / N_SAMPLES
        mean = jax.tree.map(lambda leaf: leaf / N_SAMPLES, rounded(total))
        norm = float(optax.tree.norm(mean))
        assert losses[step] == pytest.approx(loss, rel=1e-4)
        assert norms[step] == pytest.approx(norm, rel=1e-3)
        whole = jax.tree.map(lambda leaf, change, s=min(1.0, 0.05 / norm): leaf - LR * s * change, whole, mean)
    # A sum in another order may round to the next number of bf16.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), params, dict(whole))


@pytest.mark.parametrize(("stages", "head"), [(2, "tied"), (1, "untied")])
def test_half_the_bytes_and_equal_replicas(stages, head, monkeypatch):
    """train_in_pieces asserts that replicas end with equal bits."""
    n_bytes, params = Counter(), {}
    sent = Simulation._post

    def counting(self, src, post):
        n_bytes[codec] += sum(n for _, body, n in post.letters if isinstance(body, ev.Shard | ev.Reduced))
        sent(self, src, post)

    monkeypatch.setattr(Simulation, "_post", counting)
    for codec in ("none", "bf16"):
        losses, _, params[codec], _ = train_in_pieces(make_config(codec, stages, head), functions_of)
    assert n_bytes["bf16"] == n_bytes["none"] / 2 > 0
    differences = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params["none"], params["bf16"])
    assert 1e-7 < max(jax.tree.leaves(differences)) < 1e-3
