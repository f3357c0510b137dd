"""Replicas that may differ: a run under virtual time equals the replay of its log in one process, bit for bit.

The replay computes with the jitted functions of the stages. That it computes the right thing is shown by the whole
model in plain JAX, by all-reduce, and by runs of one pipeline."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_models
from test_rounded_gradients import rounded

from jaxdt.build import RunStart, build_coordinator, build_peer, build_peers, check
from jaxdt.codec.vectors import VectorCodec
from jaxdt.membership.coordinator_config import load_durable_state
from jaxdt.model.base import init_stage
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.stage_arithmetic import StageArithmetic
from jaxdt.model.vectors import own_params
from jaxdt.protocol import events as ev
from jaxdt.protocol.incarnations import Incarnations
from jaxdt.protocol.reports import (
    CheckpointReport,
    GroupReport,
    PipelineEndReport,
    PipelineJoinReport,
    StateMeanReport,
    StepReport,
)
from jaxdt.protocol.round_id import RoundKind
from jaxdt.run import config as run_config
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.run.optim import OptimConfig
from jaxdt.runtime.storage.store import Store, stage_functions
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.sim_peer import Environment, ProcessFactory, SimPeer
from jaxdt.sync.exchange import sharding
from jaxdt.testing.replay import Replay

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

SEED, BATCH, N_STEPS = 3, 2, 8
N_HELD_OUT = 3  # batches
ADAMW = OptimConfig("adamw", lr=3e-3, eps=1e-6, weight_decay=0.1, clip_norm=0.5, warmup_steps=5)
SGD = OptimConfig("sgd", lr=0.1, momentum=0.9, clip_norm=0.0)
MODEL = dict(preset="debug", n_layers=2, d_model=16, n_heads=2, d_ff=32, max_len=8, vocab_size=64, tied_head=False)


class Tokens:
    """Random text in which a token follows from the one before it more often than not."""

    counts_all = True

    def train_batch(self, seed, step, microbatch, microbatch_size, seq_len, n_microbatches):
        rng = np.random.default_rng((seed, step, microbatch))
        jumps = rng.integers(0, 64, (microbatch_size, seq_len + 1)) * (rng.random((microbatch_size, seq_len + 1)) < 0.3)
        return ((np.cumsum(jumps + 1, axis=1)) % 64).astype(np.int32)

    def n_eval_batches(self, microbatch_size, seq_len):
        return N_HELD_OUT

    def eval_batch(self, microbatch, microbatch_size, seq_len):
        return self.train_batch(99, microbatch, 0, microbatch_size, seq_len, 1)


def make_config(
    match="all",
    pipelines=2,
    optim=ADAMW,
    steps=N_STEPS,
    microbatches=4,
    layers=2,
    codec="none",
    stages=2,
    head="untied",
    **groups,
):
    sync = {"kind": "groups", "groups": {"match": match, **groups}} if match is not None else {}
    return run_config.parse(
        dict(
            model=MODEL | {"n_layers": layers, "tied_head": head == "tied"},
            plan=dict(stages=stages, pipelines=pipelines, microbatches=microbatches),
            train=dict(steps=steps, seed=SEED, microbatch_size=BATCH),
            optim=serialize.write(optim),
            sync=sync | {"slice_bytes": 1000, "codec": codec},
            net=dict(heartbeat_s=50.0, deadline_floor_s=1000.0),
        )
    )


@functools.cache
def functions_of(stage, optim, layers, head, stages, match):
    config = make_config(match, optim=optim, layers=layers, head=head, stages=stages)
    return stage_functions(config, run_config.default_plan(config), stage)


def functions_for(config, stage):
    is_tied = config.model.tied_head
    is_equal = is_tied and config.sync.kind == "allreduce"  # where the last stage has a table of its own
    head, stages = "tied" if is_tied else "untied", config.plan.stages
    return functions_of(stage, config.optim, config.model.n_layers, head, stages, None if is_equal else "all")


class Saving(Store):
    """Keeps what it would write to a disk."""

    def write_checkpoint(self, version):
        self.written = getattr(self, "written", {}) | {version: jax.device_get(self.state_of(version))}


def store_of(config, peer):
    plan = run_config.default_plan(config)
    return Saving(config, plan, peer, Tokens(), functions_for(config, plan.seat(peer)[0]))


def simulated(config, stores=None, trace=None, faults=(), **options):
    """(outcome, {peer: its state at the end}); peers and links are of unequal speeds."""
    plan = run_config.default_plan(config)
    stores = {} if stores is None else stores
    stores |= {peer: store_of(config, peer) for peer in plan.peers}
    outcome = simulation(config, stores, trace=trace, faults=faults, **options).run(until_s=1e5)
    assert outcome.stopped[ev.COORDINATOR].code == 0, outcome.stopped[ev.COORDINATOR].reason
    return outcome, {peer: jax.device_get(store.parameter_versions.state) for peer, store in stores.items()}


def simulation(config, tensors, **options):
    """A simulation of a config, with these tensors of each peer."""
    plan, peers = run_config.default_plan(config), {}
    for peer, machine in build_peers(config, plan, RunStart("r")).items():
        peers[peer] = SimPeer(machine, tensors[peer], f"h{peer}", dict.fromkeys("FBEGU", 1 + peer / 3))
    link = lambda src, dst: Link(0.1 + (src * 7 + dst * 3) % 5, 1e-4)  # noqa: E731
    environment = Environment(link, cores={peer.host: 1 for peer in peers.values()}, persist_s=0.2)

    def started_again(disk):
        return build_coordinator(config, plan, RunStart("r"), load_durable_state(disk))

    def begun_anew(peer, stage):
        tensors[peer] = store_of(config, peer)
        machine = build_peer(config, plan, peer, RunStart("r"))
        return SimPeer(machine, tensors[peer], f"h{peer}", dict.fromkeys("FBEGU", 1 + peer / 3))

    processes = ProcessFactory(begun_anew, started_again)
    coordinator = build_coordinator(config, plan, RunStart("r"))
    return Simulation(coordinator, peers, environment, processes=processes, **options)


def incarnations_of(config, outcome):
    kinds = (PipelineJoinReport, PipelineEndReport)
    log = [report for _, peer, report in outcome.reports if peer == ev.COORDINATOR and isinstance(report, kinds)]
    return Incarnations(run_config.default_plan(config).n_pipelines, log)


def replayed(config, outcome, *kinds):
    """The replay, with the means of these kinds of reports: StateMeanReport for the run's result."""
    plan, incarnations = run_config.default_plan(config), incarnations_of(config, outcome)
    functions = [functions_for(config, s) for s in range(plan.n_stages)]
    replay = Replay(
        config,
        plan,
        StageArithmetic(config, plan, functions, Tokens(), VectorCodec(config.sync.codec_spec)),
        incarnations,
    )
    keep = [report for kind in kinds for report in outcome.of(kind)]
    replay.run(incarnations.n_steps, outcome.of(GroupReport), keep=keep)
    return replay


