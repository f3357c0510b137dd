"""The codecs' arithmetic: error bounds, blocks, what is not finite, and that bytes are as counted."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdt.codec import base as codec
from jaxdt.codec.int8 import SMALLEST_ABSMAX
from jaxdt.codec.int8_dynamic import DYNAMIC_VALUES
from jaxdt.run.codec import parse, wire_bytes

SIXTY = settings(max_examples=60)
LINEAR, DYNAMIC = parse("int8:16"), parse("int8-dynamic:16")
WIDEST_GAP = float(np.max(np.diff(DYNAMIC_VALUES)))
# Two blocks of 16 and a partial one; one shape, so that each codec is compiled once.
N = 37
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
TENSORS = st.lists(FLOATS, min_size=N, max_size=N).map(lambda xs: np.array(xs, np.float32))


def there_and_back(spec, x, dtype=jnp.float32):
    wire = np.asarray(codec.encode(spec, x))
    assert wire.nbytes == wire_bytes(spec, x.size, x.dtype.itemsize)
    assert codec.wire_leaf(spec, x.shape, x.dtype) == (wire.dtype, wire.shape)
    return np.asarray(codec.decode(spec, wire, x.shape, dtype))


def absmax_of_each(x, block):
    return np.concatenate(
        [np.full(len(x[i : i + block]), np.max(np.abs(x[i : i + block]))) for i in range(0, len(x), block)]
    )


def codes(spec, x):
    return np.asarray(codec.encode(spec, x))[: x.size]


# -------------------------------------------------------------------------------------------------------- properties


@SIXTY
@given(TENSORS)
def test_linear_error_is_at_most_half_a_step(x):
    bound = np.maximum(absmax_of_each(x, 16) / 254, SMALLEST_ABSMAX)
    assert np.all(np.abs(there_and_back(LINEAR, x) - x) <= bound * (1 + 1e-4))


@SIXTY
@given(TENSORS)
def test_dynamic_error_is_at_most_half_the_widest_gap(x):
    """One gap counts whole: below -0.993 there is no value, so -absmax itself is off by 0.007."""
    outside = 1 + float(DYNAMIC_VALUES[0])
    bound = max(WIDEST_GAP / 2, outside) * absmax_of_each(x, 16)
    assert np.all(np.abs(there_and_back(DYNAMIC, x) - x) <= bound * (1 + 1e-5))


@SIXTY
@given(TENSORS)
def test_linear_codes_survive_decoding(x):
    np.testing.assert_array_equal(codes(LINEAR, there_and_back(LINEAR, x)), codes(LINEAR, x))


@SIXTY
@given(TENSORS)
def test_linear_map_is_symmetric_and_dynamic_is_not(x):
    np.testing.assert_array_equal(there_and_back(LINEAR, -x), -there_and_back(LINEAR, x))
    ones = np.ones(N, np.float32)
    assert there_and_back(DYNAMIC, ones)[0] == 1.0
    assert there_and_back(DYNAMIC, -ones)[0] == DYNAMIC_VALUES[0]


@pytest.mark.parametrize("spec", [LINEAR, DYNAMIC], ids=str)
@SIXTY
@given(x=TENSORS, y=TENSORS, seed=st.integers(0, 99))
def test_blocks_are_independent_and_order_inside_one_does_not_matter(spec, x, y, seed):
    z = np.concatenate([x[:16], y[16:]])
    np.testing.assert_array_equal(there_and_back(spec, z)[:16], there_and_back(spec, x)[:16])
    np.testing.assert_array_equal(there_and_back(spec, z)[16:], there_and_back(spec, y)[16:])
    order = np.concatenate([np.random.default_rng(seed).permutation(16), np.arange(16, N)])
    np.testing.assert_array_equal(there_and_back(spec, x[order]), there_and_back(spec, x)[order])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("name", ["int8", "int8-dynamic:256", "int8:100", "int8:1024"])
def test_a_block_with_a_number_that_is_not_finite_decodes_to_nan(name, bad):
    """At every place of a block in turn, since a vectorised reduction may lose it at some."""
    spec = parse(name)
    k = spec.block
    blocks = np.random.default_rng(0).standard_normal((2 * k, k), np.float32)
    blocks[np.arange(k) * 2, np.arange(k)] = bad
    got = there_and_back(spec, blocks.reshape(-1)).reshape(2 * k, k)
    assert np.all(np.isnan(got[::2]))
    assert np.all(np.isfinite(got[1::2]))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("spec", [LINEAR, DYNAMIC, parse("int8")], ids=str)
def test_also_in_a_partial_block_and_in_a_tensor_smaller_than_one(spec, bad):
    for at in (N - 5, N - 1):
        x = np.ones(N, np.float32)
        x[at] = bad
        first = N - N % spec.block if spec.block < N else 0
        got = there_and_back(spec, x)
        assert np.all(np.isnan(got[first:])) and np.all(np.isfinite(got[:first]))


@pytest.mark.parametrize("spec", [LINEAR, DYNAMIC, parse("int8"), parse("int8-dynamic")], ids=str)
def test_zeros_and_numbers_too_small_to_count_become_zeros(spec):
    assert not np.any(there_and_back(spec, np.zeros(N, np.float32)))
    tiny = np.full(N, 1e-37, np.float32)
    assert np.all(np.abs(there_and_back(spec, tiny)) <= 2e-37)


# ---------------------------------------------------------------------------------------------------- fixed figures


def relative_error(name, x):
    return float(np.linalg.norm(there_and_back(parse(name), x) - x) / np.linalg.norm(x))


def test_errors_on_a_million_numbers():
    """Dettmers et al. 2022 (8-bit Optimizers): the dynamic map is for heavy tails."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(1_000_000, np.float32)
    heavy = rng.standard_t(2, 1_000_000).astype(np.float32)
    assert 0.006 < relative_error("int8", normal) <= 0.0075
    assert 0.009 < relative_error("int8-dynamic:256", normal) <= 0.0115
    assert relative_error("int8-dynamic:256", heavy) <= 0.013
    assert relative_error("int8", heavy) > 1.5 * relative_error("int8-dynamic:256", heavy)
    assert relative_error("bf16", normal) <= 2**-9


