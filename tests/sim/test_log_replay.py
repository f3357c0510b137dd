"""The replay of a run's log, with residues: it fits its own run, and no other log does."""

import math
from dataclasses import replace

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.incarnations import Incarnations
from jaxdt.protocol.reports import GroupReport, PipelineEndReport, PullReport, PushReport
from jaxdt.run.errors import BadInput
from jaxdt.testing.case import play
from jaxdt.testing.cases import draw_case
from jaxdt.testing.independent.residues import Residues
from jaxdt.testing.replay import SERVER, Replay, gradient_scales


def calm_run(sync):
    """A case without faults whose replicas meet, and its outcome."""
    for seed in range(20):
        case = replace(draw_case(seed, sync), faults=(), nonfinite=None)
        outcome, _ = play(case)
        n_meetings = len([group for group in outcome.of(GroupReport) if len(group.members) > 1])
        if outcome.stopped[ev.COORDINATOR].code == 0 and n_meetings + len(outcome.of(PushReport)) > 3:
            return case, outcome
    pytest.fail("no case whose replicas meet")


def replayed(case, outcome, groups=(), logs=()):
    ends = outcome.of(PipelineEndReport)
    arithmetic, plan = Residues(case.config, case.plan), case.plan
    replay = Replay(case.config, plan, arithmetic, Incarnations(plan.n_pipelines), has_trails=True)
    replay.run({end.pipeline: end.n_steps for end in ends}, groups, logs)
    return replay


def test_another_log_is_not_that_of_the_run():
    case, outcome = calm_run("groups")
    groups = outcome.of(GroupReport)
    replay = replayed(case, outcome, groups)
    assert replay.states == replayed(case, outcome, groups).states
    number = next(n for n, group in enumerate(groups) if len(group.members) > 1)
    assert replayed(case, outcome, [*groups[:number], *groups[number + 1 :]]).states != replay.states
    early = replace(groups[number], steps=[0, *groups[number].steps[1:]])
    assert replayed(case, outcome, [*groups[:number], early, *groups[number + 1 :]]).states != replay.states


def test_a_log_that_cannot_be_done_is_refused_in_one_line():
    case, outcome = calm_run("server")
    logs = [[] for _ in case.plan.placement]
    for _, _, report in outcome.reports:
        if isinstance(report, PushReport | PullReport):
            logs[report.stage].append(report)
    assert [one.what for one in replayed(case, outcome, logs=logs).trails[0, SERVER]] == ["push"] * sum(
        isinstance(report, PushReport) for report in logs[0]
    )
    first = next(report for report in logs[0] if isinstance(report, PullReport))
    with pytest.raises(BadInput, match=r"^log: after .* local steps of .* 1 entries are left, first \[P[^\n]*$"):
        replayed(case, outcome, logs=[[*logs[0], first], *logs[1:]])


def test_a_gradient_is_scaled_by_its_samples_and_clipped_by_the_pipeline_or_the_stage():
    config = draw_case(0, "groups").config
    optim = replace(config.optim, clip_norm=1.0)
    of_pipeline = replace(
        config, optim=optim, sync=replace(config.sync, groups=replace(config.sync.groups, clip="pipeline"))
    )
    of_stage = replace(of_pipeline, sync=replace(config.sync, groups=replace(config.sync.groups, clip="stage")))
    assert gradient_scales(of_pipeline, 1, [9.0, 16.0]) == [1 / 5, 1 / 5]
    assert gradient_scales(of_stage, 2, [16.0, 1.0]) == [1 / 4, 1 / 2]
    assert gradient_scales(of_pipeline, 1, [9.0, math.nan]) == [0.0, 0.0]
    assert gradient_scales(of_stage, 1, [0.0, math.inf]) == [1.0, 0.0]
    assert gradient_scales(replace(of_pipeline, optim=replace(optim, clip_norm=0.0)), 4, [9.0, 16.0]) == [1 / 4, 1 / 4]
