"""The training options of SWARM's large run (its Sec. 4.3): LAMB, shared blocks, rotary positions, GeGLU, a tied head,
samples that grow. Each makes a difference, and with all of them together a run trains as one process does."""

import math
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
import test_equivalence as equivalence
from report_fields import report_fields
from test_equivalence import functions_of, one_process  # noqa: F401

from jaxdt.model.base import init_stage
from jaxdt.model.data import write_tokens
from jaxdt.model.optim import optimizer
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.run.errors import BadInput
from jaxdt.run.optim import OptimConfig
from jaxdt.run.seq_lengths import SeqLengths
from jaxdt.runtime.calibrate.stage_times import compile_step
from jaxdt.runtime.storage.entries import split_entries
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.faults import JOIN, Fault

pytestmark = pytest.mark.xdist_group("stage_functions")

LAMB = OptimConfig("lamb", lr=1e-2, eps=1e-6, weight_decay=0.1, clip_norm=0.5, warmup_steps=5)
GROWTH = run_config.DataConfig(seq_start=8, seq_growth_steps=12)
SHARED = dict(n_shared_blocks=2)
ROTARY = dict(positions="rotary", activation="geglu", n_heads=1)
OPTIONS = {
    "lamb": dict(optim=LAMB),
    "growth": dict(data=GROWTH),
    "blocks": dict(model=SHARED | ROTARY | dict(tied_head=True)),
    "all": dict(model=SHARED | ROTARY | dict(tied_head=True), optim=LAMB, data=GROWTH),
}


def config_with(name, pipelines=1, **options):
    """The equivalence tests' config of two stages, each of which has one shared block, as in the paper."""
    change = OPTIONS[name]
    config = equivalence.make_config(2, pipelines, layers="2,2", **options)
    return replace(config, **change | {"model": replace(config.model, **change.get("model", {}))})


@pytest.mark.parametrize("name", ["lamb", "growth", "blocks", "all"])
def test_every_option_makes_a_difference(name, one_process):  # noqa: F811
    """Without this all could agree on ignoring it."""
    config = config_with(name)
    losses, _, _ = one_process(config)
    without, _, _ = one_process(equivalence.make_config(1, 1, head="tied" if config.model.tied_head else "untied"))
    assert not np.allclose(losses, without, rtol=1e-4)
    assert losses[-1] < losses[0]


def test_all_together_with_a_newcomer_in_the_middle_of_the_growth(functions_of, one_process):  # noqa: F811
    """Stochastic wiring, held-out losses, all options: the length follows from the step, also for who was not there."""
    config = config_with("all", 2, eval_every_steps=8, eval_microbatches=5)
    wiring, net = run_config.WiringConfig("swarm", routers=2), run_config.NetConfig(1.0, 4.0)
    config = replace(config, wiring=wiring, net=net)
    outcome = equivalence.assert_same_training(config, functions_of, one_process, faults=[Fault(60.0, JOIN, 0)])
    (joined,) = report_fields(outcome, "download")
    lengths = [config.seq_lengths.at(step) for step in (joined["version"], config.train.steps - 1)]
    assert joined["version"] > 0 and lengths == [GROWTH.seq_start, config.seq_len]


# ----------------------------------------------------------------------------------------------------------- lengths


@pytest.mark.parametrize(
    ("full", "start", "growth_steps", "lengths"),
    [
        (16, 4, 6, [4, 8, 8, 8, 16, 16, 16]),
        (16, 3, 4, [3, 6, 12, 12, 16, 16]),
        (16, 16, 2, [16, 16, 16]),
        (16, 0, 0, [16, 16]),
        (5, 1, 1, [1, 5, 5]),
    ],
)
def test_the_length_of_a_step(full, start, growth_steps, lengths):
    rule = SeqLengths(full, start, growth_steps)
    assert [rule.at(step) for step in range(len(lengths))] == lengths


@pytest.mark.parametrize(("full", "start"), [(2048, 256), (2048, 300), (64, 16), (100, 99), (7, 1)])
def test_few_lengths_read_as_many_tokens_as_a_line_would(full, start):
    n = 12_000
    rule = SeqLengths(full, start, n)
    taken = [rule.at(step) for step in range(n)]
    assert taken == sorted(taken) and set(taken) <= set(rule.rounded)
    assert len(rule.rounded) <= math.ceil(math.log2(full / start)) + 1
    assert np.mean(taken) == pytest.approx((start + full) / 2, rel=1e-3)


def test_the_first_steps_of_each_length():
    rule = SeqLengths(16, 4, 6)
    assert rule.first_steps(0, 20) == [0, 1, 4]
    assert rule.first_steps(2, 20) == [2, 4]
    assert rule.first_steps(0, 4) == [0, 1]
    assert rule.first_steps(20, 20) == []
    assert SeqLengths(16).first_steps(7, 20) == [7]


FOUR = run_config.DataConfig(seq_start=3, seq_growth_steps=12)  # 3, 6, 12 and the full 16


