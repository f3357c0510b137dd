"""Held-out losses on the way where replicas may differ: those of the mean of the parameters that the log names."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import reference_models
from test_group_replay import BATCH, N_HELD_OUT, Tokens, make_config, replayed, simulated
from test_stash import stashing

from jaxdt.build import build_coordinator
from jaxdt.membership.coordinator import Coordinator
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import CheckpointReport, HeldOutMeanReport, StepReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run import config as run_config
from jaxdt.sync.scheduling.open_groups import OpenGroups
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.scheduling.snapshots import Keepers, Snapshots
from jaxdt.sync.scheduling.step_budget import StepBudget

pytestmark = pytest.mark.xdist_group("replicas_that_differ")


def evaluated(config, every, **train):
    return replace(config, train=replace(config.train, eval_every_steps=every, eval_microbatches=N_HELD_OUT, **train))


CASES = {
    "window": make_config("window", 3, microbatches=7, window_s=3.0, connectivity_groups=4),
    "outer": make_config("all", 2, every_steps=4, outer="nesterov"),
    "lag": make_config("all", 3, microbatches=7, every_steps=3, lag_steps=2, mix_frac=0.5),
    "one pipeline": make_config("none", 1),
    "stash": stashing("window", 3, 8, window_s=3.0),
    "tied head": make_config("window", 3, microbatches=7, head="tied", window_s=3.0),
}


@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_whole_model_at_the_mean_of_the_parameters(name):
    config = evaluated(CASES[name], 3, checkpoint_every_steps=3)
    n_pipelines = config.plan.pipelines
    outcome, _ = simulated(config)
    rows = outcome.of(StepReport)
    assert [report.step for report in rows] == list(range(8))
    losses = {report.step + 1: report.eval_loss for report in rows if report.eval_loss is not None}
    assert set(losses) == {3, 6, 8}
    means = outcome.of(HeldOutMeanReport)
    assert all(len(mean.members) == n_pipelines for mean in means)
    replay = replayed(config, outcome, HeldOutMeanReport)
    samples = [Tokens().eval_batch(m, BATCH, 8) for m in range(N_HELD_OUT)]
    for version in losses:
        found = [replay.mean_state(mean)[0] for mean in means if mean.version == version]
        params = {name: tree for of_stage in found for name, tree in of_stage.items()}
        total = sum(float(reference_models.loss_sum(config.model, params, x[:, :-1], x[:, 1:])) for x in samples)
        assert losses[version] == pytest.approx(total / (N_HELD_OUT * BATCH), rel=1e-5)
    assert [report.version for report in outcome.of(CheckpointReport)] == [3, 6, 8]


def test_they_change_nothing_of_the_training():
    """Where timing does not decide which replicas average."""
    states = [simulated(config)[1] for config in (make_config("all", 2), evaluated(make_config("all", 2), 2))]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_rows_are_told_in_order_though_every_one_wants_a_loss():
    """A loss that is due while another waits is left out, but not that of the result."""
    outcome, _ = simulated(evaluated(make_config("none", 3, microbatches=7), 1))
    rows = outcome.of(StepReport)
    assert [report.step for report in rows] == list(range(8))
    assert rows[0].eval_loss is not None and rows[-1].eval_loss is not None
    assert rows[-1].eval_loss < rows[0].eval_loss


def test_a_mean_that_no_pipeline_can_measure_is_closed_and_its_row_is_told():
    """Pipeline 1 comes back after row 2 and takes part in that row's mean. The coordinator does not know that it does,
    so when pipeline 0 is lost while it measures the loss, nobody can."""
    config = evaluated(make_config("all", 2), 2)
    plan, peers = run_config.default_plan(config), lambda pipeline: {row[pipeline] for row in plan.placement}
    stages = {peer: plan.seat(peer)[0] for peer in plan.peers}
    terms = CoordinatorConfig("r", "f", stages, 2, 0, 0, config.train.steps, config.seq_lengths, "stop", 1.0, 4.0)
    pipelines, groups = Pipelines(plan), OpenGroups()
    budget = StepBudget(terms, plan, pipelines)
    snapshots = Snapshots(terms, config, plan, pipelines, budget, groups, Keepers(pipelines.replicas, RoundKind.STATE))
    budget.rows.begin(0.0)
    pipelines.keep(peers(0))
    pipelines.on_joined(ev.PipelineJoin(1, donor=0, step=0, admission=2, n_rows=2))

    def do_rows(steps):
        done = [(step, src) for step in steps for src in plan.placement[0]]
        heard = [budget.hear(1.0, src, ev.StepDone(step, 1, ev.Tally(1.0, 1), 1.0)) for step, src in done]
        return [action for actions in heard for action in snapshots.after_rows(actions)]

    formed = {action.body.round.stage: action.body for action in do_rows(range(3)) if isinstance(action, ev.Send)}
    assert [row.step for row in budget.untold().new] == [0]  # row 2 waits for its loss, and row 3 for row 2
    told = []
    for stage, body in formed.items():
        assert body.round == RoundId(RoundKind.HELD_OUT, stage, 2)
        told = snapshots.on_mean(stage, body.round, body.members, [(member, 2) for member in body.members])
    asked = [action for action in told if isinstance(action, ev.Send)]
    assert {action.dst for action in asked} == peers(0) and {type(action.body) for action in asked} == {ev.EvaluateMean}
    pipelines.keep(peers(1))
    actions = snapshots.on_lost()
    assert {action.dst: action.body for action in actions} == {
        peer: ev.GroupClosed(formed[stages[peer]].round) for peer in peers(1)
    }
    assert [(row.step, row.eval_loss) for row in budget.untold().new] == [(0, None), (1, None), (2, None)]
    do_rows(range(3, 4))
    assert RoundId(RoundKind.HELD_OUT, 0, 4) in groups.rounds  # the next loss is measured


@pytest.mark.parametrize("every", (0, 1, 3))
def test_a_stop_ends_the_run_with_a_checkpoint_of_the_mean(every, monkeypatch):
    """After the next row, though later rows wait for held-out losses; the checkpoint says whose mean it is."""
    config = make_config("window", 3, microbatches=7, window_s=3.0, steps=20)
    config = evaluated(config, every, checkpoint_every_steps=every)
    stores, made = {}, []

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

    monkeypatch.setattr("test_group_replay.build_coordinator", build)
    with pytest.raises(AssertionError, match="interrupted after 5 steps, of which there is a checkpoint"):
        simulated(config, stores)
    written = {peer: list(store.written) for peer, store in stores.items() if hasattr(store, "written")}
    assert all(5 in of_peer and (every or len(of_peer) == 1) for of_peer in written.values()) and set(written) == {0, 1}
    assert made[0]._checkpoints.checkpoint.version == 5
    mean_of = made[0]._checkpoints.checkpoint.mean_of
    plan = run_config.default_plan(config)
    assert [[peer for peer, _ in members] for members in mean_of] == [sorted(row) for row in plan.placement]
    assert all(0 < n_steps < 20 for members in mean_of for _, n_steps in members)