def whole_params(replay, pipeline):
    stages = sorted(stage for stage, number in replay.states if number == pipeline)
    return {name: tree for stage in stages for name, tree in replay.states[stage, pipeline][0].items()}


def assert_close(got, expected, tolerance):
    """The difference of two trees is below a tolerance, relative to the norm of all their numbers."""
    got, expected = (FloatVector(got).of(tree) for tree in (got, expected))
    assert np.linalg.norm(got - expected) < tolerance * np.linalg.norm(expected)


def assert_equal_bits(got, expected):
    jax.tree.map(np.testing.assert_array_equal, got, jax.device_get(expected))


RULES = [
    ("all", dict(every_steps=1)),
    ("none", {}),
    ("window", dict(every_steps=1, window_s=3.0, connectivity_groups=4)),
    ("window", dict(every_steps=2, group_size_max=2, window_s=3.0, codec="bf16")),
    ("all", dict(every_steps=4, lag_steps=2, outer="nesterov", mix_frac=0.1, codec="int8")),
    ("all", dict(every_steps=2, outer="sgd", weights="samples", clip="stage", average_moments=True, mix_frac=0.1)),
    ("window", dict(every_steps=1, window_s=3.0, weights="samples", average_moments=True, codec="bf16")),
    ("window", dict(every_steps=1, window_s=3.0, head="tied", average_moments=True, codec="bf16")),
    ("all", dict(every_steps=2, outer="nesterov", head="tied", stages=3, layers=3)),
    ("pairs", dict(every_steps=1, head="tied", stages=3, layers=3, codec="int8")),
]


