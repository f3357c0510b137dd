"""The Work that runs on a peer's device, one at a time, whichever part of the wiring asked for it; and the seconds that
it takes, as the peer that routes microbatches there needs to know them."""

import math

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.work import Work


class ComputeSlot:
    """`is_busy` from the Run of a Work until its Ran, or until it is cancelled. `is_void`: the peer was evicted
    meanwhile and has given the step up with all its tensors. It may be a member again, in the same step and before the
    Ran, which says nothing then."""

    def __init__(self):
        self.is_busy = False
        self.is_void = False

    def start(self, work: Work, rounds: tuple[RoundId, ...] = ()) -> ev.Run:
        """The Work, and the rounds whose vectors it reads or lays out."""
        assert not self.is_busy
        self.is_busy = True
        return ev.Run(work, rounds=rounds)

    def void(self) -> None:
        self.is_void = self.is_busy

    def free(self) -> bool:
        """The Work has ended. Returns whether its result counts."""
        counts = not self.is_void
        self.is_busy = self.is_void = False
        return counts


class ServiceTime:
    """One clock of finished Work, which all steps share that a peer has under way."""

    def __init__(self):
        self._ended_s = -math.inf

    def gap_s(self, ended_s: float) -> float:
        """A Work has ended: the seconds since the one before it ended. That is the Work's own time if it had waited in
        a queue, and more if it had not."""
        gap_s, self._ended_s = ended_s - self._ended_s, ended_s
        return gap_s
