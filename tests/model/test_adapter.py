"""Adapters: what is trained, and that a run with them trains as plain code that adds products to matrices."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_models
from test_equivalence import Tokens, train_in_pieces

from jaxdt.model import kernels
from jaxdt.model.adapter import held
from jaxdt.model.base import apply_stage, entry_and_path, init_stage
from jaxdt.model.batches import Batch
from jaxdt.run import config as run_config
from jaxdt.run.errors import BadInput
from jaxdt.run.model import options_of
from jaxdt.runtime.storage.store import stage_functions

pytestmark = pytest.mark.xdist_group("adapters")

SEED, SIZE, N_STEPS, N_MICROBATCHES, LR = 3, 2, 4, 4, 0.5
SHAPE = dict(preset="debug", n_layers=3, d_model=16, n_heads=2, d_ff=32, max_len=8, vocab_size=64)
MODELS = {
    "gpt": SHAPE | dict(adapter="lora:4:qkv,down", tied_head=True),
    "shared": SHAPE | dict(adapter="lora:2", n_shared_blocks=3),
    "llama": SHAPE | dict(family="llama", n_kv_heads=1, adapter="lora:4"),
    "moe": SHAPE
    | dict(family="moe", n_kv_heads=1, n_experts=2, n_experts_per_token=1, router_aux_coef=0.0, adapter="lora:2:q,v"),
    "own": dict(
        family="configs.custom_model.own_linen:build",
        options='{"width": 16, "layers": 3}',
        max_len=8,
        vocab_size=64,
        adapter="lora:2",
    ),
}


def make_config(model, stages=2, pipelines=2, **sync):
    return run_config.parse(
        dict(
            model=MODELS[model],
            plan=dict(stages=stages, pipelines=pipelines, microbatches=N_MICROBATCHES),
            train=dict(steps=N_STEPS, seed=SEED, microbatch_size=SIZE),
            optim=dict(name="sgd", lr=LR, momentum=0.0, clip_norm=0.0),
            sync=sync,
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
        )
    )


@functools.cache
def functions_of(config, plan, stage):
    return stage_functions(config, plan, stage)


def merged(tree):
    """The model's own tree, each adapted matrix with its product added."""
    found = dict(tree)
    adapters = found.pop("lora", {})

    def added(node, adapter):
        if set(adapter) == {"a", "b"}:
            return node + 2.0 * (adapter["a"] @ adapter["b"])
        return {name: added(inner, adapter[name]) if name in adapter else inner for name, inner in node.items()}

    return added(found, adapters) if adapters else found


def plain(model, params):
    return {name: merged(tree) if isinstance(tree, dict) else tree for name, tree in params.items()}


@functools.cache
def loss_and_gradient(model):
    base = model.without_adapter()

    def loss(params, tokens_BT):
        total = reference_models.loss_sum(base, plain(model, params), tokens_BT[:, :-1], tokens_BT[:, 1:])
        return total / len(tokens_BT)

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("name", MODELS)
def test_fresh_adapters_change_nothing_and_only_they_are_trained(name):
    model = options_of(**MODELS[name])
    base, n_layers = model.without_adapter(), model.facts.n_layers
    params = init_stage(model, 0, n_layers, SEED)
    leaves = {entry_and_path(keys): leaf.shape for keys, leaf in jax.tree_util.tree_leaves_with_path(params)}
    facts = {(entry.name, leaf.path): leaf for entry in model.facts.entries for leaf in entry.leaves}
    assert leaves == {key: leaf.shape for key, leaf in facts.items()}
    assert (
        {key for key, leaf in facts.items() if leaf.trained} == {k for k in facts if k[1].startswith("lora/")} != set()
    )
    tokens = np.arange(8, dtype=np.int32)[None]
    logits = apply_stage(model, 0, n_layers, jnp.dtype(jnp.float32), params, tokens)
    own = apply_stage(base, 0, n_layers, jnp.dtype(jnp.float32), init_stage(base, 0, n_layers, SEED), tokens)
    np.testing.assert_array_equal(logits, own)


