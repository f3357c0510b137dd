"""Weight stashing: runs whose forwards run ahead equal their replay bit for bit, and the replay equals PipeDream as it
is written: the gradient at a mix of versions, one of each stage."""

import functools
import random
from dataclasses import replace

import jax
import optax
import pytest
import reference_models
from test_group_replay import (
    BATCH,
    SEED,
    Tokens,
    assert_close,
    assert_equal_bits,
    incarnations_of,
    make_config,
    replayed,
    simulated,
    whole_params,
)

from jaxdt.build import check
from jaxdt.model.base import init_stage
from jaxdt.model.vectors import own_params
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport, PipelineEndReport, StateMeanReport, StepReport
from jaxdt.run import config as run_config
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Link
from jaxdt.run.optim import OptimConfig
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.storage.parameter_versions import WeightStash
from jaxdt.sim.predict import Conditions, simulate

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

ADAMW = OptimConfig("adamw", lr=3e-3, eps=1e-6, weight_decay=0.1, clip_norm=0.0, warmup_steps=5)


def stashing(match="all", pipelines=2, steps=20, optim=ADAMW, **groups):
    config = make_config(match, pipelines, optim, steps, microbatches=pipelines, **groups)
    return replace(config, plan=replace(config.plan, schedule="stash"))


RULES = [
    ("all", 3, dict(every_steps=1)),
    ("pairs", 3, dict(every_steps=1)),
    ("all", 2, dict(every_steps=4, outer="nesterov")),
    ("all", 1, dict(clip="stage")),
    ("window", 3, dict(every_steps=1, window_s=3.0, head="tied", stages=3, layers=3)),
]


@pytest.mark.parametrize(("match", "pipelines", "groups"), RULES, ids=lambda value: str(value))
def test_a_run_equals_the_replay_of_its_log(match, pipelines, groups):
    optim = replace(ADAMW, clip_norm=0.5) if groups.get("clip") else ADAMW
    config = stashing(match, pipelines, 8, optim, **groups)
    outcome, states = simulated(config)
    replay = replayed(config, outcome, StateMeanReport)
    assert sum(incarnations_of(config, outcome).n_steps.values()) >= 8 * pipelines
    plan = run_config.default_plan(config)
    for stage, row in enumerate(plan.placement):
        for pipeline, peer in enumerate(row):
            assert_equal_bits(states[peer], replay.states[stage, pipeline])
    rows = [report.loss for report in outcome.of(StepReport)]
    assert len(rows) == 8 and rows[-1] < rows[0]


def test_a_checkpoint_on_the_way_is_the_mean_of_states_that_the_log_names():
    config = stashing("window", 3, 8, window_s=3.0, connectivity_groups=4)
    config = replace(config, train=replace(config.train, checkpoint_every_steps=3))
    stores = {}
    outcome, _ = simulated(config, stores)
    replay = replayed(config, outcome, StateMeanReport)
    for mean in outcome.of(StateMeanReport):
        assert_equal_bits(stores[mean.members[0]].written[mean.version], replay.mean_state(mean))


def test_losses_are_those_of_the_whole_model_at_stashed_versions():
    """Plain JAX: the gradient of the whole model at stage j's parameters of version n - (M - 1 - j), optax for the
    update of the newest ones, an average of both pipelines every second step. A table that two stages share is the
    first one's."""
    config = stashing(every_steps=2, head="tied")
    outcome, _ = simulated(config)
    replay, plan = replayed(config, outcome), run_config.default_plan(config)
    matrices = functools.partial(jax.tree.map, lambda leaf: leaf.ndim >= 2)
    lr = lambda count: ADAMW.lr * jax.numpy.minimum(1.0, (jax.numpy.float32(count) + 1.0) / 5)  # noqa: E731
    rule = optax.adamw(lr, ADAMW.b1, ADAMW.b2, ADAMW.eps, weight_decay=ADAMW.weight_decay, mask=matrices)

    @jax.jit
    def gradient(params, tokens_BT):
        def mean(params):
            return reference_models.loss_sum(config.model, params, tokens_BT[:, :-1], tokens_BT[:, 1:]) / BATCH

        return jax.value_and_grad(mean)(params)

    @jax.jit
    def update(params, state, gradient):
        with jax.numpy_dtype_promotion("standard"):
            change, state = rule.update(gradient, state, params)
        return optax.apply_updates(params, change), state

    names = [list(own_params(config.model, lo, hi, init_stage(config.model, lo, hi, SEED))) for lo, hi in plan.stages]
    start = init_stage(config.model, 0, config.model.n_layers, SEED)
    versions, states = [[start], [start]], [rule.init(start)] * 2
    for n in range(20):
        for p, of in enumerate(versions):
            seen = [of[max(0, n - ahead)] for ahead in (1, 0)]
            mixed = {name: seen[stage][name] for stage in (0, 1) for name in names[stage]}
            loss, change = gradient(mixed, Tokens().train_batch(SEED, n, p, BATCH, 8, 2))
            assert float(loss) == pytest.approx(replay.losses[p][n], rel=1e-5)
            params, states[p] = update(of[n], states[p], change)
            of.append(params)
        if n % 2:
            mean = jax.tree.map(lambda a, b: (a + b) / 2, *(of[-1] for of in versions))
            for of in versions:
                of[-1] = mean
    for p in range(2):
        params = whole_params(replay, p)
        assert_close(params, {name: versions[p][-1][name] for name in params}, 1e-4)


