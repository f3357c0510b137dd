"""The fuzzer finds every planted mistake, by a promise that it should break, on seeds that pass without it."""

import independent_mutants
import pytest
from mutants import MUTANTS, check_found
from pool_mutants import POOL_MUTANTS

FAMILIES = {"": MUTANTS, "pool": POOL_MUTANTS, "independent": independent_mutants.MUTANTS}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, family in FAMILIES.items() for name in family])
def test_the_fuzzer_finds_the_mutant_and_nothing_without_it(kind, name):
    check_found(FAMILIES[kind][name], kind)
