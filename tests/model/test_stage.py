from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import moe_reference
import numpy as np
import optax
import pytest
import reference_models as reference
from moe_reference import least_margin

from jaxdt.model.base import apply_stage, init_stage
from jaxdt.model.batches import Batch
from jaxdt.model.optim import optimizer
from jaxdt.model.residual import put_weights_back, take_weights_out
from jaxdt.model.sample import assemble
from jaxdt.model.stage import AUXILIARY, StageOptions, auxiliary_figures, build_stage
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.optim import OptimConfig

pytestmark = pytest.mark.xdist_group("stages")  # one process compiles each stage, and then all tests have it

N_SAMPLES = 2
# Compiling a layer is what takes the time here: no more of them than the tests have stages, but for the pairs of
# compression layers, which are behind layers 1 and 2.
CONFIGS = reference.CONFIGS | {
    name: replace(reference.CONFIGS[name], n_layers=2) for name in ("tied", "llama3", "qwen3", "mixtral", "qwen3_moe")
}
ADAMW = OptimConfig(weight_decay=0.1, warmup_steps=2, lr=1e-2)


@cache  # stages hold no state, and compiling them is what takes the time here
def build(config, lo, hi, remat="recompute", dtype="float32", devices=1):
    return build_stage(config, lo, hi, optimizer(ADAMW), StageOptions(N_SAMPLES, remat, dtype, devices))


def build_split(config, cuts, **options):
    return [build(config, lo, hi, **options) for lo, hi in zip(cuts, cuts[1:], strict=False)]


def microbatches(config, n=2):
    rng = np.random.default_rng(7)
    rows = rng.integers(0, config.vocab_size, (n, N_SAMPLES, config.max_len + 1), dtype=np.int32)
    return [Batch(row) for row in rows]


def train(stages, params, batch):
    """(sum of losses, the stages' accumulators), every microbatch run through all stages; the first microbatch's
    forwards all come before its successor's backwards, as in a pipeline."""
    accs = [stage.zeros() for stage in stages]
    total, waiting = 0.0, []
    for one in batch:
        x, residuals = None, []
        for stage, p in zip(stages[:-1], params, strict=False):
            x, residual = stage.forward(p, x, one)
            residuals.append(residual)
        waiting.append((x, one, residuals))
    for x, one, residuals in waiting:
        loss, gx, accs[-1] = stages[-1].loss_backward(params[-1], x, one, accs[-1])
        total += float(loss)
        for i in reversed(range(len(stages) - 1)):
            gx, accs[i] = stages[i].backward(params[i], residuals[i], gx, accs[i])
        assert gx is None
    return total, accs


@partial(jax.jit, static_argnums=0)
def reference_loss_and_gradient(config, params, tokens_BT, targets_BT):
    objective = jax.value_and_grad(partial(reference.objective, config), has_aux=True)
    (_, loss), gradient = objective(params, tokens_BT, targets_BT)
    return loss, gradient


def expected(config, params, batch):
    """The same by autodiff of the reference model over all samples at once."""
    tokens_BT = np.concatenate([one.tokens for one in batch])
    return reference_loss_and_gradient(config, params, tokens_BT[:, :-1], tokens_BT[:, 1:])


def merged(config, trees):
    """The gradient of the whole model: a tied table's is the sum of both ends'."""
    whole = assemble(config, [{name: acc[name] for name in acc if name != AUXILIARY} for acc in trees])
    if config.tied_head and len(trees) > 1:
        whole["tok"] = trees[0]["tok"] + trees[-1]["tok"]
    return whole


def assert_trees_close(got, wanted, rtol=1e-4, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), got, wanted)


@pytest.mark.parametrize(
    "name, cuts, remat",
    [
        # tests/test_equivalence.py has plain and tied models, stages between others, pairs without shared blocks,
        # windows, and biases of queries; tests/model/test_model.py compares the logits of other options.
        ("shared_maxout", [0, 2, 4], "recompute"),
        ("qwen3", [0, 1, 2], "dots"),
        ("qwen3_moe", [0, 1, 2], "dots"),
    ],
)
def test_stages_give_the_loss_and_gradient_of_the_reference(name, cuts, remat):
    config = CONFIGS[name]
    stages, batch = build_split(config, cuts, remat=remat), microbatches(config)
    params = [stage.init(3) for stage in stages]
    loss, accs = train(stages, params, batch)
    wanted_loss, wanted_gradient = expected(config, assemble(config, params), batch)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-5)
    assert_trees_close(merged(config, accs), wanted_gradient)


