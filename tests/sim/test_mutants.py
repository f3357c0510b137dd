"""The fuzzer finds every planted mistake, by an invariant that it should break, on seeds that pass without it."""

import pytest
from mutants import MUTANTS, check_found

from jaxdt.testing.cases import draw_case


@pytest.mark.parametrize("name", MUTANTS)
def test_the_fuzzer_finds_the_mutant_and_nothing_without_it(name):
    check_found(MUTANTS[name], draw_case)
