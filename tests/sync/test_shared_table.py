"""A tied head over several stages where replicas may differ: the last stage computes with the first one's table.

Runs are those of the whole model in plain JAX, whatever the cut, and whoever is lost in the middle."""

import functools
from collections import Counter

import jax
import numpy as np
import optax
import pytest
import reference_models
import test_group_replay
from test_group_replay import (
    BATCH,
    N_STEPS,
    SEED,
    Saving,
    Tokens,
    assert_close,
    make_config,
    replayed,
    simulated,
    whole_params,
)
from test_held_out import evaluated
from test_returning_pipelines import assert_equals_replay
from test_stash import stashing

from jaxdt.model.base import init_stage
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import LostReport, StepReport
from jaxdt.protocol.round_id import RoundKind
from jaxdt.run import config as run_config
from jaxdt.run.network import Link
from jaxdt.run.optim import OptimConfig
from jaxdt.run.sizes import replica_elements
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.predict import Conditions, simulate

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

SGD = OptimConfig("sgd", lr=0.1, momentum=0.9, clip_norm=0.5)


def whole_model(config, every_steps, outer=None):
    """(losses by pipeline and step, parameters by pipeline) of two pipelines in plain JAX."""
    plan, model = run_config.default_plan(config), config.model
    rule = optax.chain(optax.clip_by_global_norm(0.5), optax.trace(0.9), optax.scale(-0.1))

    @jax.jit
    def step(params, state, tokens_BT):
        def loss(params):
            return reference_models.loss_sum(model, params, tokens_BT[:, :-1], tokens_BT[:, 1:]) / len(tokens_BT)

        value, gradient = jax.value_and_grad(loss)(params)
        change, state = rule.update(gradient, state)
        return value, optax.apply_updates(params, change), state

    anchor = init_stage(model, 0, model.n_layers, SEED)
    params, states, losses = [anchor] * 2, [rule.init(anchor)] * 2, ([], [])
    outer_state = outer.init(anchor) if outer else None
    for n in range(N_STEPS):
        for p in range(2):
            parts = [Tokens().train_batch(SEED, n, m, BATCH, 8, plan.n_microbatches) for m in plan.microbatches(p)]
            value, params[p], states[p] = step(params[p], states[p], np.concatenate(parts))
            losses[p].append(float(value))
        if n % every_steps == every_steps - 1:
            mean = jax.tree.map(lambda a, b: (a + b) / 2, *params)
            if outer:
                change, outer_state = outer.update(jax.tree.map(lambda a, b: a - b, anchor, mean), outer_state)
                anchor = mean = optax.apply_updates(anchor, change)
            params = [mean] * 2
    return losses, params


DILOCO = dict(every_steps=4, fragments=1, outer="nesterov", outer_lr=0.6, outer_momentum=0.8)


@pytest.mark.parametrize(
    ("groups", "stages"),
    [(dict(every_steps=1), 3), (DILOCO, 2)],
    ids=["every step-3", "DiLoCo-2"],
)
def test_a_run_is_that_of_the_whole_model(groups, stages):
    """Three layers in two uneven stages, or three."""
    config = make_config("all", 2, SGD, layers=3, stages=stages, head="tied", **groups)
    replay = replayed(config, simulated(config)[0])
    outer = optax.sgd(0.6, 0.8, nesterov=True) if "outer" in groups else None
    losses, params = whole_model(config, groups["every_steps"], outer)
    for p in range(2):
        np.testing.assert_allclose(replay.losses[p], losses[p], rtol=1e-6)
        found = whole_params(replay, p)
        assert_close(found, {name: params[p][name] for name in found}, 1e-6)


class Watched(Saving):
    """Notes the tables that it gives and takes, and the number of local steps then."""

    def run(self, work, scale, rounds=()):
        values = super().run(work, scale, rounds)
        if work.kind == WorkKind.TABLE:
            table = self._table["tok"] if self._table else self.parameter_versions.params["tok"]
            if rounds[0].kind == RoundKind.TABLE:
                self.__dict__.setdefault("tables", {})[rounds[0].number] = jax.device_get(table)
        if work.kind == WorkKind.BACKWARD and self._table:
            self.__dict__.setdefault("used", {})[work.step] = max(self.tables)
        return values


