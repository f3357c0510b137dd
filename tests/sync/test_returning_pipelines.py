"""A pipeline that was lost comes back with the states of another one, at one moment: what its replicas hold at the end
is the replay of the log, bit for bit, also if the donor, a peer that joins or the coordinator is lost in the middle."""

import functools
from dataclasses import replace

import pytest
from test_group_replay import (
    N_STEPS,
    assert_equal_bits,
    incarnations_of,
    make_config,
    replayed,
    simulated,
)
from test_stash import stashing
from test_streaming import STREAMING

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import (
    CandidateReport,
    CheckpointReport,
    DownloadReport,
    GroupReport,
    LostReport,
    PipelineJoinReport,
    StateMeanReport,
    StepReport,
    ViewReport,
)
from jaxdt.run import config as run_config
from jaxdt.sim.faults import CRASH, PAUSE, POWER_OFF, RESTART, Fault

pytestmark = pytest.mark.xdist_group("replicas_that_differ")

LOST = 2  # a peer of the first stage, in pipeline 1
DIES = [Fault(60.0, CRASH, LOST), Fault(90.0, RESTART, LOST)]
AWAY_S = 2500.0  # longer than the time after which a silent peer is given up
ALL = make_config("all", 3, microbatches=7, every_steps=2)
WINDOW = make_config("window", 3, microbatches=7, window_s=3.0, connectivity_groups=4)
CONFIGS = {
    "streaming": make_config("all", 3, microbatches=7, layers=4, **STREAMING),
    "pairs": make_config("pairs", 3, microbatches=7),
    "none": make_config("none", 3, microbatches=7),
    "tied head": make_config(
        "window",
        3,
        microbatches=7,
        head="tied",
        window_s=3.0,
        connectivity_groups=4,
        weights="samples",
        average_moments=True,
        codec="bf16",
    ),
}


def assert_equals_replay(config, outcome, states, away=(), n_steps=N_STEPS):
    """The states of all pipelines that are there at the end equal those of the replay."""
    plan, found = run_config.default_plan(config), incarnations_of(config, outcome)
    replay = replayed(config, outcome, StateMeanReport)
    for stage, row in enumerate(plan.placement):
        for pipeline, peer in enumerate(row):
            if pipeline not in away:
                assert outcome.stopped[peer].code == 0
                assert_equal_bits(states[peer], replay.states[stage, found.last_of(pipeline)])
    rows = [report.step for report in dict.fromkeys(outcome.of(StepReport))]
    assert rows == list(range(len(rows))) and n_steps - 1 <= len(rows) <= n_steps


def returns(outcome):
    """(pipeline, donor) of each return."""
    return [(report.pipeline, report.donor) for report in dict.fromkeys(outcome.of(PipelineJoinReport))]


@functools.cache
def returned(config):
    """(outcome, states) of a run in which LOST dies and comes back, and when a peer first hears a message of a type."""
    times = {}

    def observe(now_s, peer, event, actions):
        if isinstance(event, ev.Received):
            times.setdefault((peer, type(event.body)), now_s)

    return *simulated(config, faults=DIES, observer=observe), times


@pytest.mark.parametrize("name", CONFIGS)
def test_the_process_that_is_started_again_and_those_that_have_waited_go_on_from_a_donor(name):
    config = CONFIGS[name]
    outcome, states, _ = returned(config)
    assert returns(outcome) == [(1, 0)]
    assert sorted(report.donors for report in outcome.of(DownloadReport)) == [[0], [1]]
    assert_equals_replay(config, outcome, states)
    joined = next(at_s for at_s, _, report in outcome.reports if isinstance(report, PipelineJoinReport))
    later = [r.members for at_s, _, r in outcome.reports if isinstance(r, GroupReport) and at_s > joined]
    assert any(LOST in members for members in later) == (name != "none")


def test_a_peer_that_did_nothing_for_a_while_comes_back_without_a_start():
    outcome, states = simulated(ALL, faults=[Fault(60.0, PAUSE, LOST, 1100.0)])
    assert [report.peer for report in outcome.of(LostReport)] == [LOST] and returns(outcome) == [(1, 0)]
    assert_equals_replay(ALL, outcome, states)


@pytest.mark.parametrize(
    ("config", "kind"), [(ALL, ev.State), (WINDOW, ev.DonorWaits)], ids=["all-State", "window-DonorWaits"]
)
def test_another_donor_takes_the_place_of_one_that_is_lost(config, kind):
    """When it has said that it waits, and when a slice of its state has come."""
    at_s = returned(config)[2][LOST, kind]
    outcome, states = simulated(config, faults=[*DIES, Fault(at_s + 1e-6, CRASH, 0)])
    assert returns(outcome) == [(1, 2)]
    assert_equals_replay(config, outcome, states, away={0})


@pytest.mark.parametrize("joiner", [LOST, LOST + 1])
def test_the_others_go_on_if_a_peer_that_joins_is_lost(joiner):
    at_s = returned(WINDOW)[2][joiner, ev.State]
    outcome, states = simulated(WINDOW, faults=[*DIES, Fault(at_s + 1e-6, CRASH, joiner)])
    assert not returns(outcome) and len(outcome.of(LostReport)) == 2
    assert_equals_replay(WINDOW, outcome, states, away={1})


def test_a_pipeline_may_be_lost_and_come_back_twice():
    at_s = returned(WINDOW)[2][LOST, ev.State]
    again = [Fault(at_s + 1.0, CRASH, LOST), Fault(at_s + 20.0, RESTART, LOST)]
    outcome, states = simulated(WINDOW, faults=[*DIES, *again])
    assert returns(outcome)[-1] == (1, 0)
    assert_equals_replay(WINDOW, outcome, states)


@pytest.mark.parametrize(("moment", "kind"), [(ev.DonorWaits, POWER_OFF), (ev.State, CRASH), ("joined", POWER_OFF)])
def test_the_coordinator_may_die_in_the_middle(moment, kind):
    """Before the states are there, while they come, and when the view in which the pipeline is whole is durable."""
    outcome, _, times = returned(ALL)
    views = [at_s for at_s, _, report in outcome.reports if isinstance(report, ViewReport)]
    at_s = views[-1] - 0.05 if moment == "joined" else times[LOST, moment]
    faults = [*DIES, Fault(at_s + 1e-6, kind, ev.COORDINATOR), Fault(at_s + AWAY_S, RESTART, ev.COORDINATOR)]
    outcome, states = simulated(ALL, faults=faults)
    assert returns(outcome) == [(1, 0)]
    assert_equals_replay(ALL, outcome, states)


def test_checkpoints_on_the_way_go_on():
    config = replace(WINDOW, train=replace(WINDOW.train, checkpoint_every_steps=2))
    outcome, states = simulated(config, faults=DIES)
    assert returns(outcome) == [(1, 0)]
    assert [report.version for report in outcome.of(CheckpointReport)] == [2, 4, 6, 8]
    assert_equals_replay(config, outcome, states)


def test_with_stashed_weights_the_pipeline_stays_away():
    config = stashing("all", 3, steps=N_STEPS)
    outcome, states = simulated(config, faults=DIES)
    assert not returns(outcome)
    assert {report.has_no_place for report in outcome.of(CandidateReport)} == {True}
    assert_equals_replay(config, outcome, states, away={1})
