"""The fuzzer finds every planted mistake, by an invariant that it should break, on seeds that pass without it."""

import re

import pytest
from mutants import MUTANTS

from jaxdt.sim.fuzz.cases import draw_case, finding


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fuzzer_finds_the_mutant_and_nothing_without_it(name):
    mutate, patched, invariants, seeds = MUTANTS[name]
    others = []
    for seed in seeds:
        with patched():
            line = finding(draw_case(seed), mutate) or ""
        broken = re.search(r" s: \((\d+)\) ", line)
        if broken and int(broken[1]) in invariants:
            assert not finding(draw_case(seed))
            return
        others += [line] if line else []
    pytest.fail(f"not caught among {seeds}: {others}")
