"""The fuzzer finds every planted mistake, by an invariant that it should break, on seeds that pass without it."""

import re

import pytest
from mutants import MUTANTS

from jaxdt.sim.fuzz.cases import draw_case, finding


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fuzzer_finds_the_mutant_and_nothing_without_it(name):
    mutate, patched, invariants, seeds = MUTANTS[name]
    with patched():
        found = {seed: finding(draw_case(seed), mutate) for seed in seeds}
    broken = {seed: re.search(r" s: \((\d+)\) ", line) for seed, line in found.items()}
    caught = [seed for seed, match in broken.items() if match and int(match[1]) in invariants]
    assert caught, f"not caught among {seeds}: {[line for line in found.values() if line]}"
    assert not any(finding(draw_case(seed)) for seed in caught)
