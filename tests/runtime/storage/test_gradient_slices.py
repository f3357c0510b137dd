import numpy as np
import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.runtime.storage.gradient_slices import GradientSlices, RoundAborted

ROUND = RoundId(RoundKind.GRADIENT, 0, 3, view=1)


def test_parts_of_an_aborted_round_are_ignored_until_it_is_opened_again():
    """As its result that others hold is fetched, which a superseded coordinator had made void here."""
    slices = GradientSlices(0)
    key = ev.SliceKey(ROUND, 0, 2, None)
    slices.forget(ROUND)
    slices.put(key, np.ones(2, np.float32))
    slices.reopen(ROUND)
    assert not slices._slices
    slices.put(key, np.full(2, 2.0, np.float32))
    assert slices.result(ROUND).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("n_held", [0, 1])
def test_the_sum_of_a_round_that_was_aborted_is_not_there(n_held):
    """Another thread may abort it meanwhile: first it marks the round, then it deletes the slices one by one."""
    slices = GradientSlices(0)
    for lo in range(n_held):
        slices.put(ev.SliceKey(ROUND, lo, lo + 1, None), np.ones(1, np.float32))
    slices._aborted[ROUND] = None
    with pytest.raises(RoundAborted, match="was aborted"):
        slices.result(ROUND)
