"""The fuzzer of independent pipelines finds every planted mistake, on seeds that pass without it."""

import re

import pytest
from independent_mutants import MUTANTS

from jaxdt.sim.fuzz.independent.cases import draw_case, finding


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
