"""The fuzzer finds every planted mistake, by the invariants that it should break; without one the same seeds pass
(test_fuzz_protocol.py plays them)."""

import re

import pytest
from mutants import MUTANTS
from test_fuzz_protocol import N_SEEDS

from jaxdt.sim.fuzz import draw_case, finding


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fuzzer_finds_the_mutant(name):
    mutate, patched, which, seeds = MUTANTS[name]
    assert seeds.stop <= N_SEEDS, "the unmutated code must pass the same seeds"
    with patched():
        found = next(filter(None, (finding(draw_case(seed), mutate) for seed in seeds)), None)
    assert found, f"not found in {seeds}"
    number = re.search(r"s: \((\d)\) ", found)
    assert number and int(number[1]) in which, found
