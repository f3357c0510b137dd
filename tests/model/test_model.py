import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_models import CONFIGS, logits

from jaxdt.model import kernels
from jaxdt.model.base import apply_stage, init_stage, stage_entries
from jaxdt.model.sample import assemble, generate
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig

ONE_OF_EACH_FAMILY = ["shared_maxout", "qwen3", "mixtral"]


def tokens(config, n_samples=2, seed=0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (n_samples, config.max_len), dtype=np.int32)


@partial(jax.jit, static_argnums=0)
def run(config, params, tokens_BT):
    return apply_stage(config, 0, config.n_layers, jnp.float32, params, tokens_BT)


def moved(params, seed=9):
    """Parameters away from their start, so that biases and LayerNorms take part."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [leaf + rng.normal(0, 0.1, leaf.shape).astype(np.float32) for leaf in leaves])


def n_numbers(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


# Of the others tests/model/test_stage.py and tests/test_equivalence.py compare the losses and the gradients.
@pytest.mark.parametrize("name", ["tied", "llama3", "biased", "one_expert"])
def test_logits_equal_the_reference(name):
    config = CONFIGS[name]
    params, tokens_BT = moved(init_stage(config, 0, config.n_layers, 0)), tokens(config)
    np.testing.assert_allclose(run(config, params, tokens_BT), logits(config, params, tokens_BT), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["tied", "biased"])
def test_a_token_changes_no_earlier_logits(name):
    config = CONFIGS[name]
    params, before = moved(init_stage(config, 0, config.n_layers, 0)), tokens(config)
    after = before.copy()
    after[:, 3] = (after[:, 3] + 1) % config.vocab_size
    same = np.asarray(run(config, params, before) == run(config, params, after)).all(axis=(0, 2))
    assert list(same) == [True, True, True, False, False, False]


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_init_does_not_depend_on_the_split(name):
    config = CONFIGS[name]
    whole = init_stage(config, 0, config.n_layers, seed=5)
    for cuts in ([0, 2, 4],) if config.n_layers == 4 else ([0, 2, 3], [0, 1, 2, 3]):  # of shared blocks
        for lo, hi in zip(cuts, cuts[1:], strict=False):
            stage = init_stage(config, lo, hi, seed=5)
            assert sorted(stage) == stage_entries(config, lo, hi)
            jax.tree.map(np.testing.assert_array_equal, stage, {entry: whole[entry] for entry in stage})


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_init_has_as_many_numbers_as_the_config_says(name):
    config = CONFIGS[name]
    for lo, hi in ((0, config.n_layers), (0, 2), (2, config.n_layers)):
        assert n_numbers(init_stage(config, lo, hi, 0)) == config.facts.stage_params(lo, hi)


def test_init_draws_every_block_anew_and_from_the_seed():
    config = CONFIGS["plain"]
    a, b = init_stage(config, 0, 3, 0), init_stage(config, 0, 3, 1)
    kernel = np.asarray(a["block_000"]["qkv"]["kernel"])
    assert not np.array_equal(kernel, a["block_001"]["qkv"]["kernel"])
    assert not np.array_equal(kernel, b["block_000"]["qkv"]["kernel"])
    assert not np.any(a["block_000"]["qkv"]["bias"])
    assert np.std(kernel) == pytest.approx(0.02, rel=0.1)
    assert np.std(a["block_000"]["down"]["kernel"]) == pytest.approx(0.02 / 6**0.5, rel=0.15)


@pytest.mark.parametrize(
    "name, lo, hi, said",
    [
        ("plain", 2, 2, "got 2..2"),
        ("plain", 0, 4, "n_layers 3"),
        ("plain", -1, 2, "got -1..2"),
        ("shared", 0, 3, "a cut at 3"),
        ("shared", 1, 4, "expected one of 0, 2, 4"),
    ],
)
def test_a_wrong_range_is_refused(name, lo, hi, said):
    with pytest.raises(BadInput, match=said):
        CONFIGS[name].facts.check_range(lo, hi)


def plain_layer_norm(x, scale, bias):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centred / jnp.sqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-5)
    return normed * scale[None, None] + bias[None, None]


def plain_rms_norm(x, scale):
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-3) * scale[None, None]


def plain_causal_softmax(scores, window=100):
    ahead = np.arange(scores.shape[-2])[:, None] - np.arange(scores.shape[-1])[None]
    hidden = (ahead < 0) | (ahead >= window)
    return jax.nn.softmax(jnp.where(hidden[None, None], -jnp.inf, scores), axis=-1)


@partial(jax.jit, static_argnums=0)
def value_and_pulled(function, args, g):
    y, pullback = jax.vjp(function, *args)
    return y, pullback(g.astype(y.dtype))


SIZES = np.array([3, 0, 4, 1], np.int32)  # of groups of 8 rows
LARGE = np.array([40, 1, 0, 100, 67], np.int32)  # two groups fill several blocks, and one block has several groups
ORDER = np.array([3, 1, 4, 0, 2])


def plain_grouped_product(sizes):
    groups = np.repeat(np.arange(len(sizes)), sizes)
    return lambda x, w: jnp.einsum("rd,rdf->rf", x, w[groups].astype(x.dtype))


KERNELS = {
    "product": (kernels.product, jnp.matmul, [(2, 3, 8), (8, 8)]),
    "layer_norm": (kernels.layer_norm, plain_layer_norm, [(2, 3, 8), (8,), (8,)]),
    "rms_norm": (lambda *args: kernels.rms_norm(*args, 1e-3), plain_rms_norm, [(2, 3, 8), (8,)]),
    "grouped_product": (
        lambda x, w: kernels.grouped_product(x, w, SIZES),
        plain_grouped_product(SIZES),
        [(8, 6), (4, 6, 6)],
    ),
    "grouped_product_in_blocks": (
        lambda x, w: kernels.grouped_product(x, w, LARGE),
        plain_grouped_product(LARGE),
        [(208, 6), (5, 6, 6)],
    ),
    "permuted": (
        lambda x: kernels.permuted(x, ORDER, np.argsort(ORDER)),
        lambda x: x[ORDER],
        [(5, 3)],
    ),
    "swiglu": (kernels.swiglu, lambda gate, value: jax.nn.silu(gate) * value, [(2, 3, 8), (2, 3, 8)]),
    "gelu": (kernels.gelu, lambda x: jax.nn.gelu(x, approximate=True), [(2, 3, 8)]),
    "causal_softmax": (kernels.causal_softmax, plain_causal_softmax, [(2, 3, 5, 5)]),
    "window": (lambda s: kernels.causal_softmax(s, 2), lambda s: plain_causal_softmax(s, 2), [(2, 3, 5, 5)]),
    "long_window": (lambda s: kernels.causal_softmax(s, 5), plain_causal_softmax, [(2, 3, 5, 5)]),
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_equal_plain_jax(name):
    kernel, plain, shapes = KERNELS[name]
    rng = np.random.default_rng(0)
    args = [jnp.asarray(2 * rng.normal(size=shape), jnp.float32) for shape in shapes]
    g = jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)
    (y, gradients), (y_plain, gradients_plain) = (value_and_pulled(f, args, g) for f in (kernel, plain))
    np.testing.assert_allclose(y, y_plain, rtol=1e-5, atol=1e-6)
    for gx, gx_plain in zip(gradients, gradients_plain, strict=True):
        np.testing.assert_allclose(gx, gx_plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_keep_bfloat16(name):
    kernel, plain, shapes = KERNELS[name]
    first, *rest = (jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32) for shape in shapes)
    y, gradients = value_and_pulled(kernel, (first.astype(jnp.bfloat16), *rest), jnp.ones_like(first))
    assert [y.dtype, gradients[0].dtype] == [jnp.bfloat16] * 2
    assert [gradient.dtype for gradient in gradients[1:]] == [argument.dtype for argument in rest]
    np.testing.assert_allclose(y.astype(jnp.float32), plain(first, *rest), rtol=0.05, atol=0.05)


def test_stages_of_any_split_assemble():
    config = CONFIGS["tied"]
    stages = [init_stage(config, lo, hi, 3) for lo, hi in ((2, 3), (0, 1), (1, 2))]
    jax.tree.map(np.testing.assert_array_equal, assemble(config, stages), init_stage(config, 0, 3, 3))


@pytest.mark.parametrize("drop, said", [("head", "missing .'head'"), ("block_002", "missing .'block_002'")])
def test_an_incomplete_model_does_not_assemble(drop, said):
    params = init_stage(CONFIGS["plain"], 0, 3, 0)
    del params[drop]
    with pytest.raises(BadInput, match=said):
        assemble(CONFIGS["plain"], [params])


def test_greedy_text_is_the_models_argmax_also_past_the_window():
    config = CONFIGS["plain"]
    params, prompt = moved(init_stage(config, 0, 3, 0)), [3, 1]
    expected = list(prompt)
    for _ in range(8):
        seen = np.array([expected[-config.max_len :]], np.int32)
        padded = np.pad(seen, ((0, 0), (0, config.max_len - seen.shape[1])))
        expected.append(int(jnp.argmax(run(config, params, padded)[0, seen.shape[1] - 1])))
    assert generate(config, params, prompt, 8, temperature=0.0, seed=0) == expected[2:]


def test_drawn_text_depends_on_the_seed_only():
    config = CONFIGS["plain"]
    params = init_stage(config, 0, 3, 0)
    one, again, other = (generate(config, params, np.array([0]), 12, 1.0, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert all(0 <= token < config.vocab_size for token in one)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_with_which_a_vocabulary_is_padded_are_not_drawn(temperature):
    config = CONFIGS["plain"]
    padded = replace(config, vocab_size=config.vocab_size + 5)
    params = init_stage(padded, 0, 3, 0)
    params["head"]["out"] = params["head"]["out"].at[:, config.vocab_size :].multiply(100.0)
    params["head"]["ln"]["bias"] = params["head"]["out"][:, -1]  # the last one is the likeliest by far
    assert generate(padded, params, [0], 3, temperature, 0) == [config.vocab_size + 4] * 3
    drawn = generate(padded, params, [0], 3, temperature, 0, vocab_size=config.vocab_size)
    assert len(drawn) == 3 and max(drawn) < config.vocab_size
    with pytest.raises(BadInput, match=f"below {config.vocab_size}"):
        generate(padded, params, [config.vocab_size], 1, temperature, 0, vocab_size=config.vocab_size)


@pytest.mark.parametrize(
    "prompt, temperature, seed, said",
    [
        ([], 1.0, 0, "prompt: got"),
        ([19], 1.0, 0, "below 19"),
        ([0], -1.0, 0, "temperature: got -1.0"),
        ([0], math.nan, 0, "temperature: got nan"),
        ([0], math.inf, 0, "temperature: got inf"),
        ([0], 1.0, 10**23, "seed: got 1000"),
        ([0], 1.0, -(10**23), "seed: got -1000"),
    ],
)
def test_a_wrong_request_for_text_is_refused(prompt, temperature, seed, said):
    config = CONFIGS["plain"]
    with pytest.raises(BadInput, match=said):
        generate(config, init_stage(config, 0, 3, 0), prompt, 1, temperature, seed)


def test_depth_does_not_multiply_the_work_of_a_layer():
    """XLA on CPU copies cheap producers into their readers, which has doubled the time of deep stages."""

    def n_multiplies(n_layers):
        config = GPTConfig(n_layers, d_model=32, n_heads=2, d_ff=64, max_len=16, vocab_size=16)
        params = jax.eval_shape(lambda: init_stage(config, 0, n_layers, 0))
        tokens_BT = jax.ShapeDtypeStruct((2, 16), jnp.int32)
        gradient = jax.jit(jax.grad(lambda params, x: jnp.sum(run(config, params, x))))
        return gradient.lower(params, tokens_BT).compile().as_text().count(" multiply(")

    few, many = n_multiplies(1), n_multiplies(4)
    # 74 as it is; 287 where LayerNorm, GELU and softmax had no custom_vjp.
    assert 0 < (many - few) / 3 < 150
