"""The change that a worker makes to the parameters of a server, and its addition at the server.

A run and its replay in one process compute both with these functions, so that they come to the same bits. n numbers of
a stage's parameters."""

from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxdt.model.float_vector import FloatVector


class PushedChange:
    """A worker's changes, each since the one before or since the last pull."""

    def __init__(self) -> None:
        self._base: Float32[np.ndarray, " n"] | None = None  # the parameters as the server has them of this worker

    def pulled(self, params_n: Float32[np.ndarray, " n"]) -> None:
        """The server's parameters have taken the place of the worker's. The vector is kept, and not written to."""
        self._base = params_n

    def next(self, params: Any) -> Float32[np.ndarray, " n"]:
        """The change since the last call or pull, up to `params`."""
        assert self._base is not None, "a worker begins with a pull"
        params_n = FloatVector(params).of(params)
        change_n = params_n - self._base
        self._base = params_n
        return change_n


def with_change(params: Any, change_n: Float32[np.ndarray, " n"]) -> Any:
    """The parameters with a change added."""
    layout = FloatVector(params)
    return layout.tree(layout.of(params) + change_n, 1.0)
