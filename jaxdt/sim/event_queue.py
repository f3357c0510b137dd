"""Virtual time: callbacks in the order of their instants and, within one instant, in the order of their registration.

An instant is a key of a dictionary, and its callbacks are a list: on regular networks thousands of messages arrive at
the same instant, and the heap holds bare floats.
"""

import heapq
from collections.abc import Callable

Callback = Callable[..., None]


class EventQueue:
    """A callback that is registered during an instant, for that same instant, still runs in it."""

    def __init__(self):
        self._instants_s: list[float] = []
        self._callbacks: dict[float, list[tuple[Callback, tuple]]] = {}

    def __bool__(self) -> bool:
        return bool(self._instants_s)

    def at(self, when_s: float, callback: Callback, args: tuple = ()) -> None:
        """Call callback(*args) at when_s."""
        waiting = self._callbacks.get(when_s)
        if waiting is None:
            self._callbacks[when_s] = [(callback, args)]
            heapq.heappush(self._instants_s, when_s)
        else:
            waiting.append((callback, args))

    def clear(self) -> None:
        """Drop everything that is registered."""
        self._instants_s.clear()
        self._callbacks.clear()

    def next_s(self) -> float:
        """The next instant."""
        return self._instants_s[0]

    def run_next(self) -> None:
        """Run all callbacks of the next instant. Each entry is dropped before its callback runs, so that the callback
        can reuse the memory."""
        when_s = self._instants_s[0]
        waiting = self._callbacks[when_s]
        for i, (callback, args) in enumerate(waiting):
            waiting[i] = None  # pyright: ignore[reportArgumentType, reportCallIssue]  # it is not read again
            callback(*args)
        heapq.heappop(self._instants_s)
        del self._callbacks[when_s]
