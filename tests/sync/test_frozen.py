"""Leaves that are not trained: they keep their bits, and are a part of no state, checkpoint or exchange."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
import test_equivalence as equivalence
import test_group_replay as groups_test
import test_server as server_test
from test_equivalence import functions_of, one_process  # noqa: F401

from jaxdt.build import check
from jaxdt.model.vectors import trained
from jaxdt.protocol.reports import StateMeanReport
from jaxdt.run import config as run_config
from jaxdt.run import sizes
from jaxdt.run.errors import BadInput
from jaxdt.run.memory import state_bytes, update_bytes
from jaxdt.run.model import options_of
from jaxdt.run.model_facts import TWO_MOMENTS
from jaxdt.runtime.storage.entries import join_entries, split_entries
from jaxdt.runtime.storage.store import stage_functions
from jaxdt.sim.arrivals import state_words
from planner.model import layer_cuts

pytestmark = pytest.mark.xdist_group("stage_functions")

WIDTH, VOCAB_SIZE = 16, 64
BLOCK = 12 * WIDTH * WIDTH + 9 * WIDTH  # numbers of a block; 3 WIDTH^2 of these are of qkv


@functools.cache
def own_model(*frozen):
    text = ", ".join(f'"{part}"' for part in frozen)
    options = f'{{"width": {WIDTH}, "heads": 2, "layers": 2, "frozen": [{text}]}}'
    return options_of(family="configs.custom_model.own_nnx:build", max_len=8, vocab_size=VOCAB_SIZE, options=options)


def frozen_leaves(params, of=np.asarray):
    """The leaves of parameters that are not trained, by name."""
    found = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        if "embed/" in name or "/qkv/" in name:
            found[name] = of(leaf)
    return found


def without_frozen(model, state):
    """What a peer holds as its state, of that of a replay, which has all parameters."""
    params, own = jax.device_get(state)
    return trained(model, params), own


def config_of(base, model):
    return replace(base, model=model)


def test_forecasts_count_trained_numbers_only():
    model = own_model("embed/", "/qkv/")
    facts, qkv = model.facts, 3 * WIDTH * WIDTH
    first, last = BLOCK + VOCAB_SIZE * WIDTH, BLOCK + VOCAB_SIZE * WIDTH + 2 * WIDTH
    assert [facts.stage_params(0, 1), facts.stage_params(1, 2)] == [first, last]
    trained = [BLOCK - qkv, BLOCK - qkv + 2 * WIDTH]
    assert [facts.stage_trained(0, 1), facts.stage_trained(1, 2)] == trained
    config = config_of(groups_test.make_config(None), model)
    plan = run_config.default_plan(config)
    assert [group.n_elements for group in sizes.sync_groups(config, plan)] == trained  # none for the frozen table
    assert [sizes.replica_elements(config, lo, hi) for lo, hi in plan.stages] == trained
    assert sizes.exchanged_elements(config, 0, 1, 0) == trained[0] and sizes.shared_table_elements(config, plan) == 0
    assert facts.state_numbers(0, 1, TWO_MOMENTS) == 3 * trained[0]  # which doctor.py forecasts of a checkpoint
    assert state_bytes(model, 0, 1) == 4 * (first + 3 * trained[0])
    assert update_bytes(model, 1, 2) == 16 * trained[1]
    assert [state_words(config, plan, stage) for stage in (0, 1)] == [3 * n for n in trained]


def test_frozen_leaves_keep_their_bits_and_the_others_train(functions_of, one_process):  # noqa: F811
    """Two stages by two pipelines train as one process does, in which the frozen leaves are held by hand."""
    model = own_model("embed/", "/qkv/")
    config = replace(equivalence.make_config(2, 2, remat="dots", layers="1,1"), model=model)
    plan = run_config.default_plan(config)
    losses, _, params, _ = equivalence.train_in_pieces(config, functions_of, plan)
    expected_losses, _, expected = one_process(config)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert equivalence.relative_l2(params, expected) < 1e-4 and losses[-1] < losses[0]
    begun = {}
    for stage, (lo, hi) in enumerate(plan.stages):
        functions = functions_of(config, plan, stage)
        fresh = functions.init(equivalence.SEED)
        begun |= fresh
        vectors = functions.gradient_vectors(functions.zeros())
        n_trained = model.facts.stage_trained(lo, hi)
        assert {name: len(vector) for name, vector in vectors.items()} == {"stage": n_trained} == functions.group_sizes
        moments = [leaf for leaf in jax.tree.leaves(functions.init_optimizer(fresh)) if leaf.ndim]
        assert sum(leaf.size for leaf in moments) == 2 * n_trained
        updated, _ = functions.update(fresh, functions.init_optimizer(fresh), vectors, np.float32(1))
        where = [frozen_leaves(tree, lambda leaf: leaf.unsafe_buffer_pointer()) for tree in (fresh, updated)]
        assert where[0] == where[1]  # an update takes no memory for them
    held = frozen_leaves(begun)
    assert len(held) == 3
    jax.tree.map(np.testing.assert_array_equal, held, frozen_leaves(params))
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), begun, params)
    assert sum(jax.tree.leaves(changed)) == len(jax.tree.leaves(params)) - len(held)


def test_a_checkpoint_has_no_frozen_leaves():
    model = own_model("embed/", "/qkv/")
    config = config_of(groups_test.make_config(), model)
    functions = stage_functions(config, run_config.default_plan(config), 0)
    params = functions.init(0)
    state = trained(model, params), functions.init_optimizer(params)
    entries = split_entries(state)
    assert entries.keys() == {"block_000"} < params.keys()
    assert sum(leaf.size for leaf in jax.tree.leaves(entries["block_000"]["params"])) == BLOCK - 3 * WIDTH * WIDTH
    jax.tree.map(np.testing.assert_array_equal, state, join_entries(entries, state))


@pytest.fixture
def with_own_functions(monkeypatch):
    """The tests of replicas that may differ, with the stage functions of any model."""
    made = {}

    def functions_for(config, stage):
        key = config.model, config.sync.kind, stage
        if key not in made:
            made[key] = stage_functions(config, run_config.default_plan(config), stage)
        return made[key]

    for module in (groups_test, server_test):
        monkeypatch.setattr(module, "functions_for", functions_for)


@pytest.mark.parametrize(
    "groups", [dict(every_steps=2, outer="nesterov"), dict(every_steps=1, average_moments=True, codec="bf16")]
)
def test_groups_average_trained_leaves_only(groups, with_own_functions):
    """Each replica equals the replay of the log, and so does the mean that the run writes."""
    config = config_of(groups_test.make_config("all", 3, steps=4, **groups), own_model("embed/", "/qkv/"))
    check(config, run_config.default_plan(config))
    outcome, states = groups_test.simulated(config)
    replay = groups_test.replayed(config, outcome, StateMeanReport)
    plan = run_config.default_plan(config)
    assert not any(frozen_leaves(state[0]) for state in states.values())
    means = list(outcome.of(StateMeanReport))
    assert means
    for report in means:
        mean = without_frozen(config.model, replay.mean_state(report))
        for peer in plan.placement[report.stage]:
            groups_test.assert_equal_bits(states[peer], mean)


def test_servers_hold_trained_leaves_that_workers_push(with_own_functions):
    config = config_of(server_test.make_config(staleness=1, steps=4), own_model("embed/", "/qkv/"))
    plan = run_config.default_plan(config)
    outcome, states = server_test.trained(config)
    replay = server_test.replayed(config, outcome)
    for stage, row in enumerate(plan.placement):
        result = without_frozen(config.model, server_test.result_of(replay, stage))
        jax.tree.map(np.testing.assert_array_equal, states[min(row)], result)


def test_a_stage_without_anything_to_train_is_refused():
    config = config_of(groups_test.make_config(None), own_model("block_000/", "embed/"))
    with pytest.raises(BadInput, match=r"plan.stages\[0\]: layers 0..0 have nothing of their own that is trained, exp"):
        check(config, run_config.default_plan(config))


def test_the_planner_leaves_each_stage_something_to_train():
    """Even parameters would be cut behind the first block of two, which is frozen as the embedding is."""
    model = own_model("block_000/", "embed/")
    with pytest.raises(BadInput, match=r"^--stages: found no cut into 2 stages in which each has a trained leaf"):
        layer_cuts.split_trained(model.facts, 2)
    longer = options_of(**four_blocks())
    assert layer_cuts.split_trained(longer.facts, 2) == ((0, 3), (3, 4))
    assert [longer.facts.may_be_stage(0, hi) for hi in range(1, 5)] == [False, False, True, True]


def four_blocks():
    options = f'{{"width": {WIDTH}, "heads": 2, "layers": 4, "frozen": ["block_000/", "block_001/", "embed/"]}}'
    family = "configs.custom_model.own_nnx:build"
    return dict(family=family, max_len=8, vocab_size=VOCAB_SIZE, options=options)
