"""What a compute thread installs is what was sent: for a worker that is slower than a step, and for any other peer."""

import jax
import numpy as np
import pytest
from test_equivalence import Tokens

from jaxdt.protocol.events import Install, Installed, NotInstalled, State, StateKey
from jaxdt.runtime.storage.state_vector import StateVector
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.spec import config as run_config

CONFIG = run_config.parse(
    dict(
        model=dict(preset="debug", n_layers=2, d_model=8, n_heads=2, d_ff=8, seq_len=4, vocab_size=16),
        plan=dict(stages=2, pipelines=1, workers=1, microbatches=2),
        wiring=dict(kind="pool"),
    )
)
PLAN = run_config.default_plan(CONFIG)
SERVER, WORKER = 0, 2


@pytest.fixture(scope="module")
def functions():
    return stage_functions(CONFIG, PLAN, 0)


def slices(store, version):
    """(key, words with their checksum) of a state whose numbers are all those of `version`, in three slices."""
    state = store.parameter_versions.state[: 1 if store._is_worker else None]
    numbers = jax.tree.map(lambda leaf: np.full(leaf.shape, version, leaf.dtype), state)
    ends = [0, store.n_words // 3, store.n_words // 2, store.n_words]
    keys = [StateKey(version, lo, hi) for lo, hi in zip(ends, ends[1:], strict=False)]
    return [(key, StateVector(state).slice_with_checksum(numbers, key.lo, key.hi)) for key in keys]


def put(store, arrivals):
    for key, words in arrivals:
        store.put(State(key), SERVER, words)


def numbers_of(store):
    return {float(number) for leaf in jax.tree.leaves(store.parameter_versions.params) for number in np.unique(leaf)}


@pytest.mark.parametrize("peer", [WORKER, SERVER])
@pytest.mark.parametrize("n_early", [0, 1, 3])
def test_slices_of_the_next_version_change_nothing_of_the_one_that_waits(functions, peer, n_early):
    store = Store(CONFIG, PLAN, peer, Tokens(), functions)
    put(store, slices(store, 1))
    following = slices(store, 2)
    put(store, following[:n_early])
    assert store.install(Install(1, 0)) == Installed(1)
    assert numbers_of(store) == {1.0}
    put(store, following[n_early:])
    assert store.install(Install(2, 0)) == Installed(2)
    assert numbers_of(store) == {2.0}


def test_a_state_that_is_not_what_was_sent_is_refused_in_one_line_and_changes_nothing(functions):
    store = Store(CONFIG, PLAN, WORKER, Tokens(), functions)
    put(store, slices(store, 1))
    assert store.install(Install(1, 0)) == Installed(1)
    arrivals = slices(store, 2)
    put(store, arrivals)
    key, words = arrivals[1]
    words[3] += 1  # somebody writes into memory that was handed over
    answer = store.install(Install(2, 0))
    assert isinstance(answer, NotInstalled) and answer.version == 2 and "\n" not in answer.reason
    assert f"words {key.lo}..{key.hi} of the state of 2 steps: checksum" in answer.reason
    assert store.parameter_versions.version == 1 and numbers_of(store) == {1.0}
    put(store, slices(store, 2))
    assert store.install(Install(2, 0)) == Installed(2)
    assert numbers_of(store) == {2.0}
