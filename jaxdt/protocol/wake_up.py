"""A machine's next waking."""

import math

from jaxdt.protocol import events as ev


class WakeUp:
    """Asks to be woken with `tag`, and only for a time before the one that it waits for already. A machine that asked
    whenever it wants something would be woken ever more often, since each waking makes it ask again."""

    def __init__(self, tag: str):
        self._tag = tag
        self._at_s = math.inf

    def woke(self, now_s: float) -> None:
        """Woke(tag) came. It may be one that was asked for before an earlier one was."""
        if now_s >= self._at_s:
            self._at_s = math.inf

    def at(self, at_s: float) -> list[ev.WakeAt]:
        """Be woken at `at_s`, if not before."""
        if at_s >= self._at_s:
            return []
        self._at_s = at_s
        return [ev.WakeAt(at_s, self._tag)]
