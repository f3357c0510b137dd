"""Pools under faults of all kinds: many seeds, all invariants at every event.

More on demand: python scripts/experiments/fuzz_protocol.py --wiring=pool --seeds=16:10000"""

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WorkerLostReport
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import CRASH, CUT, DUPLICATE, JOIN, PAUSE, POWER_OFF, REORDER, RESTART, SLOW
from jaxdt.testing.case import finding, play
from jaxdt.testing.cases import draw_case

N_SEEDS = 16
N_DRAWN = 75


@pytest.mark.parametrize("low", range(0, N_SEEDS, 8))
def test_invariants_hold_under_all_faults(low):
    assert not {seed: line for seed in range(low, low + 8) if (line := finding(draw_case(seed, "pool")))}


def test_the_seeds_draw_all_that_happens_to_workers():
    cases = [draw_case(seed, "pool") for seed in range(N_DRAWN)]
    kinds = {fault.kind for case in cases for fault in case.faults if fault.peer in case.plan.workers}
    assert kinds == {CRASH, POWER_OFF, PAUSE, CUT, SLOW, DUPLICATE, REORDER, RESTART, JOIN}
    assert {case.config.sync.delay for case in cases} == {0, 1}
    assert {case.config.sync.codec for case in cases} == {"none", "bf16", "int8"}
    assert any(fault.peer in case.plan.peers and fault.may_lose for case in cases for fault in case.faults)


def test_workers_compute_and_are_lost():
    """Else the invariants would hold because nothing happens."""
    n_backwards, reasons = 0, set()
    for seed in range(N_SEEDS, N_SEEDS + 5):
        case = draw_case(seed, "pool")

        def note(now_s, peer, event, actions, workers=tuple(case.plan.workers)):
            nonlocal n_backwards
            for action in actions:
                n_backwards += isinstance(action, ev.Run) and action.work.kind == WorkKind.BACKWARD and peer in workers
                reasons.update([action.reason] if isinstance(action, WorkerLostReport) else [])

        play(case, observer=note)
    assert n_backwards > 50 and len(reasons) >= 3