def test_the_dynamic_table_is_the_formula():
    expected = {0.0, 1.0}
    for i in range(7):
        for k in range(2**i):
            middle = 10.0 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / 2**i)
            expected |= {middle, -middle}
    assert len(expected) == 256
    np.testing.assert_allclose(DYNAMIC_VALUES, sorted(expected), rtol=1e-7)
    assert (DYNAMIC_VALUES[0], DYNAMIC_VALUES[127], DYNAMIC_VALUES[255]) == (np.float32(-0.99296875), 0.0, 1.0)


def test_dynamic_codes_are_the_nearest_values_exactly():
    """Against every value in float64: numbers of all sizes, and the neighbours of every half-way point."""
    middles = (DYNAMIC_VALUES[:-1].astype(np.float64) + DYNAMIC_VALUES[1:]) / 2
    near = middles.astype(np.float32)
    steps = [near, np.nextafter(near, np.float32(2)), np.nextafter(near, np.float32(-2))]
    sizes = (10.0 ** np.random.default_rng(1).uniform(-8, 0, 3000)).astype(np.float32)
    x = np.concatenate([*steps, sizes, -sizes, [1.0]]).astype(np.float32)  # absmax 1: a code is of x itself
    distance = np.abs(x.astype(np.float64)[:, None] - DYNAMIC_VALUES.astype(np.float64))
    got = codes(parse(f"int8-dynamic:{x.size}"), x)
    np.testing.assert_array_equal(distance[np.arange(x.size), got], distance.min(axis=1))


def test_tensors_keep_their_shape_and_dtype():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 5, 7)), jnp.bfloat16)
    for name in ("none", "bf16", "int8", "int8-dynamic"):
        y = there_and_back(parse(name), x, jnp.bfloat16)
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        np.testing.assert_allclose(y.astype(np.float32), np.asarray(x, np.float32), atol=0.03)
    np.testing.assert_array_equal(there_and_back(parse("bf16"), x, jnp.bfloat16), x)


def test_error_feedback_sends_later_what_was_lost():
    """A constant below half a step is never sent without feedback; with it, the mean of what arrives is right."""
    x = np.array([1.0] + [0.003] * 15, np.float32)
    error, total = jnp.zeros(16), np.zeros(16)
    for _ in range(100):
        wire, error = codec.encode_with_feedback(LINEAR, x, error)
        total += np.asarray(codec.decode(LINEAR, wire, x.shape, jnp.float32))
    assert there_and_back(LINEAR, x)[5] == 0.0
    np.testing.assert_allclose(total / 100, x, atol=1 / 254 / 50)
    wire, error = codec.encode_with_feedback(LINEAR, x * np.float32(np.nan), error)
    assert np.all(np.isnan(codec.decode(LINEAR, wire, x.shape, jnp.float32))) and not np.any(error)
