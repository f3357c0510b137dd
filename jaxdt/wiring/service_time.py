"""The seconds that a peer takes for a Work, as the peer that routes microbatches to it needs to know them."""

import math


class ServiceTime:
    """One clock of finished Work, which all steps share that a peer has under way."""

    def __init__(self):
        self._ended_s = -math.inf

    def gap_s(self, ended_s: float) -> float:
        """A Work has ended: the seconds since the one before it ended. That is the Work's own time if it had waited in
        a queue, and more if it had not."""
        gap_s, self._ended_s = ended_s - self._ended_s, ended_s
        return gap_s
