"""The gradient vectors of a peer's groups while they are averaged: own contributions, what came, and the sums.

The own vector is never written to, so that a round which was broken off can be done again.
"""

import struct
import zlib

import numpy as np

from jaxdt.protocol.events import Round, SliceKey
from jaxdt.runtime.storage.aligned_buffer import aligned_empty


class Slices:
    """fp32 vectors by (step, group) and parts of them by SliceKey."""

    def __init__(self, peer: int):
        self._peer = peer
        self._own: dict[tuple[int, str], np.ndarray] = {}
        self._slices: dict[SliceKey, np.ndarray] = {}
        self._void: set[Round] = set()

    def offer(self, step: int, group: str, vector: np.ndarray) -> None:
        """This peer's contribution to the group's round of the step."""
        self._own[step, group] = vector

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
        self._void.add(round)
        for key in [key for key in self._slices if key.round == round]:
            del self._slices[key]

    def free(self, step: int) -> None:
        """Forget a step, and those before it."""
        self._void = {round for round in self._void if round.step > step}
        for at in [at for at in self._own if at[0] <= step]:
            del self._own[at]
        for key in [key for key in self._slices if key.round.step <= step]:
            del self._slices[key]

    def _own_part(self, key: SliceKey) -> np.ndarray:
        return self._own[key.round.step, key.round.group][key.lo : key.hi]
