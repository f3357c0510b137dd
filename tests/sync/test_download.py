"""States that arrive for a compute thread that is busy: each is installed as one download has brought it."""

import pytest

from jaxdt.protocol import events as ev
from jaxdt.sync.transfer import FetchedStates

N_WORDS = 10


def slices(version, label):
    return [(ev.StateKey(version, lo, min(lo + 4, N_WORDS)), f"{label} {lo}") for lo in range(0, N_WORDS, 4)]


def test_slices_of_the_next_version_come_before_the_one_before_is_taken():
    states = FetchedStates(N_WORDS)
    first, second = slices(1, "first"), slices(2, "second")
    for key, words in [*first, *second[:2]]:
        states.put(key, words)
    assert states.take(1) == first
    states.put(*second[2])
    assert states.take(2) == second


def test_the_same_version_may_be_fetched_from_another_donor_before_the_first_is_taken():
    states = FetchedStates(N_WORDS)
    first, second = slices(3, "first"), slices(3, "second")
    for donor in (first, reversed(second)):
        states.begin()
        for key, words in donor:
            states.put(key, words)
    assert states.take(3) == first
    assert states.take(3) == second


@pytest.mark.parametrize("begins", [False, True])
def test_what_a_download_that_was_given_up_has_brought_is_part_of_no_state(begins):
    """Another version tells by itself that it is another download."""
    states = FetchedStates(N_WORDS)
    given_up, whole = slices(1, "given up"), slices(1 if begins else 2, "whole")
    for key, words in given_up[:2]:
        states.put(key, words)
    if begins:
        states.begin()
    for key, words in reversed(whole):
        states.put(key, words)
    assert states.take(whole[0][0].version) == whole


def test_a_state_that_is_not_whole_is_not_taken():
    states = FetchedStates(N_WORDS)
    states.put(*slices(1, "part")[0])
    with pytest.raises(RuntimeError, match="installs the state of 1 steps: the one that is whole is of None"):
        states.take(1)
