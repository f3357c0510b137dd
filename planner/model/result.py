"""What a search returns."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement [S, P] with the bound that was proved for it; history holds (seconds, cost) of every improvement."""

    placement: np.ndarray
    bound_s: float
    proved: bool
    evaluations: int
    time_s: float
    history: list[tuple[float, float]]
