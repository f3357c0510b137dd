"""The choice of averaging groups: SDPipe's scheduler under random traces, the pairs of a step, and refused configs."""

import math
import random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_traces import ACTIONS, Play, Setup, random_trace

from jaxdt.run.config import GroupsConfig, default_plan, parse
from jaxdt.sync.matching import window_length
from jaxdt.sync.matching.base import Matched, matcher_entry
from jaxdt.sync.matching.pairs import MatchPairs
from jaxdt.sync.matching.sync_graph import Groups, Sliding
from jaxdt.sync.matching.token import EnforcementToken
from jaxdt.sync.matching.window import MatchWindow
from jaxdt.sync.matching.window_length import StepTime, WindowLength

SETUPS = st.builds(
    Setup,
    n_stages=st.integers(1, 3),
    n_pipelines=st.integers(1, 6),
    n_groups=st.integers(2, 6),
    window=st.sampled_from(["sliding", "tumbling"]),
    group_size_max=st.sampled_from([0, 2]),
)
EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(ACTIONS), st.integers(0, 2), st.integers(0, 5)),
    min_size=20,
    max_size=80,
)


def matcher(n=4, token=None, **fields):
    return matcher_entry("window").build(
        GroupsConfig(match="window", **fields), 0, tuple(range(n)), token or EnforcementToken()
    )


def members(matched):
    return [group.members for group in matched.groups]


# ------------------------------------------------------------------------------------------------------ random traces


@settings(max_examples=60)
@given(SETUPS, EVENTS)
def test_every_trace_keeps_the_rules(setup, trace):
    first = Play(setup, EnforcementToken()).run(trace)
    again = Play(setup, EnforcementToken()).run(trace)
    assert again.groups == first.groups


def stale_timer_counts(self, now_s, tag, timer=MatchWindow.timer):
    return timer(self, now_s, self._window)


def closes_as_it_is(self, now_s, tag):
    return self._close(now_s, "timeout") if tag == self._window and self._ready else Matched()


def leaves_unnoticed(self, now_s, peer):
    self._replicas.discard(peer)
    self._ready.pop(peer, None)
    return Matched()


def ends_nothing(self, now_s, peer):
    self._replicas.discard(peer)
    self._ready.pop(peer, None)
    return (self._close_if_complete(now_s) if self._ready else None) or Matched()


def forgets_nobody(self, n_groups, keep=Groups.keep):
    keep(self, n_groups + 1)


def forgets_early(self, n_groups, keep=Groups.keep):
    keep(self, n_groups - 1)


def closes_without_check(self, now_s):
    if len(self._ready) == len(self._replicas) or self._phase.name == "ENFORCING":
        return self._close(now_s, "full" if len(self._ready) == len(self._replicas) else "enforced")
    return None


def ends_window_keeps_token(self):
    self._ready = {}
    self._phase = type(self._phase).IDLE


