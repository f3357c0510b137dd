"""A stage's parameters and optimizer state as one vector of 4-byte words. A newcomer fetches it in slices."""

import itertools
import zlib
from typing import Any

import jax
import numpy as np

from jaxdt.spec.errors import BadInput

WORD = np.dtype(np.int32)


class StateVector:
    """Converts between trees of one structure and vectors of words. `like` is one such tree; all its leaves have 4-byte
    types."""

    def __init__(self, like: Any):
        leaves, self._structure = jax.tree.flatten(like)
        self._leaves = [(leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves]
        assert all(dtype.itemsize == WORD.itemsize for _, dtype in self._leaves), "masters and moments are float32"
        self._ends = list(itertools.accumulate(int(np.prod(shape)) for shape, _ in self._leaves))
        self.n_words = self._ends[-1]

    def slice_with_checksum(self, tree: Any, lo: int, hi: int) -> np.ndarray:
        """Words lo..hi-1 of the tree's vector, followed by one word with their CRC-32. This is a copy, which later
        updates do not change."""
        out = np.empty(hi - lo + 1, WORD)
        start = 0
        for leaf, end in zip(jax.tree.leaves(tree), self._ends, strict=True):
            leaf_lo = max(lo, start)
            leaf_hi = min(hi, end)
            if leaf_lo < leaf_hi:
                words = np.asarray(leaf).reshape(-1).view(WORD)
                out[leaf_lo - lo : leaf_hi - lo] = words[leaf_lo - start : leaf_hi - start]
            start = end
        return _sealed(out)

    def tree(self, words: np.ndarray) -> Any:
        """The tree whose vector this is. Its leaves are views of `words`."""
        starts = [0, *self._ends[:-1]]
        leaves = [
            words[start:end].view(dtype).reshape(shape)
            for (shape, dtype), start, end in zip(self._leaves, starts, self._ends, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def with_checksum(words: np.ndarray) -> np.ndarray:
    """Words, followed by one word with their CRC-32."""
    return _sealed(np.append(words, WORD.type(0)))


def _sealed(words: np.ndarray) -> np.ndarray:
    words[-1:].view(np.uint32)[0] = zlib.crc32(words[:-1].data)
    return words


def without_checksum(words: np.ndarray, what: object) -> np.ndarray:
    """The words of a slice_with_checksum; BadInput, which names `what`, if the checksum is not theirs."""
    checksum = zlib.crc32(words[:-1].data)
    expected = int(words[-1:].view(np.uint32)[0])
    if checksum != expected:
        raise BadInput(f"{what}: checksum {checksum}, expected {expected}, which came with it")
    return words[:-1]