@pytest.fixture
def compiled():
    """Programs that were compiled, counted by the name of the function; jax says so itself."""
    found = Counter()

    def listen(event, duration_s, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            found[about["fun_name"].removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_growth_compiles_few_shapes_and_all_of_them_beforehand(compiled):
    """One per length and stage function, of those that know of a sample's length, and none of these during a run;
    held-out samples have one length."""
    config = equivalence.make_config(2, 1, layers="2,2", eval_every_steps=8, eval_microbatches=5)
    model = replace(config.model, n_layers=2, d_model=8, d_ff=8, n_heads=1)
    config = replace(config, model=model, plan=replace(config.plan, layers="1,1"))
    config = replace(config, data=run_config.DataConfig(seq_start=8, seq_growth_steps=8))
    plan = run_config.default_plan(config)
    made = [stage_functions(config, plan, stage) for stage in (0, 1)]
    for stage, functions in enumerate(made):
        store = Store(config, plan, stage, equivalence.Tokens(), functions)
        for step in config.seq_lengths.first_steps(0, config.train.steps):
            compile_step(store, stage, stage, step)
    work = ("forward_recompute", "backward_recompute", "loss_backward")
    assert [compiled[name] for name in work] == [2, 2, 2]
    compiled.clear()
    equivalence.train_in_pieces(config, lambda config, plan, stage: made[stage], plan)
    assert [compiled[name] for name in work] == [0, 0, 0]
    assert (compiled["evaluate"], compiled["loss_sum"], compiled["update"]) == (1, 1, 2)


def test_boundary_tensors_are_as_long_as_the_samples_of_their_step(functions_of):  # noqa: F811
    config = replace(equivalence.make_config(2, 1), data=FOUR)
    plan = run_config.default_plan(config)
    store = Store(config, plan, 1, equivalence.Tokens(), functions_of(config, plan, 1))
    table = lambda n_tokens: [(np.dtype(np.float32), (equivalence.BATCH, n_tokens, 32))]  # noqa: E731
    for step, n_tokens in ((-1, 3), (0, 3), (2, 6), (11, 16), (12, 16)):
        (buffer,) = store.expect(ev.Boundary(ev.Key("act", step, 1, 0)), table(n_tokens))
        assert buffer.shape == (equivalence.BATCH, n_tokens, 32)
    assert store.expect(ev.Boundary(ev.Key("eval", 0, 1, 0)), table(16))
    with pytest.raises(BadInput, match=r"Boundary .*got tensors .*2, 16, 32.*, expected .*2, 3, 32"):
        store.expect(ev.Boundary(ev.Key("act", 0, 1, 0)), table(16))


def test_error_feedback_begins_anew_with_another_length(functions_of):  # noqa: F811
    config = replace(equivalence.make_config(2, 1), data=FOUR, codec="int8", error_feedback=True)
    plan = run_config.default_plan(config)
    store = Store(config, plan, 0, equivalence.Tokens(), functions_of(config, plan, 0))
    long = np.random.default_rng(0).standard_normal((equivalence.BATCH, 6, 32), np.float32)
    first, short, again = (
        np.asarray(store.boundary_codec.encode(ev.Key("act", 0, 1, 0), x)) for x in (long, long[:, :3], long)
    )
    assert short.size < first.size
    np.testing.assert_array_equal(first, again)


def test_each_length_reads_every_window_of_its_own_once(tmp_path):
    """A sample's tokens follow from the step alone, whatever was read before."""
    data = write_tokens(tmp_path / "x.tok", "bytes", 256, np.arange(97) % 251, np.zeros(0, int))
    rule, n_microbatches = SeqLengths(16, 4, 12), 4
    seen = {length: [] for length in rule.rounded}
    for step in range(18):
        for microbatch in range(n_microbatches):
            rows = data.train_batch(7, step, microbatch, 1, rule.at(step), n_microbatches)
            assert rows.shape == (1, rule.at(step) + 1)
            seen[rule.at(step)].append(int(rows[0, 0]))
    for length, firsts in seen.items():
        n_windows = data.n_train_windows(length)
        assert set(firsts) <= set(range(0, n_windows * length, length))
        assert max(firsts.count(first) for first in firsts) <= -(-len(firsts) // n_windows) + 1


# ------------------------------------------------------------------------------------------------------------ blocks


def test_an_even_cut_falls_between_shared_blocks():
    config = equivalence.make_config(2, 1, layers="2,2")
    config = replace(config, plan=replace(config.plan, layers=""))
    shared = lambda **model: replace(config, model=replace(config.model, **model))  # noqa: E731
    assert run_config.default_plan(shared(n_layers=6, n_shared_blocks=3)).stages == ((0, 4), (4, 6))
    assert run_config.default_plan(shared(n_layers=6, n_shared_blocks=2)).stages == ((0, 3), (3, 6))
    with pytest.raises(BadInput, match=r"^plan.stages: got 2, expected at most n_shared_blocks 1;"):
        run_config.default_plan(shared(n_shared_blocks=1))


def test_a_shared_block_is_one_entry_of_a_checkpoint_with_one_set_of_moments():
    model = replace(equivalence.make_config(1, 1).model, **SHARED, d_model=8, n_heads=1)
    params = init_stage(model, 0, 4, 0)
    entries = split_entries((params, optimizer(LAMB).init(params)))
    assert sorted(entries) == ["block_000", "block_002", "head", "pos", "tok"]
    moments = [leaf for leaf in entries["block_002"]["optimizer"] if leaf.ndim]
    assert sum(leaf.size for leaf in moments) == 2 * model.facts.layers[0].n_params
