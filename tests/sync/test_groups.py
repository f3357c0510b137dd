"""Runs whose replicas may differ, as far as timing and members go: without arithmetic, under virtual time."""

import pytest

from jaxdt.protocol.events import COORDINATOR
from jaxdt.protocol.reports import GroupReport, PipelineEndReport, StepReport
from jaxdt.sim.faults import CRASH, LEAVE, Fault
from jaxdt.sim.predict import Conditions, simulate
from jaxdt.spec.config import default_plan, parse
from jaxdt.spec.network import Link

N_STEPS = 12


def make_config(match="all", pipelines=2, **groups):
    return parse(
        {
            "model": {"preset": "debug", "tied_head": False},
            "plan": {"stages": 2, "pipelines": pipelines, "microbatches": 2 * pipelines},
            "train": {"steps": N_STEPS, "microbatch_size": 2},
            "wiring": {"kind": "independent"},
            "sync": {"kind": "groups", "groups": {"match": match, **groups}},
        },
        vocab_size=64,
    )


def outcome_of(config, slow_pipeline=None, faults=()):
    """With a pipeline that takes four times as long, if one is given."""
    plan = default_plan(config)
    seconds = {"F": 1.0, "B": 2.0, "E": 1.0, "G": 0.1, "U": 0.1}
    factor = {peer: 4 if plan.seat(peer)[1] == slow_pipeline else 1 for peer in plan.peers}
    by_peer = {peer: {kind: s * factor[peer] for kind, s in seconds.items()} for peer in plan.peers}
    hosts = {peer: f"h{peer}" for peer in plan.peers}
    conditions = Conditions(by_peer, lambda src, dst: Link(0.01, 1.0), hosts, dict.fromkeys(hosts.values(), 1))
    return simulate(config, plan, conditions, faults=faults, until_s=1e5)


def ends(outcome):
    return {report.pipeline: report.n_steps for report in outcome.of(PipelineEndReport)}


@pytest.mark.parametrize("match", ["all", "pairs", "none", "window"])
def test_pipelines_of_one_speed_do_equal_shares(match):
    outcome = outcome_of(make_config(match))
    assert outcome.stopped[COORDINATOR].code == 0
    assert [report.step for report in outcome.of(StepReport)] == list(range(N_STEPS))
    assert ends(outcome) == {0: N_STEPS, 1: N_STEPS}


@pytest.mark.parametrize("match", ["none", "window"])
def test_a_fast_pipeline_does_what_a_slow_one_does_not(match):
    """The run ends as soon as there are enough steps in all; each pipeline finishes the one under way."""
    equal, unequal = outcome_of(make_config("all"), slow_pipeline=1), outcome_of(make_config(match), slow_pipeline=1)
    steps = ends(unequal)
    assert steps[0] >= 2 * steps[1] and 2 * N_STEPS <= sum(steps.values()) <= 2 * N_STEPS + 2
    assert len(unequal.of(StepReport)) == N_STEPS and unequal.now_s < 0.7 * equal.now_s


def test_a_window_without_end_forms_the_groups_of_all():
    every, window = (
        [(report.stage, report.k, report.members, report.steps) for report in outcome.of(GroupReport)]
        for outcome in (
            outcome_of(make_config("all", 3), slow_pipeline=1),
            outcome_of(make_config("window", 3, window_s=float("inf"), connectivity_groups=0), slow_pipeline=1),
        )
    )
    assert every == window and len(every) == 2 * N_STEPS


@pytest.mark.parametrize("kind", [CRASH, LEAVE])
def test_a_run_ends_in_one_line_when_a_peer_is_lost(kind):
    """It cannot go on without one yet, and says so."""
    outcome = outcome_of(make_config("window"), faults=[Fault(30.0, kind, 2)])
    stop = outcome.stopped[COORDINATOR]
    assert stop.code == 3 and "peer 2 (stage 0)" in stop.reason and "cannot go on without" in stop.reason
    assert all(outcome.stopped[peer] == stop for peer in (0, 1, 3))