def test_evaluation_equals_training_without_its_gradients():
    config = CONFIGS["tied"]
    first, last = build_split(config, [0, 1, 2])
    params, (batch,) = [first.init(3), last.init(3)], microbatches(config, n=1)
    y_BTD, _ = first.forward(params[0], None, batch)
    np.testing.assert_allclose(first.evaluate(params[0], None, batch), y_BTD, rtol=1e-5, atol=1e-6)
    loss, _, _ = last.loss_backward(params[1], y_BTD, batch, last.zeros())
    assert float(last.eval_loss(params[1], y_BTD, batch)) == pytest.approx(float(loss), rel=1e-5)
    assert last.evaluate(params[1], y_BTD, batch).shape == (N_SAMPLES, config.max_len, config.vocab_size)


@pytest.mark.parametrize("name", ["tied", "llama3"])
def test_a_padded_vocabulary_changes_neither_loss_nor_gradient(name):
    """The further rows of the table and columns of the head get no gradient, whatever is in them."""
    config = CONFIGS[name]
    padded = replace(config, vocab_size=config.vocab_size + 5)
    stage = build(config, 0, 2)
    with_rows = build_stage(padded, 0, 2, optimizer(ADAMW), StageOptions(N_SAMPLES, vocab_size=config.vocab_size))
    params, batch = stage.init(3), microbatches(config)
    fresh = with_rows.init(4)

    def widened(part, whole):
        return whole.at[tuple(slice(n) for n in part.shape)].set(part)

    rows = jax.tree.map(widened, params, fresh)
    loss, (acc,) = train([stage], [params], batch)
    padded_loss, (padded_acc,) = train([with_rows], [rows], batch)
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    expected = jax.tree.map(lambda part, whole: widened(part, jnp.zeros_like(whole)), acc, padded_acc)
    assert_trees_close(padded_acc, expected)
    alone = build_stage(padded, 0, 2, optimizer(ADAMW), StageOptions(N_SAMPLES))
    assert train([alone], [rows], batch)[0] > loss + 1e-3  # all logits


def test_a_stage_knows_its_place_and_its_boundary():
    stages = build_split(CONFIGS["plain"], [0, 1, 2, 3], dtype="bfloat16")
    assert [(stage.first, stage.last) for stage in stages] == [(True, False), (False, False), (False, True)]
    assert [stage.forward is None for stage in stages] == [False, False, True]
    assert [stage.loss_backward is None for stage in stages] == [True, True, False]
    assert {stage.in_shape for stage in stages} == {stage.out_shape for stage in stages} == {(2, 6, 16)}
    assert {stage.boundary_dtype for stage in stages} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    "name, lo, hi, groups",
    [
        ("plain", 0, 2, ["stage"]),
        ("plain", 1, 3, ["stage"]),
        ("tied", 0, 1, ["stage", "tied"]),
        ("tied", 1, 2, ["stage", "tied"]),
        ("tied", 0, 2, ["stage"]),
    ],
)
def test_vectors_hold_every_number_of_the_gradient_once(name, lo, hi, groups):
    config = CONFIGS[name]
    stage = build(config, lo, hi)
    params = stage.init(0)
    vectors = stage.gradient_vectors(params)
    assert sorted(vectors) == groups
    assert {group: len(vector) for group, vector in vectors.items()} == stage.group_sizes
    assert sum(stage.group_sizes.values()) == config.facts.stage_params(lo, hi)
    if "tied" in groups:
        np.testing.assert_array_equal(vectors["tied"], np.ravel(params["tok"]))
    total = sum(float(jnp.sum(leaf)) for leaf in jax.tree.leaves(params))
    assert sum(float(jnp.sum(vector)) for vector in vectors.values()) == pytest.approx(total, rel=1e-4)


