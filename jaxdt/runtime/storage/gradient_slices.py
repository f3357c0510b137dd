"""The gradient vectors of a peer's groups while they are averaged: own contributions, what came, and the sums.

The own vector is never written to, so that a round which was broken off can be done again.
"""

import struct
import zlib
from collections.abc import Iterable

import numpy as np

from jaxdt.protocol.events import Round, SliceKey
from jaxdt.runtime.storage.aligned_buffer import aligned_empty

VOID_MAX = 1000  # rounds whose late parts are turned away


class Slices:
    """fp32 vectors by round, and parts of them by SliceKey."""

    def __init__(self, peer: int):
        self._peer = peer
        self._own: dict[Round, np.ndarray] = {}
        self._slices: dict[SliceKey, np.ndarray] = {}
        self._void: dict[Round, None] = {}  # the last rounds that were given up, in this order

    def offer(self, round: Round, vector: np.ndarray) -> None:
        """This peer's contribution to a round."""
        self._own[round] = vector

    def take(self, key: SliceKey) -> np.ndarray:
        """The part to send: a piece of the own vector, or a sum."""
        return self._own_part(key) if key.src is not None else self._slices[key]

    def put(self, key: SliceKey, part: np.ndarray) -> None:
        """Keep a part that came, unless its round is void."""
        if key.round not in self._void:
            self._slices[key] = part

    def sum(self, key: SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add up the members' parts in their order; a digest and the squared norm of the sum. By digests members see
        whether they hold the same sum, not whether a wire was true, so the norm's bits serve."""
        parts = [
            self._own_part(key)
            if member == self._peer
            else self._slices.pop(SliceKey(key.round, key.lo, key.hi, member))
            for member in members
        ]
        total = aligned_empty(parts[0].shape, parts[0].dtype)
        if len(parts) == 1:
            np.copyto(total, parts[0])
        else:
            np.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            np.add(total, part, out=total)
        self._slices[key] = total
        sq_norm = float(np.einsum("i,i", total, total))  # one thread, unlike a dot product
        return zlib.crc32(struct.pack("<d", sq_norm)), sq_norm

    def result(self, round: Round) -> np.ndarray:
        """The whole sum, joined from its slices in a buffer of its own that jax may keep."""
        keys = sorted(key for key in self._slices if key.src is None and key.round == round)
        out = aligned_empty((keys[-1].hi,), np.dtype(np.float32))
        return np.concatenate([self._slices[key] for key in keys], out=out)

    def forget(self, round: Round) -> None:
        """A round is void: forget what came for it, and what still comes."""
        self._void[round] = None
        if len(self._void) > VOID_MAX:
            del self._void[next(iter(self._void))]
        self._own.pop(round, None)
        for key in [key for key in self._slices if key.round == round]:
            del self._slices[key]

    def free(self, rounds: Iterable[Round]) -> None:
        """Forget rounds that are over. The rounds of a group end in order, so what is left of earlier ones goes too."""
        last = {round.group: round for round in sorted(rounds)}

        def is_over(round: Round) -> bool:
            return round.group in last and round <= last[round.group]

        for by_round in (self._void, self._own):
            for round in [round for round in by_round if is_over(round)]:
                del by_round[round]
        for key in [key for key in self._slices if is_over(key.round)]:
            del self._slices[key]

    def _own_part(self, key: SliceKey) -> np.ndarray:
        return self._own[key.round][key.lo : key.hi]
