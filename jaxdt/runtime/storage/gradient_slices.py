"""The gradient vectors of a peer's groups while they are averaged: its own contributions, the parts that other peers
sent, and the sums. All are held as their codec sends them.

A peer's own vector is never written to, so that an aborted round can be repeated. What a codec loses of it is
owed to a later round (jaxdt.sync.error_feedback).
"""

import struct
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from jaxdt.codec.vectors import Encoded, decoded, encoded, encoded_with_feedback
from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.codec import EXACT, FLOAT32_BYTES, CodecSpec, loses
from jaxdt.runtime.storage.words import aligned_empty
from jaxdt.sync.error_feedback import ErrorFeedback

FED_BACK = frozenset({RoundKind.GRADIENT, RoundKind.CONTRIBUTION, RoundKind.PUSH, RoundKind.MEAN})


def sq_norm(vector: np.ndarray) -> float:
    """Squared norm of a vector. On one thread, unlike a dot product."""
    return float(np.einsum("i,i", vector, vector))


ABORTED_MAX = 1000  # aborted rounds whose late parts are ignored


class RoundAborted(Exception):
    """The sum of a round is wanted that was aborted."""


class GradientSlices:
    """Own vectors by round; received parts and sums by SliceKey. `codec_of`: how the vectors of a round travel;
    `n_under_way`: steps that may be under way at once; `fed_back`: the rounds in which what a codec loses is owed."""

    def __init__(
        self,
        peer: int,
        codec_of: Callable[[RoundId], CodecSpec] = lambda round: EXACT,
        n_under_way: int = 1,
        fed_back: Collection[RoundKind] = FED_BACK,
    ):
        self._peer = peer
        self._codec_of = codec_of
        self._fed_back = fed_back
        self.feedback = ErrorFeedback[np.ndarray](n_under_way)
        self._own: dict[RoundId, Encoded] = {}
        self._slices: dict[ev.SliceKey, np.ndarray] = {}
        self._aborted: dict[RoundId, None] = {}  # the latest, in the order in which they were aborted

    def offer(self, round: RoundId, vector: Any) -> None:
        """This peer's contribution to a round, a vector of fp32 numbers, with what is owed."""
        spec = self._codec_of(round)
        if round.kind not in self._fed_back or not loses(spec, FLOAT32_BYTES):
            self._own[round] = encoded(spec, vector)
            return
        self._own[round], lost = encoded_with_feedback(spec, vector, self.feedback.owed(round))
        self.feedback.lose(round, lost)

    def part_to_send(self, key: ev.SliceKey) -> np.ndarray:
        """A part of the own vector, or a sum."""
        return self._own_part(key) if key.src is not None else self._slices[key]

    def put(self, key: ev.SliceKey, part: np.ndarray) -> None:
        """Keep a part that another peer sent, unless its round has been aborted."""
        if key.round not in self._aborted:
            self._slices[key] = part

    def sum(self, key: ev.SliceKey, members: tuple[int, ...]) -> tuple[int, float]:
        """Add up the members' parts in the order of `members`, in fp32; the sum is rounded once, to what is sent of it.
        This peer owes what that loses. One member's part is the sum, as it is. Returns a digest and the squared norm of
        the sum. Members compare digests to see whether they hold the same sum. The digest need not detect transmission
        errors, so it is computed from the norm alone."""
        parts = [
            self._own_part(key)
            if member == self._peer
            else self._slices.pop(ev.SliceKey(key.round, key.lo, key.hi, member))
            for member in members
        ]
        spec, n = self._codec_of(key.round), key.hi - key.lo
        self._slices[key] = parts[0] if len(parts) == 1 else self._added(key, spec, parts)
        norm = sq_norm(decoded(spec, self._slices[key], n))
        return zlib.crc32(struct.pack("<d", norm)), norm

    def _added(self, key: ev.SliceKey, spec: CodecSpec, parts: list[np.ndarray]) -> np.ndarray:
        """The sum of several parts of a slice, as it is sent."""
        n = key.hi - key.lo
        total = aligned_empty((n,), np.dtype(np.float32))
        np.add(decoded(spec, parts[0], n), decoded(spec, parts[1], n), out=total)
        for part in parts[2:]:
            np.add(total, decoded(spec, part, n), out=total)
        owed = self.feedback.lost(key.round)
        if owed is None:
            return encoded(spec, total).wire
        sum, lost = encoded_with_feedback(spec, total)
        owed[key.lo : key.hi] += lost
        return sum.wire

    def result(self, round: RoundId) -> np.ndarray:
        """The whole sum, joined from its slices in a new buffer, which jax may keep. RoundAborted if the round was
        aborted, perhaps by another thread meanwhile."""
        slices = [item for item in list(self._slices.items()) if item[0].src is None and item[0].round == round]
        if round in self._aborted:
            raise RoundAborted(f"{round} was aborted")
        slices.sort(key=lambda item: item[0])
        out = aligned_empty((slices[-1][0].hi,), np.dtype(np.float32))
        assert sum([key.hi - key.lo for key, _ in slices]) == out.size, f"{round} is not whole"
        spec = self._codec_of(round)
        for key, part in slices:
            out[key.lo : key.hi] = decoded(spec, part, key.hi - key.lo)
        return out

    def add(self, round: RoundId, other: RoundId) -> None:
        """Add the whole sum of another round to this peer's contribution to a round."""
        own = self._own[round]
        self._own[round] = encoded(own.spec, decoded(own.spec, own.wire, own.n) + self.result(other))

    def forget(self, round: RoundId) -> None:
        """Abort a round: delete its vector and parts, and ignore parts of it that still come."""
        self._aborted[round] = None
        if len(self._aborted) > ABORTED_MAX:
            del self._aborted[next(iter(self._aborted))]
        self._own.pop(round, None)
        self.feedback.forget(lambda other: other == round)
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

        self.feedback.forget(is_over)
        for by_round in (self._aborted, self._own):
            for round in [round for round in by_round if is_over(round)]:
                del by_round[round]
        for key in [key for key in list(self._slices) if is_over(key.round)]:
            del self._slices[key]

    def _own_part(self, key: ev.SliceKey) -> np.ndarray:
        return self._own[key.round].part(key.lo, key.hi)