# ------------------------------------------------------------------------------------------------- orders and timing


class Order:
    """The Work of each peer, in its order."""

    def __init__(self):
        self.of = {}

    def run(self, peer, start_s, seconds, work):
        if work.kind in (WorkKind.FORWARD, WorkKind.BACKWARD):
            self.of.setdefault(peer, []).append(f"{work.kind}{work.step}")

    def send(self, *_):
        """Not of interest."""

    recv = report = send


def timed(n_stages, n_pipelines, n_steps, slow=None, seed=0):
    """(outcome, the order of each peer) of a run without arithmetic, whose peers are of unequal speeds."""
    model = dict(preset="debug", n_layers=n_stages, d_model=8, n_heads=2, max_len=4, vocab_size=16, tied_head=False)
    config = run_config.parse(
        dict(
            model=model,
            plan=dict(stages=n_stages, pipelines=n_pipelines, microbatches=n_pipelines, schedule="stash"),
            train=dict(steps=n_steps),
            optim=dict(clip_norm=0.0),
            net=dict(heartbeat_s=1000.0, deadline_floor_s=10000.0),
            sync=dict(kind="groups", groups=dict(match="window", window_s=0.5)),
        )
    )
    plan, rng, order = run_config.default_plan(config), random.Random(seed), Order()
    factor = {peer: 8 if plan.seat(peer)[1] == slow else rng.uniform(0.7, 1.3) for peer in plan.peers}
    seconds = {
        peer: {kind: s * factor[peer] for kind, s in zip("FBEGU", (1, 2, 1, 0.1, 0.1), strict=True)}
        for peer in plan.peers
    }
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    link = lambda src, dst: Link(rng.uniform(0.0, 1.0), 1.0)  # noqa: E731
    outcome = simulate(config, plan, Conditions(seconds, link, hosts, dict.fromkeys(hosts.values(), 1)), order)
    assert outcome.stopped[ev.COORDINATOR].code == 0
    return outcome, order.of


def test_forwards_run_ahead_by_the_stages_that_follow():
    outcome, order = timed(3, 1, 4)
    assert {report.n_steps for report in outcome.of(PipelineEndReport)} == {4}
    assert [" ".join(order[peer]) for peer in (0, 1, 2)] == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


@pytest.mark.parametrize("n_steps", [1, 2, 9])
def test_no_run_stands_still_and_all_stages_do_the_same_steps(n_steps):
    """Also one of fewer steps than a stage would forward ahead, and with a pipeline that is slow."""
    for seed, slow in ((0, None), (1, 1), (2, 0)):
        outcome, order = timed(4, 3, n_steps, slow, seed)
        ends = {report.pipeline: report.n_steps for report in outcome.of(PipelineEndReport)}
        assert 3 * n_steps <= sum(ends.values()) <= 3 * (n_steps + 4)
        for peer, works in order.items():
            steps = list(range(ends[peer // 4]))
            for kind in (WorkKind.FORWARD, WorkKind.BACKWARD):
                assert [int(work[1:]) for work in works if work[0] == kind] == steps
        if n_steps == 9 and slow is not None:
            assert ends[slow] < 9 < max(ends.values())
        assert len(outcome.of(StepReport)) == n_steps and outcome.of(GroupReport)


def test_a_backward_takes_the_parameters_of_its_forward():
    class Versions:
        version, params = 5, "five"

    stash, versions = WeightStash(2), Versions()
    forward, backward = (Work(0, kind, 0, 0, 7) for kind in (WorkKind.FORWARD, WorkKind.BACKWARD))
    assert stash.of(forward, versions) == "five"
    with pytest.raises(RuntimeError, match="7:0B0@p0 is out of order: held is version 5"):
        stash.of(backward, versions)
    versions.version, versions.params = 7, "seven"
    assert stash.of(backward, versions) == "five"
    for work in (backward, replace(forward, step=10), replace(forward, step=6)):
        with pytest.raises(RuntimeError, match="is out of order"):
            stash.of(work, versions)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("part", "fields", "line"),
    [
        (
            "optim",
            dict(clip_norm=1.0),
            "optim.clip_norm: got 1.0, expected 0 with plan.schedule stash, or sync.groups",
        ),
        ("plan", dict(microbatches=4), r"plan.shares: got \[2, 2\], expected one microbatch of each pipeline"),
        ("plan", dict(in_flight="3,1"), r"plan.in_flight: got \[3, 1\], expected none with plan.schedule stash"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(part, fields, line):
    config = stashing()
    config = replace(config, **{part: replace(getattr(config, part), **fields)})
    with pytest.raises(BadInput, match=line):
        check(config, run_config.default_plan(config))


@pytest.mark.parametrize("wiring", ["fixed", "swarm"])
def test_equal_replicas_do_not_stash(wiring):
    config = make_config(None)
    config = replace(config, plan=replace(config.plan, schedule="stash"), wiring=replace(config.wiring, kind=wiring))
    with pytest.raises(
        BadInput, match="plan.schedule: got stash, expected one of 1f1b, gpipe with sync.kind allreduce"
    ):
        check(config, run_config.default_plan(config))