@pytest.mark.parametrize(("match", "groups"), RULES, ids=lambda value: str(value))
def test_a_run_equals_the_replay_of_its_log(match, groups):
    config = make_config(match, 3, microbatches=7, **groups)
    outcome, states = simulated(config)
    replay = replayed(config, outcome, StateMeanReport)
    n_steps = incarnations_of(config, outcome).n_steps
    assert sum(n_steps.values()) >= 3 * N_STEPS
    sizes = {len(report.members) for report in outcome.of(GroupReport)}
    assert sizes >= {"all": {3}, "none": set(), "pairs": {1, 2}, "window": {1, 2}}[match]
    plan = run_config.default_plan(config)
    for stage, row in enumerate(plan.placement):
        for pipeline, peer in enumerate(row):
            assert_equal_bits(states[peer], replay.states[stage, pipeline])
    rows = [report.loss for report in outcome.of(StepReport)]
    assert len(rows) == N_STEPS and rows[-1] < rows[0]


def test_a_checkpoint_on_the_way_is_the_mean_of_states_that_the_log_names():
    config = make_config("window", 3, microbatches=7, window_s=3.0, connectivity_groups=4)
    config = replace(config, train=replace(config.train, checkpoint_every_steps=3))
    stores = {}
    outcome, _ = simulated(config, stores)
    means = outcome.of(StateMeanReport)
    assert sorted((mean.version, mean.stage) for mean in means) == [(v, stage) for v in (3, 6, 8) for stage in (0, 1)]
    assert any(len(set(mean.steps)) > 1 for mean in means)
    assert [report.version for report in outcome.of(CheckpointReport)] == [3, 6, 8]
    replay = replayed(config, outcome, StateMeanReport)
    for mean in means:
        assert_equal_bits(stores[mean.members[0]].written[mean.version], replay.mean_state(mean))


# ------------------------------------------------------------------------------------ what the replay itself computes


@functools.cache
def whole_model_step(model, optim, clips_alone=((),)):
    """(one update of the whole model, the initial state of its optimizer), for AdamW. `clips_alone`: the entries of
    parts whose gradients are clipped each by its own norm."""
    matrices = functools.partial(jax.tree.map, lambda leaf: leaf.ndim >= 2)
    lr = lambda count: optim.lr * jnp.minimum(1.0, (jnp.float32(count) + 1.0) / max(1, optim.warmup_steps))  # noqa: E731
    adamw = optax.adamw(lr, optim.b1, optim.b2, optim.eps, weight_decay=optim.weight_decay, mask=matrices)
    clip = optax.clip_by_global_norm(optim.clip_norm)
    parts = [lambda params, of=of: {name: not of or name in of for name in params} for of in clips_alone]
    rule = optax.chain(*(optax.masked(clip, part) for part in parts), adamw)

    def loss(params, tokens_BT):
        return reference_models.loss_sum(model, params, tokens_BT[:, :-1], tokens_BT[:, 1:]) / tokens_BT.shape[0]

    @jax.jit
    def step(params, state, tokens_BT):
        value, gradient = jax.value_and_grad(loss)(params, tokens_BT)
        with jax.numpy_dtype_promotion("standard"):
            change, state = rule.update(gradient, state, params)
        return value, optax.apply_updates(params, change), state

    return step, jax.jit(rule.init)


