"""The result of a search."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Solution:
    """A placement [S, P], its cost, and the bound that was proved for every placement. history holds (seconds, cost) of
    every improvement, by_solver those that each solver made itself. An infinite cost_s says that no plan without
    missing links was found, an infinite bound_s that there is none."""

    placement: np.ndarray
    cost_s: float
    bound_s: float
    proved: bool
    evaluations: int
    time_s: float
    history: list[tuple[float, float]]
    by_solver: dict[str, list[tuple[float, float]]]
