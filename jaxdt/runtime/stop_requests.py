"""Requests to stop that reach a process from outside: signals, and its launcher's line on standard input."""

import os
import signal
import sys
import threading
from collections.abc import Callable

from jaxdt.protocol import events as ev
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime.loop import Loop


class StopRequests:
    """Turns requests to stop into events for the loop that runs at the moment.

    The first signal becomes the event `on_interrupt` if it is SIGINT, and `on_terminate` if it is SIGTERM; each further
    signal becomes Interrupted.

    With `stop_with_parent`, standard input is watched too. The launcher may write a line "CODE REASON" to it, which
    ends this process with that exit code and reason. The end of standard input means that the launcher was killed,
    and becomes Interrupted."""

    def __init__(self, on_interrupt: ev.Event, on_terminate: ev.Event, stop_with_parent: bool):
        self._loop: Loop | None = None
        self._end: Callable[[ev.Event], None] | None = None
        self._requests: list[ev.Event] = []
        self._first = {signal.SIGINT: on_interrupt, signal.SIGTERM: on_terminate}
        for number in self._first:
            signal.signal(number, lambda number, _: self._on_signal(number))
        if stop_with_parent:
            threading.Thread(target=self._watch_parent, name="parent", daemon=True).start()

    @property
    def first(self) -> ev.Event | None:
        """The first request, if there was one, for a process that has no loop at the moment."""
        return self._requests[0] if self._requests else None

    def deliver_to(self, loop: Loop) -> None:
        """Deliver requests to this loop from now on. It also gets all earlier requests: the loop before it may have
        ended without handling them."""
        self._loop, self._end = loop, None
        for event in self._requests:
            loop.post(event)

    def end_by(self, end: Callable[[ev.Event], None]) -> None:
        """Until there is a loop again, call `end` with each request; and now with the first one, if there was one."""
        self._loop, self._end = None, end
        if self.first:
            end(self.first)

    def _on_signal(self, number: int) -> None:
        event = self._first.get(signal.Signals(number), ev.Interrupted())
        self._first.clear()
        self._add(event)

    def _add(self, event: ev.Event) -> None:
        self._requests.append(event)
        if self._loop:
            self._loop.post(event)
        elif self._end:
            self._end(event)

    def _watch_parent(self) -> None:
        received = b""
        # os.read, not the buffered reader: a thread that blocks inside the reader breaks the interpreter's exit.
        while chunk := os.read(sys.stdin.fileno(), 4096):
            received += chunk
            if b"\n" in received:
                code, _, reason = received.decode().strip().partition(" ")
                self._add(ev.Interrupted(int(code), reason))
                return
        self._add(ev.Interrupted())


def requested_stop(request: ev.Event, left: str) -> ev.Stop:
    """The end of a process that takes no part at the moment, when it is asked to end. `left`: the reason if it may
    leave."""
    if isinstance(request, ev.Interrupted):
        return ev.Stop(request.code, request.reason)
    return ev.Stop(ExitCode.DONE, left)
