"""A stage's parameters and optimizer state as one vector of 4-byte words, in slices that a newcomer fetches."""

import itertools
import zlib
from typing import Any

import jax
import numpy as np

from jaxdt.spec.errors import BadInput

WORD = np.dtype(np.int32)


class StateVector:
    """The layout of the leaves of `like`, all of 4-byte types; every tree of that structure has it."""

    def __init__(self, like: Any):
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        assert all(dtype.itemsize == WORD.itemsize for _, dtype in self._leaves), "masters and moments are float32"
        self._ends = list(itertools.accumulate(int(np.prod(shape)) for shape, _ in self._leaves))
        self.n_words = self._ends[-1]

    def cut(self, tree: Any, lo: int, hi: int) -> np.ndarray:
        """Words lo..hi-1 and, as one more, their CRC-32: a copy, which later updates leave alone."""
        out = np.empty(hi - lo + 1, WORD)
        start = 0
        for leaf, end in zip(jax.tree.leaves(tree), self._ends, strict=True):
            a, b = max(lo, start), min(hi, end)
            if a < b:
                out[a - lo : b - lo] = np.asarray(leaf).reshape(-1).view(WORD)[a - start : b - start]
            start = end
        out[-1:].view(np.uint32)[0] = zlib.crc32(out[:-1])
        return out

    def tree(self, words: np.ndarray) -> Any:
        """The tree that a whole vector stands for."""
        starts = [0, *self._ends[:-1]]
        leaves = [
            words[start:end].view(dtype).reshape(shape)
            for (shape, dtype), start, end in zip(self._leaves, starts, self._ends, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def checked(words: np.ndarray, what: object) -> np.ndarray:
    """The words that `cut` made, without their sum; BadInput if they are not those."""
    got, said = zlib.crc32(words[:-1]), int(words[-1:].view(np.uint32)[0])
    if got != said:
        raise BadInput(f"{what}: checksum {got}, expected {said}, which came with it")
    return words[:-1]
