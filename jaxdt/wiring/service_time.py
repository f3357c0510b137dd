"""How a peer's Works follow one another, whoever steers them."""

import math


class ServiceTime:
    """Of all steps that a peer has under way."""

    def __init__(self):
        self._ended_s = -math.inf

    def gap_s(self, ended_s: float) -> float:
        """A Work is done: the seconds since the one before it was; no less than its own, if it had waited in a queue
        just those."""
        gap_s, self._ended_s = ended_s - self._ended_s, ended_s
        return gap_s
