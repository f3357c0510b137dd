"""Reminders of those that wait: the coordinator's while the run waits for peers, and a ready peer's until the run takes
it in.

The first line about a wait comes from whoever begins it. A person who looks later, or who started the wrong process,
needs it again: after AGAIN_S_MIN, and then after waits that double up to AGAIN_S_MAX.
"""

AGAIN_S_MIN = 10.0
AGAIN_S_MAX = 60.0


class Reminder:
    """Decides when a waiting process says again that it waits. Time comes in as an argument."""

    def __init__(self):
        self._since_s: float | None = None  # None: none waits
        self._next_s = 0.0
        self._again_s = AGAIN_S_MIN

    def ends(self) -> None:
        self._since_s = None

    def due(self, now_s: float) -> float | None:
        """Called while one waits: the seconds since the first call, if it is time to say so; else None."""
        if self._since_s is None:
            self._since_s, self._again_s = now_s, AGAIN_S_MIN
            self._next_s = now_s + AGAIN_S_MIN
        if now_s < self._next_s:
            return None
        self._again_s = min(2 * self._again_s, AGAIN_S_MAX)
        self._next_s = now_s + self._again_s
        return round(now_s - self._since_s, 1)
