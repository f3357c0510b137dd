"""The Work that runs on a peer's device: one at a time, whichever part of the wiring asked for it."""

from jaxdt.protocol import events as ev
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.work import Work


class ComputeSlot:
    """`is_busy` from the Run of a Work until its Ran, or until it is cancelled."""

    def __init__(self):
        self.is_busy = False

    def start(self, work: Work, rounds: tuple[RoundId, ...] = ()) -> ev.Run:
        """The Work, and the rounds whose vectors it reads or lays out."""
        assert not self.is_busy
        self.is_busy = True
        return ev.Run(work, rounds=rounds)

    def free(self) -> None:
        self.is_busy = False
