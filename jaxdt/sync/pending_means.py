"""The mean that a replica awaits while it does further local steps (streaming DiLoCo, Douillard et al. 2025, Alg. 2).

After some local step the vector of a fragment is frozen, and the replica continues. Meanwhile a group forms, and
averages what its members have frozen. The mean is due after `lag_steps` further local steps: then it is adopted, and
the replica waits for it if it is not whole yet. The averages of two fragments are further apart than the lag, so one
mean at most is pending. One that would be due after the last local step is never adopted.

A part of a sync's machine. It knows steps and rounds, and no vector.
"""

from jaxdt.protocol.round_id import RoundId


class PendingMean:
    """One replica's. `step`: the local steps after which its vector was frozen, None if none is. `whole`: the round
    whose result is the mean, once that is here, with the factor on it. `is_closed`: all members of that round hold
    it."""

    def __init__(self, lag_steps: int):
        self.step: int | None = None
        self.whole: tuple[RoundId, float] | None = None
        self.is_closed = False
        self._lag_steps = lag_steps

    @property
    def is_awaited(self) -> bool:
        """Whether a mean is to come that is not here yet."""
        return self.step is not None and self.whole is None

    def freeze(self, step: int) -> None:
        self.step = step

    def is_due(self, version: int) -> bool:
        """Whether the mean has to be adopted after `version` local steps."""
        return self.step is not None and version == self.step + self._lag_steps

    def on_arrived(self, round: RoundId, scale: float) -> None:
        self.whole = (round, scale)

    def on_closed(self, round: RoundId) -> bool:
        """The round is over; whether its result is still needed here."""
        if self.whole is None or self.whole[0] != round:
            return False
        self.is_closed = True
        return True

    def end(self) -> None:
        """The mean is being adopted, or never will be."""
        self.step = self.whole = None
        self.is_closed = False
