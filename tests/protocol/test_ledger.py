import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdt.protocol.ledger import Ledger, cover_problem


def test_a_ledger_counts_items_and_samples_per_step():
    ledger = Ledger()
    ledger.add(4, (1, 2), 8)
    ledger.add(4, (1, 0), 3)
    ledger.add(5, (1, 2), 1)
    assert ledger.items(4) == ((1, 0), (1, 2))
    assert (ledger.n_samples(4), ledger.n_samples(5), ledger.n_samples(6)) == (11, 1, 0)
    ledger.free([4])
    assert ledger.items(4) == () and ledger.items(5) == ((1, 2),)
    ledger.free([4])


def test_an_item_counts_once():
    ledger = Ledger()
    ledger.add(4, (1, 2), 8)
    with pytest.raises(RuntimeError, match=r"step 4: the gradient of \(1, 2\) was added twice"):
        ledger.add(4, (1, 2), 8)


@pytest.mark.parametrize(
    ("sets", "stages", "problem"),
    [
        ({0: [(0, 0), (0, 2)], 1: [(0, 1)]}, (0,), ""),
        ({0: [(0, 0), (0, 1), (0, 2)], 1: []}, (0,), ""),
        ({0: [(0, 0), (0, 1), (0, 2)], 5: [(3, 0), (3, 1), (3, 2)]}, (0, 3), ""),
        ({0: [(0, 0), (0, 1)], 1: [(0, 1), (0, 2)]}, (0,), "(0, 1) is in the sets of members 0 and 1"),
        ({0: [(0, 0), (0, 0), (0, 1), (0, 2)]}, (0,), "(0, 0) is in the sets of members 0 and 0"),
        ({0: [(0, 0)], 1: []}, (0,), "2 items are missing, first (0, 1)"),
        ({}, (0,), "3 items are missing, first (0, 0)"),
        ({0: [(0, 0), (0, 1), (0, 2)]}, (0, 3), "3 items are missing, first (3, 0)"),
        ({0: [(0, 0), (0, 1), (0, 2), (0, 3)]}, (0,), "(0, 3) does not belong to the round"),
        ({0: [(0, 0), (0, 1), (0, 2), (1, 0)]}, (0,), "(1, 0) does not belong to the round"),
    ],
)
def test_cover_of_three_microbatches(sets, stages, problem):
    assert cover_problem(sets, stages, 3) == problem


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.data())
def test_only_an_exact_cover_is_good(holder_of, data):
    """Microbatch m sits with member holder_of[m]; then one item is taken away or put in somewhere else as well."""
    n = len(holder_of)
    sets = {member: {(2, m) for m in range(n) if holder_of[m] == member} for member in range(4)}
    assert cover_problem(sets, [2], n) == ""
    m, member = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, 3))
    sets[member] ^= {(2, m)}
    assert cover_problem(sets, [2], n) != ""
