"""The gradient vectors of a peer's groups while they are averaged: its own contributions, the parts that other peers
sent, and the sums.

A peer's own vector is never written to, so that an aborted round can be repeated.
"""

import struct
import zlib
from collections.abc import Iterable

import numpy as np

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId
from jaxdt.runtime.storage.words import aligned_empty


def sq_norm(vector: np.ndarray) -> float:
    """Squared norm of a vector. On one thread, unlike a dot product."""
    return float(np.einsum("i,i", vector, vector))


ABORTED_MAX = 1000  # aborted rounds whose late parts are ignored


class RoundAborted(Exception):
    """The sum of a round is wanted that was aborted."""


class GradientSlices:
    """Own vectors by round; received parts and sums by SliceKey. All of a round have the dtype in which they travel."""

    def __init__(self, peer: int):
        self._peer = peer
        self._own: dict[RoundId, np.ndarray] = {}
        self._slices: dict[ev.SliceKey, np.ndarray] = {}
        self._aborted: dict[RoundId, None] = {}  # the latest, in the order in which they were aborted

    def offer(self, round: RoundId, vector: np.ndarray) -> None:
        """This peer's contribution to a round."""
        self._own[round] = vector

    def part_to_send(self, key: ev.SliceKey) -> np.ndarray:
        """A part of the own vector, or a sum."""
        return self._own_part(key) if key.src is not None else self._slices[key]

    def put(self, key: ev.SliceKey, part: np.ndarray) -> None:
        """Keep a part that another peer sent, unless its round has been aborted."""
        if key.round not in self._aborted:
            self._slices[key] = part

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add up the members' parts in the order of `members`, in fp32; the sum is rounded once, to what is sent of it.
        Returns a digest and the squared norm of the sum. Members compare digests to see whether they hold the same sum.
        The digest need not detect transmission errors, so it is computed from the norm alone."""
        parts = [
            self._own_part(key)
            if member == self._peer
            else self._slices.pop(ev.SliceKey(key.round, key.lo, key.hi, member))
            for member in members
        ]
        total = aligned_empty(parts[0].shape, np.dtype(np.float32))
        if len(parts) == 1:
            np.copyto(total, parts[0])
        else:
            np.add(parts[0], parts[1], out=total, dtype=np.float32)
        for part in parts[2:]:
            np.add(total, part, out=total, dtype=np.float32)
        self._slices[key] = total.astype(parts[0].dtype, copy=False)
        norm = sq_norm(self._slices[key].astype(np.float32, copy=False))
        return zlib.crc32(struct.pack("<d", norm)), norm

    def result(self, round: RoundId) -> np.ndarray:
        """The whole sum, joined from its slices in a new buffer, which jax may keep. RoundAborted if the round was
        aborted, perhaps by another thread meanwhile."""
        slices = [item for item in list(self._slices.items()) if item[0].src is None and item[0].round == round]
        if round in self._aborted:
            raise RoundAborted(f"{round} was aborted")
        slices.sort(key=lambda item: item[0])
        out = aligned_empty((slices[-1][0].hi,), np.dtype(np.float32))
        return np.concatenate([part for _, part in slices], out=out, casting="safe")

    def add(self, round: RoundId, other: RoundId) -> None:
        """Add the whole sum of another round to this peer's contribution to a round."""
        self._own[round] = self._own[round] + self.result(other)

    def forget(self, round: RoundId) -> None:
        """Abort a round: delete its vector and parts, and ignore parts of it that still come."""
        self._aborted[round] = None
        if len(self._aborted) > ABORTED_MAX:
            del self._aborted[next(iter(self._aborted))]
        self._own.pop(round, None)
        for key in [key for key in list(self._slices) if key.round == round]:
            del self._slices[key]

    def reopen(self, round: RoundId) -> None:
        """Keep parts of a round that come from now on, also if it was aborted."""
        self._aborted.pop(round, None)

    def free(self, rounds: Iterable[RoundId]) -> None:
        """Delete what belongs to rounds that are over. A series ends in order, so its earlier rounds go too."""
        last = {round.series: round for round in sorted(rounds)}

        def is_over(round: RoundId) -> bool:
            return round.series in last and round <= last[round.series]

        for by_round in (self._aborted, self._own):
            for round in [round for round in by_round if is_over(round)]:
                del by_round[round]
        for key in [key for key in list(self._slices) if is_over(key.round)]:
            del self._slices[key]

    def _own_part(self, key: ev.SliceKey) -> np.ndarray:
        return self._own[key.round][key.lo : key.hi]
