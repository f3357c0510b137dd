"""The digest of a state, and the sums from which the norm of a difference is estimated."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdt.runtime.storage import state_vector
from jaxdt.runtime.storage.state_vector import digest, norm_and_sums


def tree(seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {
        "a": (scale * rng.standard_normal((37, 53))).astype(np.float32),
        "b": (scale * rng.standard_normal(1000)).astype(np.float32),
        "c": jnp.float32(scale),
    }


def test_equal_bits_have_equal_digests_and_any_other_bit_shows():
    first = tree()
    assert digest(first) == digest({name: jnp.asarray(leaf) for name, leaf in first.items()}) < 1 << 64
    for name, leaf in first.items():
        changed = np.array(leaf).reshape(-1)
        changed[-1] = np.nextafter(changed[-1], np.float32(9))
        assert digest(first | {name: changed.reshape(np.shape(leaf))}) != digest(first)
    assert digest(first | {"c": jnp.int32(1)}) != digest(first | {"c": jnp.int32(2)})


def test_the_norm_is_that_of_all_numbers(monkeypatch):
    """Whatever the size of a chunk."""
    numbers = np.concatenate([np.ravel(leaf) for leaf in tree().values()]).astype(np.float64)
    norm, sums = norm_and_sums(tree())
    assert norm == pytest.approx(np.linalg.norm(numbers)) and len(sums) == state_vector.N_SUMS
    monkeypatch.setattr(state_vector, "CHUNK_NUMBERS", 2 * state_vector.N_SUMS)
    assert norm_and_sums(tree())[0] == pytest.approx(norm)


@pytest.mark.parametrize("share", [1e-6, 1e-2, 1.0])
def test_the_sums_tell_how_far_two_states_are_apart(share):
    """Independent of the size of the difference; a state of another seed is one norm and more away."""
    first, other = tree(), tree(seed=1)
    moved = {name: leaf + share * other[name] for name, leaf in first.items()}
    norm, sums = norm_and_sums(first)
    estimate = math.dist(sums, norm_and_sums(moved)[1]) / norm
    assert estimate == pytest.approx(share, rel=0.4)


def test_a_difference_that_all_numbers_share_is_not_overrated():
    """Norms of layers are vectors of ones: without signs these would add up."""
    ones = {f"{n:02}": np.ones(32, np.float32) for n in range(64)}
    norm, sums = norm_and_sums(ones)
    longer = norm_and_sums({name: leaf * np.float32(1.01) for name, leaf in ones.items()})[1]
    assert math.dist(sums, longer) / norm == pytest.approx(0.01, rel=0.4)
