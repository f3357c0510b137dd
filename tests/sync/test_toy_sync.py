"""A sync that is one file and one entry of a table: it runs under faults, and equals the replay of its log."""

from dataclasses import replace

import pytest
from test_group_replay import N_STEPS, make_config, simulated
from test_returning_pipelines import DIES, LOST, assert_equals_replay, returns

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import CheckpointReport, GroupReport, LostReport, StepReport
from jaxdt.run import config as run_config
from jaxdt.sim.faults import CRASH, RESTART, Fault
from jaxdt.sync.base import SYNCS

pytestmark = pytest.mark.xdist_group("replicas_that_differ")


@pytest.fixture(params=["tied"])
def ring(monkeypatch, request):
    """A run of three pipelines whose sync is the toy's."""
    monkeypatch.setitem(SYNCS, "ring", "toy_sync")
    config = make_config("all", 3, microbatches=7, steps=2 * N_STEPS, head=request.param)
    train = replace(config.train, checkpoint_every_steps=5, eval_every_steps=4, eval_microbatches=2)
    return replace(config, train=train, sync=replace(config.sync, kind="ring"))


RESTARTED = [Fault(70.0, CRASH, ev.COORDINATOR), Fault(80.0, RESTART, ev.COORDINATOR)]


@pytest.mark.parametrize(
    ("ring", "faults"),
    [("untied", DIES), ("tied", [*DIES, *RESTARTED])],
    ids=["a pipeline is lost and comes back", "and the coordinator is started again"],
    indirect=["ring"],
)
def test_it_runs_under_faults_and_equals_its_replay(ring, faults):
    outcome, states = simulated(ring, faults=faults)
    assert_equals_replay(ring, outcome, states, n_steps=2 * N_STEPS)
    assert any(len(report.members) == 2 for report in outcome.of(GroupReport))
    assert {report.peer for report in outcome.of(LostReport)} == {LOST}
    assert returns(outcome)
    losses = [report.step for report in outcome.of(StepReport) if report.eval_loss is not None]
    assert losses and outcome.of(CheckpointReport)


def test_each_replica_averages_with_both_of_its_neighbours(ring):
    ring = replace(ring, plan=replace(ring.plan, pipelines=4, microbatches=8))
    outcome, _ = simulated(ring)
    met = {(report.stage, *report.members) for report in outcome.of(GroupReport) if len(report.members) == 2}
    rows = run_config.default_plan(ring).placement
    assert met == {(s, *sorted((row[p], row[(p + 1) % 4]))) for s, row in enumerate(rows) for p in range(4)}
