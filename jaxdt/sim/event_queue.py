"""Virtual time: what happens when, in the order of time and, at one instant, in the order in which it was asked for.

Instants are dictionary keys and their happenings lists: on regular networks thousands of messages arrive at once,
and the heap holds bare floats.
"""

import heapq
from collections.abc import Callable

Happening = Callable[..., None]


class EventQueue:
    """`at` during an instant, for that instant, still takes part in it."""

    def __init__(self):
        self._instants_s: list[float] = []
        self._happenings: dict[float, list[tuple[Happening, tuple] | None]] = {}

    def __bool__(self) -> bool:
        return bool(self._instants_s)

    def at(self, when_s: float, happen: Happening, args: tuple = ()) -> None:
        """Call happen(*args) at when_s."""
        waiting = self._happenings.get(when_s)
        if waiting is None:
            self._happenings[when_s] = [(happen, args)]
            heapq.heappush(self._instants_s, when_s)
        else:
            waiting.append((happen, args))

    def clear(self) -> None:
        """Nothing will happen any more."""
        self._instants_s.clear()
        self._happenings.clear()

    def next_s(self) -> float:
        """The next instant."""
        return self._instants_s[0]

    def happen(self) -> None:
        """Everything of the next instant; what has happened is let go of at once, for what it brings about to reuse."""
        when_s = self._instants_s[0]
        waiting = self._happenings[when_s]
        for i, (happen, args) in enumerate(waiting):
            waiting[i] = None
            happen(*args)
        heapq.heappop(self._instants_s)
        del self._happenings[when_s]
