"""The fuzzer finds every planted mistake, by a promise that it should break, on seeds that pass without it."""

from dataclasses import replace
from unittest import mock

import independent_mutants
import pytest
from mutants import MUTANTS, check_found
from pool_mutants import POOL_MUTANTS

from jaxdt.protocol import events as ev
from jaxdt.sim.faults import CRASH, CRASH_SEEN_S, CUT, HOLD, Fault
from jaxdt.testing.case import Busy, finding
from jaxdt.testing.cases import draw_case
from jaxdt.testing.promises import APPLICABLE
from jaxdt.testing.symbolic_tensors import SymbolicTensors

FAMILIES = {"": MUTANTS, "pool": POOL_MUTANTS, "independent": independent_mutants.MUTANTS}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, family in FAMILIES.items() for name in family])
def test_the_fuzzer_finds_the_mutant_and_nothing_without_it(kind, name):
    check_found(FAMILIES[kind][name], kind)


@pytest.mark.parametrize("seed", [14, 34])
def test_a_result_that_was_void_once_and_stays_void_is_found(seed):
    """It takes several losses in one step. A peer is evicted once its step's results are there, while an operator's
    pause holds the commit back, and gives them up. Then the other replica of its stage ends, so it comes back in the
    middle of that step. The last stage holds the result of the tied table, and gives it to the peer again."""
    case = draw_case(seed)
    wiring = replace(case.config.wiring, on_stage_lost="wait", stage_grace_s=20.0)
    case = replace(case, config=replace(case.config, wiring=wiring), faults=(), busy=Busy())
    evicted, other = case.plan.placement[0]
    prepared_s = []

    def observe(now_s, peer, event, actions):
        if peer == evicted and any(isinstance(a, ev.Send) and isinstance(a.body, ev.Prepared) for a in actions):
            prepared_s.append(now_s)

    assert not finding(case, observer=observe)
    at_s = prepared_s[1]
    faults = (
        Fault(at_s - 1.0, HOLD, ev.COORDINATOR, 40.0),
        Fault(at_s - 1e-3, CUT, evicted, 5.0, others=(ev.COORDINATOR,), breaks_s=CRASH_SEEN_S),
        Fault(at_s + 12.0, CRASH, other),
    )
    case = replace(case, faults=faults)
    assert not finding(case)
    with mock.patch.object(SymbolicTensors, "reopen", lambda tensors, round: None):
        assert f"({APPLICABLE})" in finding(case)
