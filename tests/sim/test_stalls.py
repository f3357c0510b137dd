"""Stalls are decided by seed, peer and step (or Work) alone."""

import pytest

from jaxdt.run.errors import BadInput
from jaxdt.run.work import Work, WorkKind
from jaxdt.sim.stragglers.stalls import WORK, PeerStalls, Stalls, parse


def drawn(stalls, peer=0, n_steps=200, n_microbatches=3):
    """(step, kind, microbatch) of each Work with a stall."""
    peer_stalls = PeerStalls(stalls, peer)
    works = [
        Work(1, kind, microbatch, peer, step)
        for step in range(n_steps)
        for microbatch in range(n_microbatches)
        for kind in (WorkKind.FORWARD, WorkKind.BACKWARD)
    ]
    return [(work.step, work.kind, work.microbatch) for work in works if peer_stalls.before_s(work) == stalls.seconds]


def test_one_draw_a_step_falls_on_its_first_forward():
    found = drawn(Stalls(0.2, 0.5))
    assert 20 < len(found) < 60 and {(kind, microbatch) for _, kind, microbatch in found} == {(WorkKind.FORWARD, 0)}


def test_one_draw_for_each_work():
    found = drawn(Stalls(0.2, 0.5, draws=WORK))
    assert 180 < len(found) < 300 and {kind for _, kind, _ in found} == {WorkKind.FORWARD, WorkKind.BACKWARD}


@pytest.mark.parametrize("draws", ["step", WORK])
def test_seed_and_peer_decide(draws):
    stalls = Stalls(0.2, 0.5, 7, draws)
    assert drawn(stalls) == drawn(stalls)
    assert drawn(stalls) != drawn(stalls, peer=1)
    assert drawn(stalls) != drawn(Stalls(0.2, 0.5, 8, draws))


def test_the_order_of_work_does_not_matter_with_one_draw_for_each():
    stalls = Stalls(0.5, 0.5, draws=WORK)
    works = [
        Work(0, kind, m, 3, step)
        for step in range(4)
        for m in range(3)
        for kind in (WorkKind.FORWARD, WorkKind.BACKWARD)
    ]
    forth, back = PeerStalls(stalls, 3), PeerStalls(stalls, 3)
    assert [forth.before_s(work) for work in works] == [back.before_s(work) for work in works[::-1]][::-1]


def test_steps_that_overlap_stall_once_each():
    stalls = PeerStalls(Stalls(1.0, 0.5), 0)
    order = [
        (WorkKind.FORWARD, 0),
        (WorkKind.FORWARD, 1),
        (WorkKind.BACKWARD, 0),
        (WorkKind.FORWARD, 1),
        (WorkKind.FORWARD, 0),
        (WorkKind.FORWARD, 2),
    ]
    assert [stalls.before_s(Work(0, kind, 0, 0, step)) > 0 for kind, step in order] == [True, True, *[False] * 3, True]


@pytest.mark.parametrize("kind", [WorkKind.EVALUATE, WorkKind.GATHER, WorkKind.UPDATE])
def test_only_forwards_and_backwards_stall(kind):
    assert PeerStalls(Stalls(1.0, 0.5, draws=WORK), 0).before_s(Work(0, kind, None, 0, 3)) == 0


def test_text():
    assert parse("0.1,0.3,5") == Stalls(0.1, 0.3, 5)
    assert parse("0.1,0.3,5,work") == Stalls(0.1, 0.3, 5, WORK)


@pytest.mark.parametrize("text", ["", "0.1", "0.1,0.3", "0.1,0.3,x", "2,0.3,0", "0.1,-1,0", "0.1,inf,0", "0.1,1,0,all"])
def test_wrong_text_is_refused(text):
    with pytest.raises(BadInput, match="stall: "):
        parse(text)