def test_updates_by_stage_equal_optax_on_the_whole_model():
    config, tx = CONFIGS["tied"], optimizer(ADAMW)
    stages, batch = build_split(config, [0, 1, 2]), microbatches(config)
    params = [stage.init(3) for stage in stages]
    states = [stage.init_optimizer(p) for stage, p in zip(stages, params, strict=True)]
    whole = assemble(config, params)
    whole_state = tx.init(whole)
    scale = 0.5 / (N_SAMPLES * len(batch))
    for _ in range(2):
        _, accs = train(stages, params, batch)
        vectors = [stage.gradient_vectors(acc) for stage, acc in zip(stages, accs, strict=True)]
        tied = np.asarray(vectors[0]["tied"] + vectors[1]["tied"])
        for i, stage in enumerate(stages):
            params[i], states[i] = stage.update(params[i], states[i], vectors[i] | {"tied": tied}, scale)
        gradient = jax.tree.map(lambda leaf: leaf * scale, expected(config, whole, batch)[1])
        change, whole_state = jax.jit(tx.update)(gradient, whole_state, whole)
        whole = optax.apply_updates(whole, change)
    # Adam divides by the root of a small second moment, which magnifies rounding.
    assert_trees_close(assemble(config, params), whole, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(params[0]["tok"], params[1]["tok"])


def test_only_accumulator_and_optimizer_state_are_given_away():
    config = CONFIGS["tied"]
    stage, (batch,) = build(config, 0, 2), microbatches(config, n=1)
    params, before = stage.init(0), stage.zeros()
    opt_state = stage.init_optimizer(params)
    _, _, acc = stage.loss_backward(params, None, batch, before)
    vectors = stage.gradient_vectors(acc)
    stage.update(params, opt_state, vectors, 1.0)

    def deleted(tree):
        return {leaf.is_deleted() for leaf in jax.tree.leaves(tree)}

    assert deleted(before) == {True} and True in deleted(opt_state)
    assert deleted(params) == deleted(acc) == deleted(vectors) == {False}


def test_two_devices_give_the_numbers_of_one():
    """Also of experts."""
    config = CONFIGS["mixtral"]
    batch, results = microbatches(config), []
    for devices in (1, 2):
        stages = build_split(config, [0, 1, 2], remat="dots", devices=devices)
        params = [stage.init(3) for stage in stages]
        loss, accs = train(stages, params, batch)
        vectors = stages[0].gradient_vectors(accs[0])
        state = stages[0].init_optimizer(params[0])
        params[0], _ = stages[0].update(params[0], state, jax.tree.map(np.asarray, vectors), 0.25)
        assert {len(leaf.devices()) for leaf in jax.tree.leaves((params, accs))} == {devices}
        results.append(jax.tree.map(np.asarray, (loss, accs)))
    assert_trees_close(results[1], results[0])


@pytest.mark.parametrize("name", ["plain", "llama3"])
def test_bfloat16_computes_close_to_float32_with_float32_masters(name):
    config = CONFIGS[name]
    cuts = [0, 1, config.n_layers]
    stages, batch = build_split(config, cuts, remat="dots", dtype="bfloat16"), microbatches(config)
    params = [stage.init(3) for stage in stages]
    y_BTD, residual = stages[0].forward(params[0], None, batch[0])
    loss, accs = train(stages, params, batch)
    wanted_loss, wanted_gradient = expected(config, assemble(config, params), batch)
    assert y_BTD.dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves((params, accs))} == {jnp.dtype(jnp.float32)}
    assert loss == pytest.approx(float(wanted_loss), rel=1e-3)
    assert_trees_close(accs, [{k: wanted_gradient[k] for k in acc} for acc in accs], rtol=0.1, atol=0.05)
    turns = [leaf for leaf in jax.tree.leaves(residual) if leaf.dtype == jnp.float32]  # of rotary positions, [T, K/2]
    assert all(leaf.shape == (config.max_len, 2) for leaf in turns) and bool(turns) == (name == "llama3")


@partial(jax.jit, static_argnums=0)
def experts_of_reference(config, params, tokens_BT):
    return (*moe_reference.logits_and_auxiliary(config, params, tokens_BT), least_margin(config, params, tokens_BT))


def test_auxiliary_losses_and_loads_are_the_same_for_every_cut():
    """The accumulators of all stages have, together, the auxiliary loss of the whole batch."""
    config = CONFIGS["mixtral"]
    batch, found = microbatches(config), []
    for cuts, remat in (([0, 2], "recompute"), ([0, 1, 2], "dots")):
        stages = build_split(config, cuts, remat=remat)
        params = [stage.init(3) for stage in stages]
        _, accs = train(stages, params, batch)
        assert [float(acc[AUXILIARY]["n_samples"]) for acc in accs] == [2 * N_SAMPLES] * len(stages)
        found.append([layer for acc in accs for layer in acc[AUXILIARY]["layers"]])
        figures = [auxiliary_figures(acc) for acc in accs]
    _, wanted, _ = experts_of_reference(
        config, assemble(config, params), np.concatenate([one.tokens[:, :-1] for one in batch])
    )
    for layers in found:
        assert sum(float(layer.loss) for layer in layers) == pytest.approx(float(wanted), rel=1e-5)
        for layer, first in zip(layers, found[0], strict=True):
            np.testing.assert_array_equal(layer.load, first.load)
            assert float(jnp.sum(layer.load)) == 2 * N_SAMPLES * config.max_len * config.n_experts_per_token
    assert sum(one["auxiliary_loss"] for one in figures) == pytest.approx(float(wanted) / (2 * N_SAMPLES), rel=1e-5)
    largest = [float(jnp.max(layer.load) / jnp.mean(layer.load)) for layer in found[0]]
    assert [one["expert_load_max"] for one in figures] == pytest.approx(largest)
    assert auxiliary_figures(stages[0].zeros()) == auxiliary_figures({}) == {}


