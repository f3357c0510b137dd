"""The compression pairs: their mathematics, their gradients, what they do to a boundary, and their checkpoints."""

import math
import queue
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdt.model import kernels
from jaxdt.model.base import apply_stage, init_stage, stage_entries
from jaxdt.model.batches import Batch
from jaxdt.model.families.gpt import MODEL
from jaxdt.model.layers import Receiver, Sender
from jaxdt.model.optim import optimizer
from jaxdt.model.stage import StageOptions, build_stage
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.optim import OptimConfig
from jaxdt.run.sizes import boundary_bytes
from jaxdt.runtime.storage.checkpoint import about_run, check_resumable, mark_complete
from jaxdt.runtime.storage.checkpointer import Checkpointer
from jaxdt.runtime.storage.entries import join_entries, load_entries
from jaxdt.runtime.storage.parts import step_folder

D, RATIO = 8, 2
SIZES = dict(n_layers=3, d_model=D, n_heads=2, d_ff=8, max_len=4, vocab_size=12)
HALVES = {
    "bottleneck": Sender("bottleneck", RATIO),
    "maxout": Sender("maxout", RATIO),
    "receiver": Receiver(D),
}


class Held:
    """A store with this state."""

    def __init__(self, state):
        self.state = state

    def state_of(self, version):
        return self.state