@pytest.mark.parametrize(
    ("name", "stages", "sync"),
    [
        ("gpt", 3, {}),
        ("shared", 1, {}),
        ("llama", 2, {}),
        ("moe", 2, {}),
        ("own", 2, {}),
        ("llama", 2, dict(kind="groups", groups=dict(every_steps=1), codec="none")),
        ("gpt", 2, dict(delay=1)),
    ],
)
def test_a_run_with_an_adapter_trains_as_plain_code_does(name, stages, sync):
    config = make_config(name, stages, **sync)
    model = config.model
    losses, _, params, _ = train_in_pieces(config, functions_of)
    n_layers = model.facts.n_layers
    versions = [init_stage(model, 0, n_layers, SEED)]
    for step in range(N_STEPS):
        batch = [Tokens().train_batch(SEED, step, m, SIZE, 8, N_MICROBATCHES) for m in range(N_MICROBATCHES)]
        lag = config.sync.delay if step else 0
        loss, gradient = loss_and_gradient(model)(versions[step - lag], np.concatenate(batch))
        assert losses[step] == pytest.approx(float(loss), rel=1e-5)

        def stepped(keys, leaf, change):
            return leaf - LR * change if entry_and_path(keys)[1].startswith("lora/") else leaf

        versions.append(jax.tree_util.tree_map_with_path(stepped, versions[-1], gradient))
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        entry, path = entry_and_path(keys)
        wanted = dict((entry_and_path(k), v) for k, v in jax.tree_util.tree_leaves_with_path(versions[-1]))[entry, path]
        if path.startswith("lora/"):
            np.testing.assert_allclose(leaf, wanted, rtol=1e-4, atol=1e-6)
            assert np.any(leaf)
        else:
            np.testing.assert_array_equal(leaf, wanted)


def adapter_drawn(tree):
    """The tree with other numbers in place of the zeros of B."""
    rng = np.random.default_rng(5)

    def drawn(keys, leaf):
        is_b = entry_and_path(keys)[1].endswith("/b")
        return rng.standard_normal(leaf.shape).astype(np.float32) if is_b else np.asarray(leaf)

    return jax.tree_util.tree_map_with_path(drawn, tree)


def rounded(model, tree):
    """The tree with frozen numbers that are numbers of bf16."""

    def number(keys, leaf):
        is_frozen = entry_and_path(keys) in model.facts.frozen
        return leaf.astype(jnp.bfloat16).astype(np.float32) if is_frozen else leaf

    return jax.tree_util.tree_map_with_path(number, tree)


def held_tree(model, tree, dtype):
    return {name: held(model, name, entry, dtype) for name, entry in tree.items()}


def narrow_paths(tree):
    return {entry_and_path(keys) for keys, leaf in jax.tree_util.tree_leaves_with_path(tree) if kernels.is_narrow(leaf)}


@pytest.mark.parametrize("n_large", [64, 1 << 22])
@pytest.mark.parametrize("name", ["gpt", "llama", "moe"])
def test_frozen_numbers_of_bf16_are_held_in_half_the_bytes_and_compute_the_same(name, n_large, monkeypatch):
    """Matrices of experts and the table of a tied head too, in blocks where they are large; scales and biases are in
    fp32. A matrix with another number stays in fp32."""
    monkeypatch.setattr(kernels, "LARGE_NUMBERS", n_large)
    monkeypatch.setattr(kernels, "BLOCK_NUMBERS", 16 * 5)  # of no axis a divisor
    config = make_config(name, stages=1, pipelines=1)
    model = config.model
    params = rounded(model, adapter_drawn(init_stage(model, 0, model.facts.n_layers, SEED)))
    narrow = held_tree(model, params, "float32")
    leaves = {(entry.name, leaf.path): leaf for entry in model.facts.entries for leaf in entry.leaves}
    expected = {key for key, leaf in leaves.items() if not leaf.trained and leaf.role != "vector"}
    assert narrow_paths(narrow) == expected and all(leaf.nbytes for leaf in jax.tree.leaves(narrow))
    functions = stage_functions(config, run_config.default_plan(config), 0)
    batch = Batch(Tokens().train_batch(SEED, 0, 0, SIZE, 8, N_MICROBATCHES))
    results = [functions.loss_backward(tree, None, batch, functions.zeros()) for tree in (params, narrow)]
    assert float(results[0][0]) == pytest.approx(float(results[1][0]), rel=1e-6)
    gradients = [{name: result[2][name] for name in params} for result in results]
    for wide, half in zip(*map(jax.tree.leaves, gradients), strict=True):
        np.testing.assert_allclose(half, wide, rtol=1e-4, atol=1e-5 * np.abs(wide).max())
        assert np.any(wide)

    entry, path = next((entry, path) for entry, path in sorted(expected) if not path and entry == "tok")
    params[entry][3, 3] += 1e-6
    assert narrow_paths(held_tree(model, params, "float32")) == expected - {(entry, path)}
    assert narrow_paths(held_tree(model, params, "bfloat16")) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_table", [False, True])