def test_bfloat16_sends_tokens_to_the_same_experts_where_none_is_near_another():
    """The experts of a token jump where two of them have equal probabilities. So this compares samples in which no two
    are near: the last one that was chosen has a tenth more, at least, than the next."""
    config = CONFIGS["mixtral"]
    results = []
    for dtype in ("bfloat16", "float32"):
        stages = build_split(config, [0, 1, 2], remat="dots", dtype=dtype)
        params = [stage.init(3) for stage in stages]
        for stage_params in params:
            for name in stage_params:
                if name.startswith("block"):
                    stage_params[name] = stage_params[name] | {"router": 40 * stage_params[name]["router"]}
        if not results:
            batch, whole = microbatches(config, 40), assemble(config, params)
            margins = [float(experts_of_reference(config, whole, one.tokens[:, :-1])[2]) for one in batch]
            assert max(margins) > 0.1
            batch = [batch[int(np.argmax(margins))]]
        results.append(train(stages, params, batch))
    (loss, accs), (wanted_loss, wanted) = results
    assert loss == pytest.approx(wanted_loss, rel=1e-3)
    assert_trees_close(accs, wanted, rtol=0.1, atol=0.05)
    loads = [[layer.load for layer in acc[AUXILIARY]["layers"]] for acc in accs]
    jax.tree.map(
        np.testing.assert_array_equal, loads, [[one.load for one in acc[AUXILIARY]["layers"]] for acc in wanted]
    )


WIDE = GPTConfig(n_layers=3, d_model=32, n_heads=2, d_ff=128, max_len=2, vocab_size=8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residuals_of_dots_do_not_hold_the_weights(dtype):
    """On the wide, short WIDE a layer's weights are 10 times its activations, so that one of them would show."""
    stage = build(WIDE, 1, 2, remat="dots", dtype=dtype)
    params = stage.init(0)
    _, residual = stage.forward(params, np.ones((N_SAMPLES, 2, 32), stage.boundary_dtype), Batch())
    n_saved, n_weights = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (residual, params))
    n_rows = N_SAMPLES * WIDE.max_len
    assert n_saved <= n_rows * (32 + 3 * 32 + 32 + 32 + 128 + 32) < n_weights / 5


def test_without_the_identity_of_weights_the_residual_is_larger_and_as_correct():
    params, x_BTD = init_stage(WIDE, 1, 2, 0), np.ones((1, 2, 32), np.float32)

    @partial(jax.jit, static_argnums=0)
    def pulled(recognised, params):
        y_BTD, pullback = jax.vjp(partial(apply_stage, WIDE, 1, 2, jnp.float32), params, x_BTD)
        known = params if recognised else {}
        residual = take_weights_out(pullback, known)
        return len(residual.saved), put_weights_back(residual, known)(y_BTD)

    (n_saved, gradient), (n_all, gradient_too) = pulled(True, params), pulled(False, params)
    assert_trees_close(gradient, gradient_too)
    assert n_saved < n_all


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(remat="all"), "remat: got 'all'"),
        (dict(dtype="float16"), "dtype: got 'float16'"),
        (dict(devices=0), "devices: got 0"),
        (dict(devices=99), "expected 1 to 8"),
        (dict(microbatch_size=0), "microbatch_size: got 0"),
        (dict(microbatch_size=3, devices=2), "a positive multiple of devices 2"),
        (dict(hi=9), "n_layers 3"),
    ],
)
def test_wrong_options_are_refused(options, message):
    hi = options.pop("hi", 2)
    with pytest.raises(BadInput, match=message):
        build_stage(CONFIGS["plain"], 0, hi, optimizer(ADAMW), StageOptions(**dict(microbatch_size=2) | options))
