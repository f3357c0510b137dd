"""Members that lose one another and keep their coordinator: who has to go, and that it does not go on for ever."""

import math
from dataclasses import replace

import pytest
from report_fields import report_fields

from jaxdt.membership.evictions import LinkSuspicion
from jaxdt.membership.roster import BACKOFF_STEPS_MAX, Roster
from jaxdt.protocol import events as ev
from jaxdt.sim.faults import CUT, Fault
from jaxdt.testing.case import play
from jaxdt.testing.cases import draw_case

STAGES = {0: 0, 1: 1, 2: 0, 3: 1, 4: 0}
PATIENCE_S = 1.0


def roster(admissions=(), joining=(), stages=STAGES):
    """Everybody was admitted in view 1, but for `admissions`."""
    members = tuple(ev.Member(peer, stage, dict(admissions).get(peer, 1)) for peer, stage in stages.items())
    found = Roster(stages, 2, 1)
    found.adopt(ev.View(5, 1, 0, members, (1, 1), 0, joining=joining))
    return found


def judged(*accusations, here=None, after_s=PATIENCE_S, replaceable=()):
    suspicion = LinkSuspicion(PATIENCE_S)
    for src, peer in accusations:
        suspicion.accuse(10.0, src, peer, "no link")
    found = suspicion.judged(10.0 + after_s, here or roster(), replaceable)
    return found and found[0]


def test_an_accusation_waits_for_the_others():
    assert judged((0, 1), after_s=0.9) is None
    assert judged((0, 1)) is not None
    suspicion = LinkSuspicion(PATIENCE_S)
    at_s = suspicion.accuse(10.1, 0, 1, "no link")
    assert suspicion.judged(at_s, roster()) is not None  # to the last bit


@pytest.mark.parametrize("accusations", [[(0, 1)], [(1, 0)], [(0, 1), (1, 0)]])
def test_whoever_speaks_first_the_one_who_came_last_goes(accusations):
    assert judged(*accusations) == 1
    assert judged(*accusations, here=roster({0: 3})) == 0


def test_who_has_lost_most_goes():
    """Peer 0 was cut off from all, and accuses everyone before anyone accuses it."""
    assert judged((0, 1), (0, 2), (0, 3), (2, 0)) == 0
    assert judged((1, 3), (0, 3), (0, 1)) in (1, 3)


def test_the_last_of_a_stage_stays_while_the_other_end_can_be_spared():
    sole = {0: 0, 1: 1, 2: 0}
    assert judged((0, 1), here=roster(stages=sole)) == 0
    assert judged((0, 1), here=roster({1: 4}, stages=sole)) == 0


def test_one_whose_state_another_peer_has_goes_rather_than_the_last_of_a_stage():
    sole = {0: 0, 1: 1}
    assert judged((0, 1), here=roster(stages=sole)) == 1
    assert judged((0, 1), here=roster(stages=sole), replaceable={0}) == 0


def test_a_newcomer_without_state_goes_at_once():
    here = roster({4: 5}, joining=(4,))
    assert judged((4, 0), here=here, after_s=0.0) == 4
    assert judged((0, 4), here=here, after_s=0.0) == 4
    assert judged((2, 2), after_s=0.0) == 2, "who accuses itself has said it all"


def test_what_was_said_of_one_who_is_gone_does_not_count():
    here = roster()
    here.lose(0.0, 1, is_dead=True)
    assert judged((0, 1), here=here) is None


def test_one_eviction_mends_all_that_it_can():
    suspicion, here = LinkSuspicion(PATIENCE_S), roster()
    for src, peer in ((0, 1), (0, 2), (0, 3)):
        suspicion.accuse(0.0, src, peer, "no link")
    assert suspicion.judged(2.0, here) == (0, "no link (said by peer 0 of peer 1)")
    here.lose(0.0, 0, is_dead=True)
    assert suspicion.judged(3.0, here) is None


def test_who_is_put_out_again_and_again_comes_back_more_and_more_rarely():
    """A link that stays broken for a whole run of 60 steps."""
    case = next(case for seed in range(100) if (case := draw_case(seed)).plan.n_pipelines == 3 and not case.nonfinite)
    steps = 60
    config = replace(case.config, train=replace(case.config.train, steps=steps))
    one, other = case.plan.placement[0][0], case.plan.placement[1][1]
    case = replace(case, config=config, faults=(Fault(0.5, CUT, one, math.inf, others=(other,)),))
    outcome, _ = play(case)
    lost = report_fields(outcome, "lost")
    assert {fields["peer"] for fields in lost} == {max(one, other)}
    assert 2 <= len(lost) <= 2 + math.log2(steps)
    assert len(report_fields(outcome, "step")) == steps


def test_an_eviction_long_ago_is_forgiven():
    here, step = roster(), 0
    for n in range(1, 20):
        here.lose(0.0, 1, is_dead=True)
        view = here.next_view(False, step, (), 0)
        here.adopt(view)
        here.on_ready(1, None)
        waited = 0
        while (back := here.next_view(True, step + waited, (), 0)) is None:
            waited += 1
        assert waited == (0 if n == 1 else min(2 ** (n - 1), BACKOFF_STEPS_MAX))
        here.adopt(back)
        here.on_committed(200)
        step += waited
    step += 1000
    here.lose(0.0, 1, is_dead=True)
    here.adopt(here.next_view(False, step, (), 0))
    here.on_ready(1, None)
    assert here.next_view(True, step, (), 0) is not None
    assert [peer for peer, known in here.peers.items() if known.n_evictions] == [1]


def test_who_leaves_with_the_next_view_cannot_stand_in():
    """Peer 3 moves to another stage with a view that is on its way to the disk, and peer 1 is lost meanwhile."""
    here = roster(stages={0: 0, 1: 1, 2: 0, 3: 1})
    without = replace(here.view, number=6, members=tuple(one for one in here.view.members if one.peer != 3))
    assert not here.lose(0.0, 1, True, without) and here.missing == {1} and not here.lost
    here = roster(stages={0: 0, 1: 1, 2: 0, 3: 1})
    assert here.lose(0.0, 1, is_dead=True) and here.lost == {1}
