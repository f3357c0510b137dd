"""What a compute thread installs is what was sent: for a worker that is slower than a step, and for any other peer."""

from queue import SimpleQueue
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_equivalence import Tokens

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import config as run_config
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.process import compute
from jaxdt.runtime.storage.state_vector import StateVector
from jaxdt.runtime.storage.store import Store, stage_functions

CONFIG = run_config.parse(
    dict(
        model=dict(preset="debug", n_layers=2, d_model=8, n_heads=2, d_ff=8, max_len=4, vocab_size=16),
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
    keys = [ev.StateKey(version, lo, hi) for lo, hi in zip(ends, ends[1:], strict=False)]
    return [(key, StateVector(state).slice_with_checksum(numbers, key.lo, key.hi)) for key in keys]


def put(store, arrivals):
    for key, words in arrivals:
        store.put(ev.State(key), SERVER, words)


def numbers_of(store):
    return {float(number) for leaf in jax.tree.leaves(store.parameter_versions.params) for number in np.unique(leaf)}


@pytest.mark.parametrize("peer", [WORKER, SERVER])
@pytest.mark.parametrize("n_early", [0, 1, 3])
def test_slices_of_the_next_version_change_nothing_of_the_one_that_waits(functions, peer, n_early):
    store = Store(CONFIG, PLAN, peer, Tokens(), functions)
    put(store, slices(store, 1))
    following = slices(store, 2)
    put(store, following[:n_early])
    assert store.install(ev.Install(1, 0)) == ev.Installed(1)
    assert numbers_of(store) == {1.0}
    put(store, following[n_early:])
    assert store.install(ev.Install(2, 0)) == ev.Installed(2)
    assert numbers_of(store) == {2.0}


def test_a_state_that_is_not_what_was_sent_is_refused_in_one_line_and_changes_nothing(functions):
    store = Store(CONFIG, PLAN, WORKER, Tokens(), functions)
    put(store, slices(store, 1))
    assert store.install(ev.Install(1, 0)) == ev.Installed(1)
    arrivals = slices(store, 2)
    put(store, arrivals)
    key, words = arrivals[1]
    words[3] += 1  # somebody writes into memory that was handed over
    answer = store.install(ev.Install(2, 0))
    assert isinstance(answer, ev.NotInstalled) and answer.version == 2 and "\n" not in answer.reason
    assert f"words {key.lo}..{key.hi} of the state of 2 steps: checksum" in answer.reason
    assert store.parameter_versions.version == 1 and numbers_of(store) == {1.0}
    put(store, slices(store, 2))
    assert store.install(ev.Install(2, 0)) == ev.Installed(2)
    assert numbers_of(store) == {2.0}


@pytest.fixture
def last_stage():
    """A server of the last stage, whose backward needs only the input that comes over a link; and that input."""
    store = Store(CONFIG, PLAN, 1, Tokens(), stage_functions(CONFIG, PLAN, 1))
    key = ev.Key("act", 0, 1, 0)
    dtype, shape = store.boundary_codec.wire_leaf(key, False)
    return store, ev.Boundary(key), np.zeros(shape, dtype)


BACKWARD_OF_0 = Work(1, WorkKind.BACKWARD, 0, 1, 0)


def test_work_of_a_step_that_was_given_up_while_it_waited_computes_nothing(last_stage):
    """As at a server that was evicted: its process goes on, and comes back."""
    store, boundary, tensor = last_stage
    store.put(boundary, SERVER, tensor)
    store.free(0, ())
    assert store.run(BACKWARD_OF_0, 1.0) == {} and not store._accumulators


def test_a_contribution_that_became_void_while_its_work_waited_is_not_added(last_stage):
    store, *_ = last_stage
    round = RoundId(RoundKind.CONTRIBUTION, 1, 0, peer=WORKER, view=1, attempt=1)
    store.forget(round)
    assert store.run(Work(1, WorkKind.CONTRIBUTE, None, 1, 0), 0.0, (round,)) == {} and not store._accumulators
    store.restore(ev.Restore(0, 0, in_place=True))
    with pytest.raises(KeyError):
        store.run(BACKWARD_OF_0, 1.0)  # requested after that: it must have its input


def test_what_work_leaves_of_a_step_that_was_given_up_while_it_ran_is_dropped_after_it(last_stage):
    """Else the peer would count the microbatch if it came back in the same step."""
    store, boundary, tensor = last_stage
    store.put(boundary, SERVER, tensor)
    work = SimpleQueue()
    loop = SimpleNamespace(tensors=store, work=work, post=lambda event: None)
    for action in (ev.Run(BACKWARD_OF_0), ev.Free(0), None):
        work.put(action)
    compute(loop, lambda: ev.Installed(0))
    assert not store._accumulators
