"""Fragments that average at offsets, means that come later, and replicas that keep a share of their own (streaming
DiLoCo): a run equals the replay of its log bit for bit, and the replay equals the algorithm in plain JAX."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from test_group_replay import (
    WholeModel,
    assert_close,
    assert_equal_bits,
    incarnations_of,
    make_config,
    replayed,
    simulated,
    whole_params,
)
from test_stash import stashing

from jaxdt.build import check, memory_options
from jaxdt.model.averaging import fragment_entries
from jaxdt.model.base import init_stage
from jaxdt.model.vectors import own_params
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport, StateMeanReport
from jaxdt.run import config as run_config
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Link
from jaxdt.run.sizes import exchanged_elements
from jaxdt.run.work import WorkKind
from jaxdt.sim.predict import Conditions, simulate

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

STREAMING = dict(every_steps=6, fragments=2, lag_steps=2, mix_frac=0.25, outer="nesterov", outer_lr=0.6, head="tied")


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        (4, STREAMING),
        (4, dict(every_steps=4, fragments=2, lag_steps=1, head="tied", codec="int8")),
    ],
    ids=["streaming", "no-outer, in few bytes"],
)
def test_a_run_equals_the_replay_of_its_log(layers, groups):
    """With checkpoints on the way, each of which is a mean of present parameters, whatever mean is pending."""
    config = make_config("all", 3, steps=13, microbatches=7, layers=layers, **groups)
    config = replace(config, train=replace(config.train, checkpoint_every_steps=4))
    stores, plan = {}, run_config.default_plan(config)
    outcome, states = simulated(config, stores)
    reports = outcome.of(GroupReport)
    assert {report.fragment for report in reports} == set(range(config.sync.groups.fragments))
    for report in reports:
        assert {config.sync.groups.fragment_due(step) for step in report.steps} == {report.fragment}
    replay = replayed(config, outcome, StateMeanReport)
    for stage, row in enumerate(plan.placement):
        for pipeline, peer in enumerate(row):
            assert_equal_bits(states[peer], replay.states[stage, pipeline])
    means = [mean for mean in outcome.of(StateMeanReport) if mean.version < 13]
    assert len(means) == 6
    for mean in means:
        assert_equal_bits(stores[mean.members[0]].written[mean.version], replay.mean_state(mean))


def test_losses_and_parameters_are_those_of_streaming_diloco_in_plain_jax():
    """Alg. 2 of streaming DiLoCo: of each fragment the mean change since its last outer step, frozen every 6 steps and
    applied 2 steps later by SGD with Nesterov's momentum; a quarter of what the replica has by then stays."""
    config = make_config("all", 3, steps=20, microbatches=7, layers=4, **STREAMING)
    outcome, _ = simulated(config)
    assert all(len(report.members) == 3 for report in outcome.of(GroupReport))
    replay, whole, plan = replayed(config, outcome), WholeModel(config), run_config.default_plan(config)
    of_stages = [fragment_entries(config.model, lo, hi, 2) for lo, hi in plan.stages]
    fragments = [of_stages[0][f] + of_stages[1][f] for f in (0, 1)]
    assert fragments == [["block_000", "pos", "tok", "block_002"], ["block_001", "block_003", "head"]]
    outer = optax.sgd(0.6, 0.9, nesterov=True)
    pick = lambda params, f: {name: params[name] for name in fragments[f]}  # noqa: E731
    anchors = [pick(whole.params[0], f) for f in (0, 1)]
    states = [outer.init(anchor) for anchor in anchors]
    frozen = {}
    steps = incarnations_of(config, outcome).n_steps
    for n in range(1, max(steps.values()) + 1):
        for p in (p for p in range(3) if n <= steps[p]):
            assert whole.step(p, n - 1) == pytest.approx(replay.losses[p][n - 1], rel=1e-5)
        for f, offset in ((0, 0), (1, 3)):
            if n % 6 == (offset + 2) % 6 and f in frozen:
                update, states[f] = outer.update(frozen.pop(f), states[f])
                anchors[f] = optax.apply_updates(anchors[f], update)
                mixed = lambda own, outcome: 0.25 * own + 0.75 * outcome  # noqa: E731
                parts = [jax.tree.map(mixed, pick(params, f), anchors[f]) for params in whole.params]
                whole.params = [params | part for params, part in zip(whole.params, parts, strict=True)]
            if n % 6 == offset and n <= min(steps.values()):
                changes = [jax.tree.map(jnp.subtract, anchors[f], pick(params, f)) for params in whole.params]
                frozen[f] = jax.tree.map(lambda *leaves: sum(leaves) / 3, *changes)
    assert min(steps.values()) >= 19
    for p in range(3):
        params = whole_params(replay, p)
        assert_close(params, {name: whole.params[p][name] for name in params}, 1e-4)


class LocalSteps:
    """When each peer has done each of its local steps."""

    def __init__(self):
        self.at_s = {}

    def run(self, peer, start_s, seconds, work):
        if work.kind == WorkKind.LOCAL_STEP:
            self.at_s.setdefault(peer, []).append(start_s + seconds)

    def send(self, *_):
        """Not of interest."""

    recv = report = send