def drawn(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def made(name):
    """Parameters of a half, none of them 0 or 1, and an input for it."""
    width = D // RATIO if name == "receiver" else D
    shapes = jax.eval_shape(HALVES[name].init, jax.random.key(0), jnp.zeros((1, 1, width)))["params"]
    return filled(shapes), drawn((2, 3, width), 9)


def filled(shapes):
    """A tree of numbers around 0.7; drawing is cheaper than to compile what initialises."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [0.7 + 0.3 * drawn(leaf.shape, i) for i, leaf in enumerate(leaves)])


@partial(jax.jit, static_argnums=0)
def half(name, params, x):
    return HALVES[name].apply({"params": params}, x)


@partial(jax.jit, static_argnums=0)
def half_gradient(name, params, x, weights):
    return jax.grad(lambda params, x: jnp.sum(half(name, params, x) * weights), argnums=(0, 1))(params, x)


# ------------------------------------------------------------------------------------------------------------ the maths


def numpy_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def numpy_half(name, p, x):
    """The halves in float64, from the text of SWARM App. J."""
    p, x = jax.tree.map(partial(np.asarray, dtype=np.float64), (p, x))
    if name == "receiver":
        return x @ p["expand"]["kernel"] + p["expand"]["bias"]
    normed = numpy_norm(p["ln_wide"], x)
    if name == "bottleneck":
        return numpy_norm(p["ln_narrow"], normed @ p["compress"]["kernel"] + p["compress"]["bias"])
    windows = [normed[..., i : i + RATIO].max(-1) for i in range(0, D, RATIO)]
    return numpy_norm(p["ln_narrow"], np.stack(windows, axis=-1))


@pytest.mark.parametrize("name", HALVES)
def test_a_half_is_what_the_paper_writes(name):
    params, x = made(name)
    np.testing.assert_allclose(half(name, params, x), numpy_half(name, params, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HALVES)
def test_gradients_agree_with_finite_differences(name):
    """Central differences of the float64 form, in every direction of parameters and input."""
    params, x = made(name)
    weights = drawn(numpy_half(name, params, x).shape, 5)
    gradient = half_gradient(name, params, x, weights)
    leaves, tree = jax.tree.flatten(jax.tree.map(partial(np.array, dtype=np.float64), (params, x)))
    step = 1e-6
    for leaf, got in zip(leaves, jax.tree.leaves(gradient), strict=True):
        wanted = np.empty_like(leaf)
        for at in np.ndindex(leaf.shape):
            kept, sides = leaf[at], []
            for side in (step, -step):
                leaf[at] = kept + side
                sides.append(np.sum(numpy_half(name, *jax.tree.unflatten(tree, leaves)) * weights))
            leaf[at] = kept
            wanted[at] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-4)


def test_halves_start_within_the_bound_of_their_inputs():
    """Weights and biases uniform within 1/sqrt(inputs): 1/8 for the sender's linear, 1/4 for the receiver's."""
    config = GPTConfig(**SIZES | {"d_model": 64, "n_heads": 4}, compression="bottleneck4", compression_after=(1,))
    sender, receiver = (MODEL.init(config, entry, jax.random.key(0)) for entry in ("sender_001", "receiver_001"))
    for dense, bound in ((sender["compress"], 1 / 8), (receiver["expand"], 1 / 4)):
        for leaf in (dense["kernel"], dense["bias"]):
            assert 0.8 * bound < float(jnp.max(jnp.abs(leaf))) <= bound
        assert float(jnp.std(dense["kernel"])) == pytest.approx(bound / math.sqrt(3), rel=0.1)


def test_a_pair_has_no_residual_around_it():
    """With weights and bias of the receiver at zero nothing of the layers below gets through."""
    config = GPTConfig(**SIZES | {"n_layers": 2}, compression="bottleneck2", compression_after=(1,))
    params = filled(jax.eval_shape(lambda: init_stage(config, 0, 2, 0)))
    params["receiver_001"] = jax.tree.map(jnp.zeros_like, params["receiver_001"])
    run = jax.jit(partial(apply_stage, config, 0, 2, jnp.float32))
    logits = run(params, np.arange(4, dtype=np.int32)[None])
    # Some processors add up the first and the last position in another order; what got through would be of order 1.
    np.testing.assert_allclose(logits[0, 0], logits[0, -1], rtol=1e-5)


# ------------------------------------------------------------------------------------- invariant 8 of the specification


numbers = st.integers(-3, 3)  # few values, so that there are ties


@partial(jax.jit, static_argnums=0)
def maxout_and_gradient(ratio, x, g):
    y, pullback = jax.vjp(lambda x: kernels.maxout(x, ratio), x)
    return y, pullback(g)[0]


@settings(max_examples=40)
@given(data=st.data(), ratio=st.sampled_from([2, 4]))
def test_only_the_first_winner_of_a_window_gets_a_gradient(data, ratio):
    x = np.array(data.draw(st.lists(numbers, min_size=2 * 8, max_size=2 * 8)), np.float32).reshape(1, 2, 8)
    g = np.arange(1, 2 * 8 // ratio + 1, dtype=np.float32).reshape(1, 2, -1)
    y, gradient = maxout_and_gradient(ratio, x, g)
    wanted = np.zeros_like(x)
    for token in range(2):
        for i in range(8 // ratio):
            window = list(x[0, token, i * ratio : (i + 1) * ratio])
            assert y[0, token, i] == max(window)
            wanted[0, token, i * ratio + window.index(max(window))] = g[0, token, i]
    np.testing.assert_array_equal(gradient, wanted)


@pytest.mark.parametrize(
    ("kind", "ratio", "heads", "batch", "seq_len", "codec"),
    [
        ("bottleneck", 2, 1, 1, 1, "none"),
        ("maxout", 4, 5, 7, 699, "bf16"),
        ("bottleneck", 4, 6, 3, 431, "int8"),
        ("maxout", 2, 3, 9, 700, "int8-dynamic"),
    ],
)
def test_a_pair_divides_what_is_on_the_wire_by_its_ratio_exactly(kind, ratio, heads, batch, seq_len, codec):
    width = 8 * heads
    fields = {
        "model": {"n_layers": 2, "d_model": width, "n_heads": heads, "d_ff": 8, "max_len": seq_len, "vocab_size": 12},
        "plan": {"stages": 2},
        "train": {"microbatch_size": batch},
    }
    config = run_config.parse(fields | {"codec": f"{kind}{ratio}+{codec}"})
    plan = run_config.default_plan(config)
    n_wide = batch * seq_len * width
    n = config.model.facts.boundary_numbers(config.microbatch_shape.n_tokens, 1)
    assert n * ratio == n_wide
    block = {"int8": 256, "int8-dynamic": 4096}
    wanted = {"none": 4 * n, "bf16": 2 * n}.get(codec) or n + 4 * math.ceil(n / block[codec])
    assert {boundary_bytes(config, plan, 0, 0, forward) for forward in (True, False)} == {wanted}


@pytest.mark.parametrize(
    ("compression", "dtype", "remat"),
    [("bottleneck2", "float32", "recompute"), ("maxout4", "bfloat16", "dots")],
)
def test_what_a_stage_sends_and_takes_is_narrow(compression, dtype, remat):
    config = GPTConfig(**SIZES | {"n_layers": 2}, compression=compression, compression_after=(1,))
    rule = optimizer(OptimConfig())
    options = StageOptions(2, remat, dtype)
    first, last = (build_stage(config, lo, hi, rule, options) for lo, hi in ((0, 1), (1, 2)))
    batch = Batch(np.arange(10, dtype=np.int32).reshape(2, 5))
    params, below = (filled(jax.eval_shape(stage.zeros)) for stage in (first, last))
    y, residual = first.forward(params, None, batch)
    _, gx, _ = last.loss_backward(below, y, batch, last.zeros())
    gradient, acc = first.backward(params, residual, gx, first.zeros())
    narrow = (2, 4, D // config.compression_ratio)
    assert first.out_shape == last.in_shape == y.shape == gx.shape == narrow
    assert y.dtype == gx.dtype == first.boundary_dtype
    assert gradient is None and float(jnp.max(jnp.abs(acc["sender_001"]["ln_narrow"]["scale"]))) > 0


# ---------------------------------------------------------------------------------------------------------- checkpoints


def run_of(compression, after):
    model = SIZES | {"compression": compression, "compression_after": after}
    return run_config.parse({"model": model})


def stage_state(config, lo, hi, rule):
    whole = filled(jax.eval_shape(lambda: init_stage(config.model, 0, 3, 0)))
    params = {name: whole[name] for name in stage_entries(config.model, lo, hi)}
    return params, rule.init(params)


def test_a_run_with_pairs_resumes_on_another_cut(tmp_path):
    """One entry per half, by the layer that it follows: written by stages cut at the pair, read by one cut off it."""
    config, rule = run_of("maxout2", (1,)), optimizer(OptimConfig())
    told, parts = queue.SimpleQueue(), []
    for stage, (lo, hi) in enumerate(((0, 1), (1, 3))):
        params, opt_state = stage_state(config, lo, hi, rule)
        store = Held((params, opt_state))
        Checkpointer(tmp_path, "r", about_run(config, "abc"), 2, (2, stage)).save(
            ev.WriteCheckpoint(4), store, told.put
        )
        wrote = told.get(timeout=60)
        parts.append(ev.Part(4, stage, wrote.digest, wrote.n_words))
    mark_complete(tmp_path, ev.Checkpoint(4, 0, tuple(parts)), about_run(config, "abc"))
    names = stage_entries(config.model, 0, 2)
    assert {"sender_001", "receiver_001"} <= set(names)
    assert {"sender_001"} == set(stage_entries(config.model, 0, 1)) - {"tok", "pos", "block_000"}
    expected = stage_state(config, 0, 2, rule)
    got = join_entries(load_entries(step_folder(tmp_path, 4), names), jax.tree.map(jnp.zeros_like, expected))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("made_with", "resumed_with", "said"),
    [
        (("none", ()), ("maxout2", (1,)), "made with model.compression 'none', the config has 'maxout2'"),
        (("maxout2", (1,)), ("none", ()), "made with model.compression 'maxout2', the config has 'none'"),
        (("maxout2", (1,)), ("bottleneck2", (1,)), "'maxout2', the config has 'bottleneck2'"),
        (("maxout2", (1,)), ("maxout2", (1, 2)), "made with model.compression_after [1], the config has [1, 2]"),
    ],
)
def test_a_resume_that_would_add_or_remove_a_pair_is_refused(tmp_path, made_with, resumed_with, said):
    folder = step_folder(tmp_path, 4)
    folder.mkdir(parents=True)
    mark_complete(tmp_path, ev.Checkpoint(4), about_run(run_of(*made_with), "abc"))
    assert check_resumable(folder, about_run(run_of(*made_with), "abc")).version == 4
    with pytest.raises(BadInput, match=re.escape(said)):
        check_resumable(folder, about_run(run_of(*resumed_with), "abc"))
