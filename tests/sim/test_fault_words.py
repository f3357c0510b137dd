"""The faults of a simulation are printed as sentences that say what happens to whom."""

import pytest

from jaxdt.protocol import events as ev
from jaxdt.sim.fault_report import EFFECTS, sentence
from jaxdt.sim.faults import CLOG, CRASH, CUT, DATA, DRAWERS, DUPLICATE, JOIN, SLOW, Fault


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (
            Fault(1.5, DUPLICATE, 4, 0.25, others=(ev.COORDINATOR, 0, 1)),
            "some messages from peer 4 to peers 0, 1 and the coordinator arrive twice for 0.250 s",
        ),
        (Fault(1.5, CRASH, ev.TEMPORARY_IDS + 2), "the process of newcomer 2 is killed"),
        (Fault(1.5, SLOW, 1, 2.0, factor=10.0), "peer 1 takes 10 times as long for its work for 2.000 s"),
        (
            Fault(1.5, CLOG, 1, 2.0, others=(3,), factor=0.1),
            "the link from peer 1 to peer 3 has 0.1 of its bandwidth for 2.000 s",
        ),
        (
            Fault(1.5, CLOG, 1, 2.0, others=(3,), factor=0.0, channel=DATA),
            "tensors from peer 1 to peer 3 are held back for 2.000 s",
        ),
        (
            Fault(1.5, CUT, 2, 8.0, beside=(1,), others=(ev.COORDINATOR,)),
            "peers 1, 2 cannot reach the coordinator, nor the other way round, for 8.000 s, which both sides notice "
            "after 6 s",
        ),
        (
            Fault(1.5, CUT, 1, 2.0, others=(3,)),
            "peer 1 cannot reach peer 3, nor the other way round, for 2.000 s",
        ),
        (Fault(1.5, JOIN, 3, others=(5,)), "newcomer 3 asks to join, on the machine of peer 5"),
    ],
)
def test_a_fault_is_a_sentence(fault, text):
    assert sentence(fault) == f"1.500 s: {text}"


def test_every_kind_that_is_drawn_or_comes_from_a_trace_has_a_sentence():
    assert set(EFFECTS) == {*DRAWERS, JOIN}
