"""The fuzzer of independent pipelines finds every planted mistake, on seeds that pass without it."""

import re
from dataclasses import replace
from unittest import mock

import pytest
from independent_mutants import MUTANTS

from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.fuzz.independent.cases import draw_case, finding
from jaxdt.sim.fuzz.independent.invariants import ONE_MEAN
from jaxdt.sync.groups import Groups


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fuzzer_finds_the_mutant_and_nothing_without_it(name):
    mutate, patched, revealed_by, seeds = MUTANTS[name]
    others = []
    for seed in seeds:
        with patched():
            line = finding(draw_case(seed), mutate)
        broken = re.search(r" s: \((\d+)\) ", line)
        if (int(broken[1]) if broken else line.partition(":")[0]) in revealed_by:
            assert not finding(draw_case(seed))
            return
        others += [line] if line else []
    pytest.fail(f"not caught among {seeds}: {others}")


def test_a_member_that_contributes_again_to_a_group_whose_result_it_holds_is_found():
    """It takes a loss at a certain moment: a member says that it holds the result while the others are told to average
    again."""
    case = replace(draw_case(15, "groups"), faults=(Fault(1.5808473743464397, CRASH, 14),))
    with mock.patch.object(Groups, "_held_attempt", lambda groups, round: None):
        assert f"({ONE_MEAN})" in finding(case)
    assert not finding(case)
