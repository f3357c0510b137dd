"""A tree of parameters, or of a whole state, as one fp32 vector, which replicas that may differ average.

Integers of a state are counters of updates. They travel as fp32, exact up to 2^24, and the mean is rounded: that of
replicas with unequal numbers of updates is the number that the mean state stands for.

n numbers of a vector."""

import itertools
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32


class FloatVector:
    """Converts between trees of the structure of `like` and vectors [n]. All leaves have 4-byte types."""

    def __init__(self, like: Any):
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        self._ends = list(itertools.accumulate(int(np.prod(shape)) for shape, _ in self._leaves))

    def of(self, tree: Any) -> Float32[np.ndarray, " n"]:
        """The vector of a tree, in a new buffer."""
        out = np.empty(self._ends[-1], np.float32)
        start = 0
        for leaf, end in zip(jax.tree.leaves(tree), self._ends, strict=True):
            out[start:end] = np.asarray(leaf).reshape(-1)
            start = end
        return out

    def tree(self, total: Float32[np.ndarray, " n"], scale: float) -> Any:
        """The tree whose vector is `total` times `scale`."""
        mean = total * np.float32(scale)
        starts = [0, *self._ends[:-1]]
        leaves = [
            _cast(mean[start:end], dtype).reshape(shape)
            for (shape, dtype), start, end in zip(self._leaves, starts, self._ends, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def _cast(numbers: Float32[np.ndarray, " n"], dtype: np.dtype) -> np.ndarray:
    return numbers if dtype == np.float32 else np.rint(numbers).astype(dtype)