def test_other_platforms_multiply_numbers_of_bf16_and_a_cpu_their_bits(is_table, dtype):
    rng = np.random.default_rng(7)
    x_RD, a_DK, b_KF = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 8), (8, 2), (2, 12)))
    matrix = rng.standard_normal((12, 8) if is_table else (8, 12)).astype(jnp.bfloat16)
    x_RD, adapter = x_RD.astype(dtype), () if is_table else (a_DK, b_KF)
    elsewhere = kernels._whole_frozen_product(jnp.asarray(x_RD), jnp.asarray(matrix), *adapter, is_table=is_table)
    weight = matrix.view(np.uint16) if is_table else kernels.Adapted(matrix.view(np.uint16), *adapter)
    here = kernels.product(jnp.asarray(x_RD)[None], weight, is_table=is_table)[0]
    assert here.dtype == elsewhere.dtype == dtype
    tolerance = 1e-6 if dtype == "float32" else 2e-2
    expected = x_RD.astype(np.float32) @ (matrix.T if is_table else matrix).astype(np.float32)
    expected = expected if is_table else expected + x_RD.astype(np.float32) @ a_DK @ b_KF
    for found in (here, elsewhere):
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol=tolerance, atol=10 * tolerance)


def test_a_module_of_ones_own_gets_its_matrices_in_fp32():
    model = options_of(**MODELS["own"])
    params = rounded(model, adapter_drawn(init_stage(model, 0, model.facts.n_layers, SEED)))
    assert not narrow_paths(held_tree(model, params, "bfloat16"))


@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_backward_holds_few_matrices(is_narrow):
    """No sum of the matrices of a layer beside another one's, no gradient of a frozen matrix, and no residual with
    matrices: so the program takes, beside what that of full training takes, less than a layer's matrices."""
    shape = SHAPE | dict(family="llama", n_kv_heads=1, n_layers=8, d_model=64, n_heads=2, d_ff=256)

    def temporary_bytes(adapter):
        config = replace(make_config("llama", 2), model=options_of(**shape, adapter=adapter))
        functions = stage_functions(config, run_config.default_plan(config), 0)
        params = functions.init(0)
        if is_narrow and adapter:
            params = held_tree(config.model, params, "bfloat16")
        batch = Batch(np.zeros((SIZE, 9), np.int32))
        y, residual = functions.forward(params, None, batch)
        compiled = functions.backward.lower(params, residual, y, functions.zeros()).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    layer_bytes = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 256)
    assert temporary_bytes("lora:2") - temporary_bytes("") < layer_bytes


@pytest.mark.parametrize(
    ("adapter", "line"),
    [
        ("lora:0", "model.adapter: got 'lora:0', expected nothing, lora:RANK or lora:RANK:NAME,..."),
        ("lora:4:qq", "model.adapter: got the target 'qq'.*, expected some of down, gate, k, kernel, o, q, up, v"),
        ("dora:4", "model.adapter: got 'dora:4', expected nothing"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(adapter, line):
    with pytest.raises(BadInput, match=line):
        _ = run_config.parse(dict(model=MODELS["llama"] | dict(adapter=adapter))).model.facts