@pytest.mark.parametrize(
    ("config", "n_ahead"),
    [
        (make_config("all", 3, microbatches=7, head="tied", stages=3, layers=3, every_steps=2), 0),
        (stashing("window", 3, N_STEPS, head="tied", stages=3, layers=3, window_s=3.0), 2),
    ],
    ids=["three stages", "stash"],
)
def test_both_ends_of_a_pipeline_compute_a_step_with_the_same_table(config, n_ahead, monkeypatch):
    """Bit for bit, the one of the first stage's forward; no other is used, and the last stage has none to average."""
    monkeypatch.setattr(test_group_replay, "Saving", Watched)
    stores, plan = {}, run_config.default_plan(config)
    simulated(config, stores)
    for first, last in zip(plan.placement[0], plan.placement[-1], strict=True):
        given, taken = stores[first].tables, stores[last].tables
        assert set(taken) <= set(given)
        for version, table in taken.items():
            np.testing.assert_array_equal(table, given[version])
        assert stores[last].used == {step: max(0, step - n_ahead) for step in stores[last].used}
        params, opt_state = stores[last].parameter_versions.state
        assert "tok" not in params and sum(leaf.size for leaf in jax.tree.leaves(params)) == replica_elements(
            config, *plan.stages[-1]
        )
        shapes = {leaf.shape for leaf in jax.tree.leaves(opt_state)}
        assert (config.model.vocab_size, config.model.d_model) not in shapes


TIED = evaluated(make_config("window", 3, microbatches=7, head="tied", window_s=3.0, connectivity_groups=4), 3)
MOMENTS = {
    "the last stage hears of a table": (ev.Reduced, RoundKind.TABLE),
    "the first stage hears of a gradient": (ev.Shard, RoundKind.GRADIENT),
    "the last stage hears of the table of a mean": (ev.Reduced, RoundKind.HELD_OUT_TABLE),
}


@functools.cache
def times():
    """When peers 0 and 1 hear of the things of MOMENTS."""
    heard = {name: [] for name in MOMENTS}

    def observe(now_s, peer, event, actions):
        for name, (kind, of) in MOMENTS.items():
            is_it = isinstance(event, ev.Received) and isinstance(event.body, kind)
            if is_it and peer in (0, 1) and event.body.key.round.kind == of:
                heard[name].append(now_s)

    simulated(TIED, observer=observe)
    return heard


@pytest.mark.parametrize(("name", "lost"), list(zip(MOMENTS, (1, 0, 0), strict=True)))
def test_a_pipeline_that_loses_an_end_in_the_middle_is_lost_as_a_whole(name, lost):
    """Others continue, and measure the loss."""
    at_s = times()[name][len(times()[name]) // 2] + 1e-6
    outcome, states = simulated(TIED, faults=[Fault(at_s, CRASH, lost)])
    assert [report.peer for report in outcome.of(LostReport)] == [lost]
    assert_equals_replay(TIED, outcome, states, away={0})
    assert outcome.of(StepReport)[-1].eval_loss is not None


class Moved:
    """Bytes that are sent, by the kind of their round and the sender."""

    def __init__(self):
        self.n_bytes = Counter()

    def send(self, peer, now_s, dst, key, n_bytes):
        if isinstance(key, ev.SliceKey):
            self.n_bytes[key.round.kind, peer] += n_bytes

    def run(self, *arguments):
        """Not of interest."""

    recv = report = run


def test_a_table_goes_to_the_last_stage_and_a_gradient_comes_back_in_each_local_step():
    """Also in a simulation without arithmetic, which counts both."""
    config, moved = make_config("all", 2, head="tied", every_steps=4), Moved()
    simulated(config, trace=moved)
    n_bytes = N_STEPS * 4 * config.model.facts.n_split_trained
    for first, last in zip(*run_config.default_plan(config).placement, strict=True):
        assert moved.n_bytes[RoundKind.TABLE, first] == moved.n_bytes[RoundKind.GRADIENT, last] == n_bytes
    assert {kind for kind, _ in moved.n_bytes} >= {RoundKind.MEAN}
    plan = run_config.default_plan(config)
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    seconds = {peer: dict.fromkeys("FBEGU", 1.0) for peer in plan.peers}
    without = Moved()
    simulate(
        config,
        plan,
        Conditions(seconds, lambda src, dst: Link(0.1, 1.0), hosts, dict.fromkeys(hosts.values(), 1)),
        without,
    )
    exact = {RoundKind.TABLE, RoundKind.GRADIENT, RoundKind.MEAN}
    found = [{key: n for key, n in one.n_bytes.items() if key[0] in exact} for one in (moved, without)]
    assert found[0] == found[1]


def test_a_run_goes_on_from_a_checkpoint_of_the_first_stages_table():
    """The parts of all stages have each entry once, so that any cut reads it."""
    config, stores = make_config("all", 2, head="tied", every_steps=2, steps=4), {}
    simulated(config, stores)
    plan = run_config.default_plan(config)
    written = [stores[row[0]].written[4] for row in plan.placement]
    names = [set(params) for params, _ in written]
    assert "tok" in names[0] and not names[0] & names[1]
    whole = {name: tree for params, _ in written for name, tree in params.items()}
    assert sorted(whole) == sorted(init_stage(config.model, 0, config.model.n_layers, SEED))