MUTANTS = {
    "a timer of an earlier window closes this one": (MatchWindow, "timer", stale_timer_counts),
    "no check at the end of a window": (MatchWindow, "timer", closes_as_it_is),
    "who leaves is still waited for": (MatchWindow, "on_left", leaves_unnoticed),
    "a window without replicas stays open": (MatchWindow, "on_left", ends_nothing),
    "one group too many connects": (Groups, "keep", forgets_nobody),
    "one group too few connects": (Groups, "keep", forgets_early),
    "enforcing ends with the next arrival": (MatchWindow, "_close_if_complete", closes_without_check),
    "the token stays": (MatchWindow, "_end_window", ends_window_keeps_token),
    "T has no upper limit": (window_length, "min", lambda a, b: a),
    "T has no lower limit": (window_length, "max", lambda a, b: a / 2),
    "a newcomer is not connected to its donor": (Groups, "join", lambda self, peer, donor: None),
    "a failed group still connects": (Sliding, "replace", lambda self, number, members: None),
    "a check comes one group late": (Sliding, "is_due", property(lambda self: self._groups.n_closed > self._n_kept)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_breaks_a_rule(name):
    with mock.patch.object(*MUTANTS[name], create=True):
        for seed in range(100):
            setup, trace = random_trace(seed)
            try:
                Play(setup, EnforcementToken()).run(trace)
            except AssertionError:
                return
    pytest.fail("no trace shows it")


# ------------------------------------------------------------------------------------------------------ the scheduler


def closed_by(matcher, readies, until_s=math.inf):
    """(time, members, cause) of all groups when replicas are ready at these (time, peer, step)."""
    groups, timers = [], []

    def note(now_s, matched):
        timers.extend([matched.timer] if matched.timer else [])
        groups.extend((now_s, group.members, group.cause) for group in matched.groups)

    for now_s, peer, step in [*readies, (until_s, None, 0)]:
        for timer in sorted(timer for timer in timers if timer[0] < now_s):
            timers.remove(timer)
            note(timer[0], matcher.timer(*timer))
        if peer is not None:
            note(now_s, matcher.ready(now_s, peer, step))
    return groups


def test_a_window_opens_with_the_first_arrival_and_closes_after_t():
    rule = matcher(4, window_s=1.0, connectivity_groups=0)
    readies = [(5.0, 2, 1), (5.5, 0, 1), (6.1, 1, 1)]
    assert closed_by(rule, readies) == [(6.0, (0, 2), "timeout"), (6.1 + 0.9, (1,), "timeout")]


def test_after_a_restart_a_window_of_a_share_ends_though_no_step_is_measured():
    """Else two pipelines could wait for each other: each has a group at one stage, and none at another."""
    new, again = matcher(4, connectivity_groups=0), matcher(4, connectivity_groups=0)
    again.on_restarted(2.0)
    assert new.ready(5.0, 2, 9).timer is None
    assert again.ready(5.0, 2, 9).timer == (5.0 + 2.0 / 4, 1)


def test_all_who_are_ready_need_no_window():
    rule = matcher(2, window_s=1.0)
    assert closed_by(rule, [(5.0, 1, 1), (5.5, 0, 1)]) == [(5.5, (0, 1), "full")]


def test_it_enforces_until_the_last_groups_connect_all():
    """With 3 groups in a row: {0, 1}, {2, 3}, and then 0 has to wait for 2 or 3; 1 alone would not do."""
    rule = matcher(4, window_s=1.0, connectivity_groups=3)
    readies = [(0.0, 0, 1), (0.1, 1, 1), (2.0, 2, 1), (2.1, 3, 1), (4.0, 0, 2), (50.0, 1, 2), (60.0, 3, 2)]
    last = closed_by(rule, readies)[-1]
    assert last == (60.0, (0, 1, 3), "enforced")


def test_another_stage_that_enforces_suspends_the_check():
    token = EnforcementToken()
    rule = matcher(3, token, window_s=1.0, connectivity_groups=2)
    rule.ready(0.0, 0, 1)
    rule.timer(1.0, 1)
    token.take("another stage")
    rule.ready(2.0, 1, 1)
    [group] = rule.timer(3.0, 2).groups
    assert (group.members, group.suspended, group.enforced) == ((1,), True, False)
    token.release("another stage")
    rule.ready(4.0, 2, 1)
    assert rule.timer(5.0, 3) == Matched() and token.holder is rule
    rule.on_left(5.5, 2)
    assert token.holder is None


def test_a_tumbling_window_checks_once_in_so_many_arrivals():
    """With three replicas and two groups for each, the sixth arrival waits until the graph is connected."""
    rule = matcher(3, window_s=1.0, connectivity_groups=2, connectivity_window="tumbling")
    alone = [(10.0 * step + 2 * peer, peer, step) for step in (1, 2) for peer in range(3)]
    groups = closed_by(rule, [*alone, (100.0, 0, 3), (150.0, 1, 3), (170.0, 0, 4)])
    assert groups[:5] == [(at_s + 1.0, (peer,), "timeout") for at_s, peer, _ in alone[:5]]
    assert groups[5:] == [(150.0, (0, 1, 2), "full"), (170.9, (0,), "timeout")]


def test_a_check_that_becomes_due_in_an_open_window_is_for_the_next_one():
    """The sixth arrival of three replicas comes into a window that is open: that group is not suspended."""
    rule = matcher(3, window_s=1.0, connectivity_groups=2, connectivity_window="tumbling")
    for step in (1, 2):
        rule.ready(10.0 * step, 0, step)
        rule.timer(10.0 * step + 1.0, 2 * step - 1)
        rule.ready(10.0 * step + 2.0, 1, step)
        rule.timer(10.0 * step + 3.0, 2 * step)
    rule.ready(30.0, 0, 3)
    rule.ready(30.1, 1, 3)  # the sixth arrival: a check is due from the next window on
    [group] = rule.timer(31.0, 5).groups
    assert (group.members, group.suspended) == ((0, 1), False)
    rule.ready(40.0, 0, 4)
    assert rule.timer(41.0, 6) == Matched() and rule.ready(50.0, 2, 1).groups[0].enforced


def test_t_doubles_after_a_group_of_one_and_shrinks_after_others():
    length = WindowLength(8.0, 0.0)
    lengths = []
    for n_members in (2, 2, 1, 3, *[4] * 60):
        length.adapt(n_members)
        lengths.append(length.seconds)
    assert lengths[:4] == pytest.approx([7.2, 6.48, 8.0, 7.2])
    assert lengths[-1] == pytest.approx(0.08)


def test_without_seconds_t_is_a_share_of_the_measured_step():
    """The first group has all, since no step is measured yet, and the time from a group to the next arrival counts, not
    the wait for a group. Three steps in six seconds are three of two seconds."""
    rule = matcher(2, window_frac=0.25, connectivity_groups=0)
    readies = [(0.0, 0, 1), (70.0, 1, 1), (76.0, 0, 4)]
    assert closed_by(rule, readies) == [(70.0, (0, 1), "full"), (76.0 + 0.9 * 0.25 * 2.0, (0,), "timeout")]
    half = StepTime()
    half.began(0.0, 0, 1)
    half.on_left(0)
    half.on_ended(5.0, 0, 2)
    assert half.seconds == math.inf


def test_a_step_that_is_told_again_is_not_measured():
    steps = StepTime()
    steps.began(0.0, 0, 3)
    steps.on_ended(5.0, 0, 3)
    assert steps.seconds == math.inf
    steps.began(10.0, 0, 3)
    steps.on_ended(14.0, 0, 5)
    assert steps.seconds == 2.0


def test_the_share_is_one_part_in_as_many_as_there_are_replicas():
    rule = matcher(4, connectivity_groups=0)
    first = [(0.0, peer, 1) for peer in range(4)]
    assert closed_by(rule, [*first, (8.0, 0, 2)])[-1] == (8.0 + 0.9 * 8.0 / 4, (0,), "timeout")


def test_with_one_group_in_a_row_it_is_the_rule_all():
    rule = matcher(3, window_s=1.0, connectivity_groups=1)
    assert closed_by(rule, [(0.0, 0, 1), (10.0, 1, 1), (20.0, 2, 1)]) == [(20.0, (0, 1, 2), "full")]


def test_four_groups_for_each_replica_are_the_default():
    rule, alone = matcher(2, window_s=1.0), [(10.0 * step, 0, step) for step in range(1, 9)]
    assert len(closed_by(rule, alone, until_s=1e3)) == 7


@pytest.mark.parametrize("n", [1, 3])
def test_an_endless_window_is_the_rule_all(n):
    rng = random.Random(3)
    readies = [(step + rng.random(), peer, step) for step in range(1, 30) for peer in range(n)]
    readies.sort()
    plain = matcher_entry("all").build(GroupsConfig(), 0, tuple(range(n)), EnforcementToken())
    assert closed_by(matcher(n, window_s=math.inf, connectivity_groups=0), readies) == closed_by(plain, readies)


def test_an_endless_window_waits_for_all_also_where_a_check_is_due_and_few_would_do():
    """After losses the groups of before connect those who are left. A group of some would be waited for elsewhere."""
    rule = matcher(4, window_s=math.inf, connectivity_groups=2, connectivity_window="tumbling")
    for step in (1, 2, 3):
        assert [members(rule.ready(float(step), peer, step)) for peer in range(4)] == [[], [], [], [(0, 1, 2, 3)]]
    rule.on_left(3.5, 2, 3)
    assert members(rule.ready(4.0, 0, 4)) == []
    assert members(rule.ready(4.1, 1, 4)) == [(0, 1)]


def test_a_replica_that_comes_back_does_not_connect_what_it_knew_before():
    rule = matcher(3, window_s=1.0, connectivity_groups=3)
    rule.ready(0.0, 0, 1)
    rule.ready(0.1, 2, 1)
    assert members(rule.timer(1.0, 1)) == [(0, 2)]
    rule.on_left(1.1, 2)
    rule.on_joined(1.2, 2, 1)
    rule.ready(1.3, 1, 1)
    rule.ready(1.4, 2, 2)
    assert members(rule.timer(2.3, 2)) == [(1, 2)]
    rule.ready(2.4, 1, 2)
    assert members(rule.timer(3.4, 3)) == [], "replica 0 has met only the one that is gone"
    assert members(rule.ready(3.5, 0, 2)) == [(0, 1)]


def test_a_window_of_no_time_leaves_everyone_alone():
    rng = random.Random(4)
    readies = sorted((step + rng.random(), peer, step) for step in range(1, 20) for peer in range(4))
    groups = closed_by(matcher(4, window_s=1e-9, connectivity_groups=0), readies, until_s=1e3)
    assert len(groups) == len(readies) and all(len(members) == 1 for _, members, _ in groups)


def test_first_come_pairs_have_two_at_most():
    rule = matcher(5, window_s=1.0, group_size_max=2, connectivity_groups=0)
    groups = closed_by(rule, [(0.1 * peer, peer, 1) for peer in range(5)])
    assert groups == [(0.1, (0, 1), "cap"), (pytest.approx(0.3), (2, 3), "cap"), (pytest.approx(1.21), (4,), "timeout")]


def test_nobody_is_ready_twice_or_from_elsewhere():
    rules = matcher(3, window_s=1.0), MatchPairs((0, 1, 2), 0)
    for rule in rules:
        step = next(s for s in range(20) if not rule.ready(0.0, 0, s).groups)
        with pytest.raises(ValueError, match="peer 0 .*is ready already"):
            rule.ready(0.1, 0, step + 1)
        with pytest.raises(ValueError, match="peer 7 .*is no replica"):
            rule.ready(0.1, 7, 1)


# -------------------------------------------------------------------------------------------------------------- pairs


def mates(n, seed=0, n_steps=40, stage=0):
    """Groups of each step, when replicas are ready in a random order."""
    rng, replicas = random.Random(n), tuple(10 * stage + peer for peer in range(n))
    rule = matcher_entry("pairs").build(GroupsConfig(match="pairs", seed=seed), stage, replicas, EnforcementToken())
    steps = []
    for step in range(1, n_steps + 1):
        order = rng.sample(replicas, n)
        steps.append(sorted(group for peer in order for group in members(rule.ready(0.0, peer, step))))
    return steps


def test_the_step_says_who_averages_with_whom():
    steps = mates(6)
    assert all(len(groups) == 3 and {len(group) for group in groups} == {2} for groups in steps)
    assert len({tuple(groups) for groups in steps}) > 10
    assert [[tuple(peer - 10 for peer in group) for group in groups] for groups in mates(6, stage=1)] == steps
    assert mates(6, seed=1) != steps


def test_of_an_odd_number_one_stays_alone():
    for groups in mates(5):
        assert sorted(map(len, groups)) == [1, 2, 2]


def pair_of(rule, step):
    """A replica that waits at this step, and its mate."""
    for peer in range(3):
        if not rule.ready(0.0, peer, step).groups:
            break
    return peer, rule._mate(peer, step)


def test_who_waits_for_one_that_leaves_goes_on_alone():
    rule = MatchPairs((0, 1, 2), 0)
    peer, mate = pair_of(rule, 1)
    [group] = rule.on_left(1.0, mate).groups
    assert group.members == (peer,)
    assert rule.on_left(2.0, mate) == Matched()


def test_a_newcomer_takes_the_open_place_and_is_waited_for_only_where_it_comes():
    """A newcomer begins with a later step than that at which its mate waits for it."""
    rule = MatchPairs((0, 1), 0)
    rule.on_left(0.0, 0)
    rule.on_joined(0.0, 9, 1)
    assert rule.ready(1.0, 1, 4) == Matched()
    assert members(rule.ready(2.0, 9, 6)) == [(1,)]
    assert members(rule.ready(3.0, 1, 6)) == [(1, 9)]
    assert rule.ready(4.0, 9, 7) == Matched()
    assert members(rule.ready(5.0, 1, 8)) == [(9,)]


# -------------------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (dict(group_size_max=1), "sync.groups.group_size_max: got 1"),
        (dict(group_size_max=2, window_s=math.inf), "sync.groups.window_s: got inf"),
        (dict(group_size_max=2, window_s=1.0), ""),
        (dict(window_s=math.inf), ""),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, problem):
    config = parse({"model": {"preset": "debug"}, "sync": {"groups": {"match": "window", **fields}}})
    assert matcher_entry("window").check(config, default_plan(config)).startswith(problem)
    assert bool(problem) == bool(matcher_entry("window").check(config, default_plan(config)))
