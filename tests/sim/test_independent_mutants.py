"""Planted mistakes in the protocol of replicas that may differ which take a moment that no seed draws. All others: the
table in independent_mutants.py."""

from collections import defaultdict
from dataclasses import replace
from unittest import mock

from independent_mutants import old_messages_count, wants_are_told_again

from jaxdt.protocol import events as ev
from jaxdt.sim.faults import CRASH, POWER_OFF, RESTART, Fault
from jaxdt.sync.engine import RoundEngine
from jaxdt.testing.case import Busy, finding, play
from jaxdt.testing.cases import draw_case
from jaxdt.testing.promises import ONE_MEAN, REPLAYED


def test_a_member_that_contributes_again_to_a_group_whose_result_it_holds_is_found():
    """It takes a loss at a certain moment: a member says that it holds the result while the others are told to average
    again."""
    case = replace(draw_case(15, "groups"), faults=(Fault(1.5808473743464397, CRASH, 14),), busy=Busy())
    with mock.patch.object(RoundEngine, "at", lambda engine, id: None):
        assert f"({ONE_MEAN})" in finding(case)
    assert not finding(case)


def test_a_peer_that_reads_what_was_sent_before_it_came_back_is_found():
    """It hears late of a group in which it was before, and tells the next coordinator of it."""
    case = draw_case(3255, "groups")
    with old_messages_count():
        assert f"({REPLAYED})" in finding(case)
    assert not finding(case)


def without_some_members(case):
    """The case with a coordinator that dies, with what is on its way, when some members of a group were told of it and
    others were not, and that is started again."""
    told = defaultdict(list)

    def observe(now_s, peer, event, actions):
        if isinstance(event, ev.Received) and isinstance(event.body, ev.GroupFormed):
            told[event.body.round].append(now_s)

    play(case, observer=observe)
    first_s, *_, last_s = next(times for times in told.values() if times[0] < times[-1])
    at_s = (first_s + last_s) / 2
    return replace(case, faults=(Fault(at_s, POWER_OFF, ev.COORDINATOR), Fault(at_s + 8.0, RESTART, ev.COORDINATOR)))


def test_a_replica_that_gets_another_group_than_the_one_that_was_formed_before_a_restart_is_found():
    cases = [without_some_members(replace(draw_case(seed, "groups"), faults=())) for seed in (10, 12)]
    assert not [line for case in cases if (line := finding(case))]
    with wants_are_told_again():
        assert [line for case in cases if (line := finding(case))]
