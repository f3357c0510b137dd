"""A stage's parameters and optimizer state as one vector of 4-byte words. A newcomer fetches it in slices, and replicas
compare its digest."""

import functools
import hashlib
import itertools
import math
from typing import Any

import jax
import numpy as np

from jaxdt.runtime.storage.words import WORD, sealed

DIGEST_BYTES = 8  # a message holds integers of 64 bits
N_SUMS = 64  # the norm of a difference is estimated from so many, with a standard error of a tenth or so
CHUNK_NUMBERS = N_SUMS << 14  # are converted to float64 at a time
SIGNS_BETWEEN_LEAVES = 12_347


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
        return sealed(out)

    def tree(self, words: np.ndarray) -> Any:
        """The tree whose vector this is. Its leaves are views of `words`."""
        starts = [0, *self._ends[:-1]]
        leaves = [
            words[start:end].view(dtype).reshape(shape)
            for (shape, dtype), start, end in zip(self._leaves, starts, self._ends, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


def digest(tree: Any) -> int:
    """BLAKE2b of the bytes of a tree's leaves. It reads one leaf after another, so a device's memory is copied leaf by
    leaf."""
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for leaf in jax.tree.leaves(tree):
        hashed.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return int.from_bytes(hashed.digest(), "big")


@functools.cache
def _signs() -> np.ndarray:
    """Two chunks of signs, +1 and -1, equal on every host: numpy keeps the raw output of a bit generator as it is."""
    bits = np.unpackbits(np.random.PCG64(0).random_raw(2 * CHUNK_NUMBERS // 64).view(np.uint8))
    return bits.astype(np.int8) * 2 - 1


def norm_and_sums(tree: Any) -> tuple[float, tuple[float, ...]]:
    """The norm of a tree of floats, and sums of its numbers, each with a random sign, over the residue classes of their
    positions in each leaf, modulo N_SUMS (jaxdt.membership.state_check says what for)."""
    sq_norm = 0.0
    sums = np.zeros(N_SUMS)
    signs = _signs()
    for place, leaf in enumerate(jax.tree.leaves(tree)):
        numbers = np.asarray(leaf).reshape(-1)
        first_sign = place * SIGNS_BETWEEN_LEAVES % CHUNK_NUMBERS  # else equal small leaves would have equal signs
        for start in range(0, len(numbers), CHUNK_NUMBERS):
            chunk = numbers[start : start + CHUNK_NUMBERS].astype(np.float64)
            sq_norm += float(chunk @ chunk)
            chunk *= signs[first_sign : first_sign + len(chunk)]
            whole = len(chunk) - len(chunk) % N_SUMS
            sums += chunk[:whole].reshape(-1, N_SUMS).sum(axis=0)
            sums[: len(chunk) - whole] += chunk[whole:]
    return math.sqrt(sq_norm), tuple(sums.tolist())