class WholeModel:
    """The same in plain JAX: the whole model of each pipeline in one gradient, optax for the update."""

    def __init__(self, config):
        self.config, self.plan = config, run_config.default_plan(config)
        model, groups = config.model, config.sync.groups
        self.names = [list(own_params(model, lo, hi, init_stage(model, lo, hi, SEED))) for lo, hi in self.plan.stages]
        self.weights = self.plan.shares if groups.weights == "samples" else [1] * self.plan.n_pipelines
        clips_alone = tuple(map(tuple, self.names)) if groups.clip == "stage" else ((),)
        self.step_of, initial_state = whole_model_step(model, config.optim, clips_alone)
        params = init_stage(model, 0, model.n_layers, SEED)
        self.params = [params] * self.plan.n_pipelines
        self.states = [initial_state(params)] * self.plan.n_pipelines

    def step(self, pipeline, n):
        plan = self.plan
        parts = [Tokens().train_batch(SEED, n, m, BATCH, 8, plan.n_microbatches) for m in plan.microbatches(pipeline)]
        loss, self.params[pipeline], self.states[pipeline] = self.step_of(
            self.params[pipeline], self.states[pipeline], np.concatenate(parts)
        )
        return float(loss)

    def average(self, stage):
        for name in self.names[stage]:
            mean = jax.tree.map(self.mean, *(params[name] for params in self.params))
            self.params = [params | {name: mean} for params in self.params]

    def mean(self, *leaves):
        return sum(weight * leaf for weight, leaf in zip(self.weights, leaves, strict=True)) / sum(self.weights)

    def average_in_int8(self, stage, owed, feeds_back):
        """The same, rounded in plain numpy. `owed[pipeline]` is what roundings of this stage have lost, and is
        replaced."""
        trees = [{name: params[name] for name in self.names[stage]} for params in self.params]
        layout = FloatVector(trees[0])
        whole = [layout.of(tree) * np.float32(w) + o for tree, w, o in zip(trees, self.weights, owed, strict=True)]
        sent = [rounded("int8", vector) for vector in whole]
        total = sum(sent)
        mean = rounded("int8", total)
        owed[:] = [feeds_back * (a - b) for a, b in zip(whole, sent, strict=True)]
        for (lo, hi), owner in sharding(len(total), (0, 1, 2), len(total), 256).owner_of.items():
            owed[owner][lo:hi] += feeds_back * (total - mean)[lo:hi]
        after = layout.tree(mean / np.float32(sum(self.weights)), 1.0)
        self.params = [params | after for params in self.params]


def test_local_sgd_is_that_of_the_whole_model():
    """Three pipelines of unequal shares average every second step: losses, and parameters at the end. Each counts as
    its samples, and its gradient is clipped stage by stage; DiLoCo below counts equally and clips as a whole."""
    config = make_config("all", 3, microbatches=7, every_steps=2, weights="samples", clip="stage")
    outcome, _ = simulated(config)
    replay, whole = replayed(config, outcome), WholeModel(config)
    n_steps = replay.losses[0]
    for n in range(len(n_steps)):
        for pipeline in range(3):
            assert whole.step(pipeline, n) == pytest.approx(replay.losses[pipeline][n], rel=1e-5)
        if n % 2:
            whole.average(0)
            whole.average(1)
    for pipeline in range(3):
        params = whole_params(replay, pipeline)
        assert_close(params, {name: whole.params[pipeline][name] for name in params}, 1e-4)


