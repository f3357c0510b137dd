"""Held-out losses and checkpoints on the way where servers hold the parameters: they are those of what the servers keep
aside, with the same pushes at every stage, and the workers go on meanwhile."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
import reference_models
import test_server
from test_group_replay import N_HELD_OUT, Tokens
from test_server import BATCH, N_STEPS, make_config, replayed, result_of, trained

from jaxdt.build import build_coordinator
from jaxdt.membership.coordinator import Coordinator
from jaxdt.model.float_vector import FloatVector
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import (
    CheckpointReport,
    HeldOutMeanReport,
    KeptReport,
    LostReport,
    RestartedReport,
    StateMeanReport,
    StepReport,
)
from jaxdt.run import config as run_config
from jaxdt.runtime.storage.store import Store
from jaxdt.sim.faults import CRASH, POWER_OFF, RESTART, Fault

pytestmark = pytest.mark.xdist_group("replicas_that_differ")


class WritingStore(Store):
    """Keeps what it is told to write, as it is then."""

    def write_checkpoint(self, version):
        self.__dict__.setdefault("written", {})[version] = jax.tree.map(np.array, self.state_of(version))


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    """Those of the last run, by peer."""
    made = {}

    def make(config, plan, peer, data, functions):
        made[peer] = WritingStore(config, plan, peer, data, functions)
        return made[peer]

    monkeypatch.setattr("test_server.Store", make)
    return made


def kept_aside(staleness, wave, eval_every=2, checkpoint_every=2, **settings):
    config = make_config(staleness, wave, **settings)
    train = dict(eval_every_steps=eval_every, eval_microbatches=N_HELD_OUT, checkpoint_every_steps=checkpoint_every)
    return replace(config, train=replace(config.train, **train))


def assert_kept_aside_as_replayed(config, outcome, stores):
    """Held-out losses and checkpoints are those of the replay of the servers' logs, these bit for bit. Returns the
    versions of the losses and of the checkpoints."""
    replay = replayed(config, outcome)
    samples = [Tokens().eval_batch(m, BATCH, 8) for m in range(N_HELD_OUT)]
    losses = {report.step + 1: report.eval_loss for report in outcome.of(StepReport) if report.eval_loss is not None}
    for version, loss in losses.items():
        params = {}
        for stage, snapshot in replay.snapshots[version, False].items():
            params |= replay.served_state(stage, replay.servers[stage], snapshot.vector)[0]
        total = sum(float(reference_models.loss_sum(config.model, params, x[:, :-1], x[:, 1:])) for x in samples)
        assert loss == pytest.approx(total / (N_HELD_OUT * BATCH), rel=1e-5)
    versions = {report.version for report in outcome.of(CheckpointReport)}
    for report in outcome.of(KeptReport):
        if report.version not in getattr(stores[report.worker], "written", {}):
            continue  # its pipeline was lost before
        params, moments = stores[report.worker].written[report.version]
        got = FloatVector(params).of(params)
        np.testing.assert_array_equal(got, replay.snapshots[report.version, True][report.stage].vector)
        jax.tree.map(np.testing.assert_array_equal, moments, replay.states_of(report)[0][1])
    return set(losses), versions


def assert_same_pushes(outcome, left):
    """At all stages, of the pipelines that are left."""
    for kind in (HeldOutMeanReport, StateMeanReport):
        steps = {}
        for report in outcome.of(kind):
            steps.setdefault(report.version, set()).add(tuple(report.steps[pipeline] for pipeline in left))
        assert all(len(of_stages) == 1 for of_stages in steps.values()), steps


@pytest.mark.parametrize(("staleness", "wave", "head"), [(2, 1, "untied"), (0, 3, "tied")])
def test_they_are_those_of_the_servers_logs(staleness, wave, head, stores):
    config = kept_aside(staleness, wave, head=head)
    outcome, states = trained(config)
    losses, versions = assert_kept_aside_as_replayed(config, outcome, stores)
    assert {2, N_STEPS} <= losses <= {2, 4, N_STEPS} and versions & {2, 4} and N_STEPS in versions
    assert [report.step for report in outcome.of(StepReport)] == list(range(N_STEPS))
    assert_same_pushes(outcome, range(3))
    replay = replayed(config, outcome)
    for stage, row in enumerate(run_config.default_plan(config).placement):
        jax.tree.map(np.testing.assert_array_equal, states[min(row)], jax.device_get(result_of(replay, stage)))


def test_workers_go_on_while_a_loss_is_measured():
    """Steps end between the moment when a snapshot begins and that when its loss is known."""
    outcome, _ = trained(kept_aside(2, 1, checkpoint_every=0))
    times = {"begin": [], "end": [], "step": []}
    for at_s, _, report in outcome.reports:
        kind = {"SnapshotReport": "begin", "HeldOutMeanReport": "end", "PushReport": "step"}.get(type(report).__name__)
        if kind:
            times[kind].append(at_s)
    assert [at_s for at_s in times["step"] if times["begin"][0] < at_s < times["end"][0]]


MOMENTS = {
    "the first server is asked": (ev.GroupFormed, lambda body: not body.holders, 1),
    "another server hears the cut": (ev.SnapshotCut, lambda body: True, 1),
    "a server has its snapshot": (ev.ResultHeld, lambda body: True, 1),
    "a worker is told to keep it": (ev.GroupFormed, lambda body: body.holders, 1),
}


@functools.cache
def times():
    """When the things of MOMENTS are heard in the run without faults."""
    heard = {name: [] for name in MOMENTS}

    def observe(now_s, peer, event, actions):
        for name, (kind, is_it, _) in MOMENTS.items():
            if isinstance(event, ev.Received) and isinstance(event.body, kind) and is_it(event.body):
                heard[name].append(now_s)

    simulation = test_server.Simulation
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("test_server.Simulation", lambda *args, **kinds: simulation(*args, **kinds, observer=observe))
        trained(kept_aside(1, 2))
    return {name: heard[name][number - 1] + 1e-6 for name, (*_, number) in MOMENTS.items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("the first server is asked", POWER_OFF),
        ("a worker is told to keep it", CRASH),
    ],
)
def test_a_coordinator_that_is_started_again_goes_on_with_them(name, kind, stores):
    """With POWER_OFF what is on its way is lost. The fuzzer draws all moments, here and in the next test."""
    config, at_s = kept_aside(1, 2), times()[name]
    outcome, _ = trained(
        config, faults=[Fault(at_s, kind, ev.COORDINATOR), Fault(at_s + 2500.0, RESTART, ev.COORDINATOR)]
    )
    assert len(outcome.of(RestartedReport)) == 1 and not outcome.of(LostReport)
    losses, versions = assert_kept_aside_as_replayed(config, outcome, stores)
    assert N_STEPS in losses and N_STEPS in versions
    assert [report.step for report in dict.fromkeys(outcome.of(StepReport))] == list(range(N_STEPS))
    assert_same_pushes(outcome, range(3))


@pytest.mark.parametrize(("name", "lost"), [("another server hears the cut", 1), ("a server has its snapshot", 0)])
def test_a_pipeline_may_be_lost_meanwhile(name, lost, stores):
    """Here the one that measures and keeps; another one does it."""
    config = kept_aside(1, 2)
    outcome, _ = trained(config, faults=[Fault(times()[name], CRASH, lost)])
    assert [report.peer for report in outcome.of(LostReport)] == [lost]
    losses, versions = assert_kept_aside_as_replayed(config, outcome, stores)
    assert losses and N_STEPS in versions
    plan = run_config.default_plan(config)
    assert_same_pushes(outcome, [pipeline for pipeline in range(3) if pipeline != plan.seat(lost)[1]])


@pytest.mark.parametrize("every", (0, 1, 3))
def test_a_stop_ends_the_run_with_a_checkpoint_of_the_servers_parameters(every, stores, monkeypatch):
    """After the next row, though later rows wait for held-out losses; the checkpoint says of which workers it holds how
    many local steps."""
    config, made = kept_aside(1, 1, eval_every=every, checkpoint_every=every, steps=20), []

    class Interrupted(Coordinator):
        is_asked = False

        def handle(self, now_s, event):
            actions = super().handle(now_s, event)
            if self.n_committed < 4 or self.is_asked:
                return actions
            self.is_asked = True
            return [*actions, *super().handle(now_s, ev.StopRequested())]

    def build(*arguments):
        coordinator = build_coordinator(*arguments)
        coordinator.__class__ = Interrupted
        made.append(coordinator)
        return coordinator

    monkeypatch.setattr("test_server.build_coordinator", build)
    with pytest.raises(AssertionError, match="interrupted after 5 steps, of which there is a checkpoint"):
        trained(config)
    written = {peer: list(store.written) for peer, store in stores.items() if hasattr(store, "written")}
    assert all(5 in of_peer and (every or len(of_peer) == 1) for of_peer in written.values()) and set(written) == {0, 1}
    assert made[0]._checkpoints.checkpoint.version == 5
    first, *others = made[0]._checkpoints.checkpoint.mean_of
    plan = run_config.default_plan(config)
    assert [peer for peer, _ in first] == list(plan.placement[0])
    assert all([n for _, n in of_stage] == [n for _, n in first] for of_stage in others)
    assert all(0 < n < 20 for _, n in first)