def local_step_s(**groups):
    """(the longer, the shorter) mean step of two pipelines, of which one takes 10 % longer, by simulated time without
    arithmetic. Links between replicas take a step and a half for the parameters of a stage."""
    config = make_config(layers=4, steps=60, **groups)
    plan, steps = run_config.default_plan(config), LocalSteps()
    factor = {peer: 1.1 if plan.seat(peer)[1] else 1.0 for peer in plan.peers}
    seconds = {peer: dict.fromkeys("FBE", f) | dict.fromkeys("GU", 0.02 * f) for peer, f in factor.items()}
    n_bytes = 4 * config.model.facts.stage_params(0, 2)
    slow, fast = Link(0.01, 8e-9 * n_bytes / 10.0), Link(0.01, 1.0)
    link = lambda src, dst: slow if (src - dst) % 2 == 0 else fast  # noqa: E731
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    outcome = simulate(config, plan, Conditions(seconds, link, hosts, dict.fromkeys(hosts.values(), 1)), steps)
    assert outcome.stopped[ev.COORDINATOR].code == 0
    means = [(steps.at_s[peer][-1] - steps.at_s[peer][7]) / (len(steps.at_s[peer]) - 8) for peer in plan.placement[0]]
    return max(means), min(means)


def test_a_lag_hides_the_exchange():
    """The slower pipeline steps as fast as if it averaged with nobody; the faster one is bound to it all the same."""
    alone, waits = local_step_s(match="none"), local_step_s(every_steps=4)
    lag = local_step_s(every_steps=4, lag_steps=3)
    streaming = local_step_s(every_steps=4, fragments=2, lag_steps=1)
    assert waits[0] > 1.3 * alone[0]
    assert lag[0] == pytest.approx(alone[0], rel=0.02)
    assert streaming[0] == pytest.approx(alone[0], rel=0.02)
    assert alone[1] < 0.95 * alone[0] and lag[1] > 0.97 * lag[0]


def test_a_fragment_is_whole_blocks_in_turn_with_what_belongs_to_them():
    """The sizes that machines count with are those of the parameters."""
    shared = dict(n_layers=8, n_shared_blocks=4, compression="maxout2", compression_after=(2, 4))
    for fields in (dict(n_layers=5), shared, dict(n_layers=4, tied_head=True, positions="rotary")):
        config = GPTConfig.of("debug", d_model=8, d_ff=16, n_heads=2, max_len=4, vocab_size=16, **fields)
        for lo, hi in ((0, config.n_layers), (0, 4), (2, config.n_layers)):
            params = jax.eval_shape(functools.partial(init_stage, config, lo, hi, 0))
            for n in range(1, config.facts.n_runs(lo, hi) + 1):
                fragments = fragment_entries(config, lo, hi, n)
                entries = config.facts.fragments(lo, hi, n)
                own = own_params(config, lo, hi, params)
                assert sorted(name for names in fragments for name in names) == sorted(own)
                for f, names in enumerate(fragments):
                    leaves = jax.tree.leaves({name: params[name] for name in names})
                    assert sum(leaf.size for leaf in leaves) == sum(entry.n_params for entry in entries[f])
    assert fragment_entries(GPTConfig.of("debug", **shared | {"max_len": 4}), 2, 8, 3) == [
        ["block_002", "receiver_002", "sender_004"],
        ["block_004", "receiver_004"],
        ["block_006", "head"],
    ]


def test_fragments_are_due_one_by_one_at_least_so_many_steps_apart():
    for every, n in ((6, 2), (7, 3), (5, 5), (4, 1)):
        groups = make_config(every_steps=every, fragments=n).sync.groups
        due = [step for step in range(every, 4 * every) if groups.fragment_due(step) is not None]
        assert [groups.fragment_due(step) for step in due] == list(range(n)) * 3
        assert min(b - a for a, b in zip(due, due[1:], strict=False)) == every // n


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (dict(fragments=0), "sync.groups.fragments: got 0, expected an integer >= 1"),
        (dict(fragments=2), "sync.groups.fragments: got 2, expected at most sync.groups.every_steps 1"),
        (dict(every_steps=4, lag_steps=4), "sync.groups.lag_steps: got 4, expected less than 4"),
        (dict(every_steps=4, fragments=2, lag_steps=2), "sync.groups.lag_steps: got 2, expected less than 2"),
        (dict(mix_frac=1.0), r"sync.groups.mix_frac: got 1.0, expected a number in \[0, 1\)"),
        (dict(every_steps=4, fragments=2), "sync.groups.fragments: got 2, expected at most 1, the blocks"),
        (
            dict(match="pairs", every_steps=4, lag_steps=1),
            "sync.groups.lag_steps: got 1, expected 0 with .*pairs",
        ),
        (dict(match="window", every_steps=4, fragments=2), "sync.groups.fragments: got 2, expected 1 with .*window"),
        (dict(codec="int8", average_moments=True), "sync.codec: got int8, expected bf16 or none with .*moments"),
        (dict(codec="int8", mix_frac=0.5), "sync.codec: got int8, expected bf16 or none with .*mix_frac"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(groups, line):
    with pytest.raises(BadInput, match=line):
        config = make_config(**groups)
        check(config, run_config.default_plan(config))


def test_what_a_codec_loses_of_a_fragment_takes_memory_before_and_after_its_average():
    config = make_config(layers=4, every_steps=4, fragments=2, codec="int8")
    exact = replace(config, sync=replace(config.sync, codec="none"))
    numbers = [exchanged_elements(config, 0, 2, fragment) for fragment in (0, 1)]
    rounded, same = memory_options(config, "1f1b", 0, 2).copies, memory_options(exact, "1f1b", 0, 2).copies
    assert rounded.kept - same.kept == 4 * (sum(numbers) + max(numbers)) == rounded.on_host - same.on_host


def test_a_lag_is_refused_where_forwards_run_ahead():
    with pytest.raises(BadInput, match="sync.groups.lag_steps: got 1, expected 0 with plan.schedule stash"):
        config = stashing(every_steps=4, lag_steps=1)
        check(config, run_config.default_plan(config))