def test_what_int8_loses_of_an_average_is_made_up_for_in_the_next_one():
    """The same in few bytes, against plain code that rounds and adds what it has lost. A sum in another order may round
    to the next number of the codec; that is far less than what is made up for."""
    config = make_config("all", 3, microbatches=7, every_steps=2, weights="samples", clip="stage", codec="int8")
    replay = replayed(config, simulated(config)[0])
    found = {}
    for feeds_back in (1, 0):
        whole, owed = WholeModel(config), [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        for n in range(len(replay.losses[0])):
            for pipeline in range(3):
                whole.step(pipeline, n)
            for stage in (0, 1) if n % 2 else ():
                whole.average_in_int8(stage, owed[stage], feeds_back)
        found[feeds_back] = whole.params[0]
    params = whole_params(replay, 0)
    vector_of = lambda tree: FloatVector(params).of({name: tree[name] for name in params})  # noqa: E731
    far, near = (np.linalg.norm(vector_of(params) - vector_of(found[feeds_back])) for feeds_back in (0, 1))
    assert near < 0.1 * far


@pytest.mark.parametrize(("codec", "head"), [("bf16", "untied"), ("none", "tied")])
def test_diloco_is_that_of_the_whole_model(codec, head):
    """Alg. 1 of DiLoCo: the mean change of three replicas is the gradient of SGD with Nesterov's momentum. With a codec
    each change is rounded, and so is the sum of them; what that loses is added to the next changes. Whose change that
    of the sum is added to matters to no sum."""
    groups = dict(every_steps=3, outer="nesterov", outer_lr=0.6, outer_momentum=0.8)
    config = make_config("all", 3, microbatches=7, codec=codec, head=head, **groups)
    replay, whole = replayed(config, simulated(config)[0]), WholeModel(config)
    anchor = whole.params[0]
    dtype = {"none": jnp.float32, "bf16": jnp.bfloat16}[codec]
    sent = lambda leaf: jax.lax.convert_element_type(jax.lax.convert_element_type(leaf, dtype), jnp.float32)  # noqa: E731
    minus = functools.partial(jax.tree.map, jnp.subtract)
    owed = [jax.tree.map(jnp.zeros_like, anchor)] * 3
    outer = optax.sgd(0.6, 0.8, nesterov=True)
    state = outer.init(anchor)
    for n in range(len(replay.losses[0])):
        for pipeline in range(3):
            assert whole.step(pipeline, n) == pytest.approx(replay.losses[pipeline][n], rel=1e-5)
        if n % 3 == 2:
            changes = [minus(minus(anchor, params), lost) for params, lost in zip(whole.params, owed, strict=True)]
            rounded_changes = [jax.tree.map(sent, change) for change in changes]
            total = jax.tree.map(lambda *leaves: sum(leaves), *rounded_changes)
            owed = [minus(*pair) for pair in zip(rounded_changes, changes, strict=True)]  # with the sign turned
            owed[0] = minus(owed[0], minus(total, jax.tree.map(sent, total)))
            change, state = outer.update(jax.tree.map(lambda leaf: sent(leaf) / 3, total), state)
            anchor = optax.apply_updates(anchor, change)
            whole.params = [anchor] * 3
    params = whole_params(replay, 0)
    assert_close(params, {name: whole.params[0][name] for name in params}, 1e-4)


def test_an_outer_optimizer_that_takes_the_mean_is_local_sgd():
    """A learning rate of 1 and no momentum; also with one pipeline, which has an outer step too."""
    for pipelines in (2, 1):
        local = make_config("all", pipelines, every_steps=2)
        outer = make_config("all", pipelines, every_steps=2, outer="nesterov", outer_lr=1.0, outer_momentum=0.0)
        outcome, states = simulated(outer)
        _, expected = simulated(local)
        for peer, (params, _) in states.items():
            assert_close(params, expected[peer][0], 1e-6)
        assert_equal_bits(states[0], replayed(outer, outcome, StateMeanReport).states[0, 0])


class Sent:
    """Adds up what replicas send one another of their parameters."""

    def __init__(self):
        self.n_bytes = 0

    def send(self, peer, now_s, dst, key, n_bytes):
        self.n_bytes += (
            n_bytes if isinstance(key, ev.SliceKey) and key.round.kind in (RoundKind.MEAN, RoundKind.HELD_OUT) else 0
        )

    def run(self, *arguments):
        """Not of interest."""

    recv = report = run


def test_bytes_between_replicas_fall_with_the_number_of_local_steps():
    """Also with an outer optimizer (DiLoCo), and with a lag. A codec halves them."""
    n_bytes = {}
    for name, groups in {
        "1": dict(every_steps=1),
        "2": dict(every_steps=2),
        "diloco": dict(every_steps=4, outer="nesterov"),
        "streaming": dict(every_steps=4, outer="nesterov", lag_steps=1, mix_frac=0.5),
        "bf16": dict(every_steps=4, outer="nesterov", codec="bf16"),
    }.items():
        sent = Sent()
        simulated(make_config("all", 2, **groups), trace=sent)
        n_bytes[name] = sent.n_bytes
    assert n_bytes["1"] == 2 * n_bytes["2"] == 4 * n_bytes["diloco"] == 8 * n_bytes["bf16"] > 0
    assert n_bytes["streaming"] == n_bytes["diloco"]


def test_a_codec_rounds_what_all_members_go_on_from():
    """After one group of two the momentum is half the sum of changes, which a codec has rounded."""
    for codec, is_rounded in (("bf16", True), ("none", False)):
        config = make_config("all", 2, steps=4, every_steps=4, outer="nesterov", codec=codec)
        _, states = simulated(config)
        momenta = [states[peer][1][-1] for peer in (0, 2)]
        assert_equal_bits(*momenta)
        rounded = jax.tree.map(
            lambda leaf: np.array_equal(leaf, leaf.astype(jnp.bfloat16).astype(np.float32)), momenta[0]
        )
        assert all(jax.tree.leaves(rounded)) == is_rounded


def test_averaging_after_every_step_of_sgd_is_all_reduce():
    """Without clipping and with equal shares the mean of the updates is the update by the mean gradient."""
    outcome, states = simulated(make_config("all", 2, SGD))
    reference, same_states = simulated(make_config(None, 2, SGD))
    losses, expected = ([report.loss for report in run.of(StepReport)] for run in (outcome, reference))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for peer, (params, _) in states.items():
        assert_close(params, same_states[peer][0], 1e-5)


def test_averaged_moments_of_sgd_are_those_of_all_reduce():
    """Before the end, where all of the state is averaged anyway; without it each replica has moments of its own."""
    _, expected = simulated(make_config(None, 2, SGD))
    for average_moments in (True, False):
        config = make_config("all", 2, SGD, average_moments=average_moments)
        states = jax.device_get(replayed(config, simulated(config)[0]).states)
        for stage in (0, 1):
            (_, ours), (_, others) = states[stage, 0], states[stage, 1]
            if average_moments:
                assert_equal_bits(ours, others)
                assert_close(ours, expected[stage][1], 1e-5)
            else:
                with pytest.raises(AssertionError):
                    assert_close(ours, expected[stage][1], 0.1)


def test_one_pipeline_by_itself_is_the_run_that_there_was():
    for match in ("all", "none"):
        outcome, states = simulated(make_config(match, 1))
        reference, same_states = simulated(make_config(None, 1))
        losses, expected = ([report.loss for report in run.of(StepReport)] for run in (outcome, reference))
        np.testing.assert_allclose(losses, expected, rtol=1e-6)
        norms, expected = ([report.gradient_norm for report in run.of(StepReport)] for run in (outcome, reference))
        np.testing.assert_allclose(norms, expected, rtol=1e-5)
        for peer, (params, _) in states.items():
            assert_close(params, same_states[peer][0], 1e-6)


def test_pipelines_that_never_average_are_runs_of_their_own():
    """Each pipeline's losses are those of the whole model trained on its share alone."""
    config = make_config("none", 3, microbatches=7)
    replay, whole = replayed(config, simulated(config)[0]), WholeModel(config)
    for pipeline in range(3):
        losses = [whole.step(pipeline, n) for n in range(len(replay.losses[pipeline]))]
        np.testing.assert_allclose(replay.losses[pipeline], losses, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("part", "field", "value", "line"),
    [
        ("sync", "delay", 1, "sync.delay: got 1, expected 0"),
        ("wiring", "kind", "swarm", "wiring.kind: got swarm, expected fixed with sync.kind groups: no microbatch"),
        ("wiring", "rebalance_s", 60.0, "wiring.rebalance_s: got 60.0, expected 0"),
        ("train", "on_nonfinite", "rollback", "train.on_nonfinite: got rollback"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(part, field, value, line):
    config = make_config()
    config = replace(config, **{part: replace(getattr(config, part), **{field: value})})
    with pytest.raises(BadInput, match=line):
        check(config, run_config.default_plan(config))


def test_a_state_that_was_kept_aside_is_given_out_until_the_next_one_is_and_never_another():
    """A disk may refuse a checkpoint at first."""
    config = make_config(steps=8)
    config, stores = replace(config, train=replace(config.train, checkpoint_every_steps=3)), {}
    simulated(config, stores)
    saver = next(store for store in stores.values() if {3, 6} <= getattr(store, "written", {}).keys())
    for _ in range(2):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(saver.state_of(6)), saver.written[6])
    with pytest.raises(LookupError, match="that of 8 steps by now, not of 3"):
        saver.state_of(3)
