"""The result of a search."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement [S, P], its cost, and the bound that was proved for every placement. An infinite cost_s says that no
    plan without missing links was found, an infinite bound_s that there is none."""

    placement: np.ndarray
    cost_s: float
    bound_s: float
    proved: bool
    evaluations: int
    time_s: float
