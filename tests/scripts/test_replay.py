"""scripts/tools/replay.py: when two states are the same bit for bit."""

import numpy as np
import pytest
from tools import replay

NAN = np.float32("nan")


@pytest.mark.parametrize(
    ("made", "kept", "n_unequal"),
    [
        ([1.0, NAN, np.inf], [1.0, NAN, np.inf], 0),  # after train.on_nonfinite=skip a state may hold such
        ([1.0, NAN], [1.0, 2.0], 1),
        ([0.0, 1.0], [-0.0, 1.0], 1),
    ],
)
def test_numbers_are_compared_by_their_bits(made, kept, n_unequal):
    states = [{"head": {"w": np.array(values, np.float32), "count": np.int32(3)}} for values in (made, kept)]
    assert replay.compared(*states) == (n_unequal, len(made) + 1)
