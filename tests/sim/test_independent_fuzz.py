"""Independent pipelines under stalls, blips and losses: many seeds, all invariants at every event.

More on demand: python scripts/experiments/fuzz_protocol.py --wiring=independent --seeds=20:5000"""

from collections import Counter

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport, StateMeanReport
from jaxdt.sim.faults import CRASH
from jaxdt.testing.case import finding, play
from jaxdt.testing.cases import HARMLESS_KINDS, LOSSES, draw_case, kinds_of
from jaxdt.testing.invariants import InvariantBroken

N_SEEDS = 20


@pytest.mark.parametrize("low", range(0, N_SEEDS, 10))
def test_invariants_hold(low):
    found = {seed: line for seed in range(low, low + 10) if (line := finding(draw_case(seed, "independent")))}
    assert not found


def test_a_checkpoint_of_which_no_member_knew_when_the_coordinator_died_is_left_out_for_a_later_one():
    """Both were due at the same moment. One of which a member knew is not left out."""
    outcome, invariants = play(draw_case(5153, "independent"))
    means = {(report.version, report.stage) for report in outcome.of(StateMeanReport)}
    assert means == {(version, 0) for version in range(1, 9) if version != 3}
    with pytest.raises(InvariantBroken, match="means of states"):
        invariants._check_checkpoints(means - {(2, 0)})


def test_the_seeds_draw_all_kinds():
    """Otherwise the fuzzer would check less than it claims."""
    drawn = [draw_case(seed, "independent") for seed in range(600)]
    assert kinds_of(drawn) >= {*HARMLESS_KINDS, *LOSSES}
    assert any(fault.kind == CRASH and fault.peer == ev.COORDINATOR for case in drawn for fault in case.faults)
    groups = [case.config.sync.groups for case in drawn if case.config.sync.kind == "groups"]
    windows = [one for one in groups if one.match == "window"]
    assert {one.match for one in groups} == {"window", "all", "pairs", "none"}
    assert {one.outer for one in groups} == {"none", "sgd", "nesterov"}
    assert {one.connectivity_window for one in windows} == {"sliding", "tumbling"}
    assert min(one.every_steps for one in groups) < max(one.every_steps for one in groups)
    assert {case.plan.schedule for case in drawn} >= {"1f1b", "gpipe", "stash"}
    codecs = {(case.config.sync.kind, case.config.sync.codec) for case in drawn}
    of_groups = {("groups", codec) for codec in ("none", "bf16", "int8")}
    assert codecs == {*of_groups, ("server", "none"), ("server", "int8")}
    assert {case.config.train.eval_every_steps for case in drawn} >= {0, 1, 2, 3}
    assert {one.fragments for one in groups} == {1, 2, 3} and {one.lag_steps for one in groups} >= {0, 1, 2}
    assert {one.mix_frac for one in groups} == {0.0, 0.25, 0.5}
    assert {one.weights for one in groups} == {"equal", "samples"}
    assert {one.clip for one in groups} == {"pipeline", "stage"}
    assert {one.average_moments for one in groups} == {False, True}
    tied = [case for case in drawn if case.config.model.tied_head]
    assert {case.plan.n_stages for case in tied} == {1, 2, 3, 4} and {case.plan.schedule for case in tied} >= {"stash"}
    assert {case.config.sync.kind for case in tied} == {"groups", "server"}
    servers = [case.config.sync.server for case in drawn if case.config.sync.kind == "server"]
    assert {one.staleness for one in servers} >= {0, 1, 2} and {one.wave for one in servers} >= {1, 2, 3}
    with_servers = [case.config.train for case in drawn if case.config.sync.kind == "server"]
    assert {one.eval_every_steps for one in with_servers} == {one.checkpoint_every_steps for one in with_servers}
    assert {one.eval_every_steps for one in with_servers} == {0, 1, 2, 3}
    assert {case.plan.n_stages for case in drawn} == {1, 2, 3, 4}
    assert {case.plan.n_pipelines for case in drawn} == {1, 2, 3, 4, 5}


def test_the_rules_are_put_to_the_test():
    """Stages enforce, groups are suspended, clocks come as far apart as they may, and some runs end early."""
    codes, sizes, enforced, suspended, leads = Counter(), set(), 0, 0, set()
    for seed in (7, 8, 12, 16, 19, 25, 27, 39, 47, 59):
        case = draw_case(seed, "independent")
        outcome, invariants = play(case)
        codes[outcome.stopped[ev.COORDINATOR].code] += 1
        groups = outcome.of(GroupReport)
        sizes |= {len(group.members) for group in groups}
        enforced += sum(group.enforced for group in groups)
        suspended += sum(group.suspended for group in groups)
        leads |= {case.config.sync.server.staleness == invariants.lead > 0}
    assert enforced and suspended and sizes >= {1, 2, 3} and True in leads and {0, 4} <= codes.keys(), (codes, sizes)


def test_pipelines_that_formed_groups_crosswise_before_a_restart_do_not_wait_for_each_other():
    case = draw_case(2228, "groups")
    assert case.config.sync.groups.match == "window" and not case.config.sync.groups.window_s
    outcome, _ = play(case)
    assert outcome.stopped[ev.COORDINATOR].code == 0


def test_equal_seeds_play_equally():
    def events(seed):
        lines = []
        play(draw_case(seed, "independent"), observer=lambda *observed: lines.append(str(observed)))
        return lines

    first = events(1)
    assert first == events(1) and len(first) > 100
