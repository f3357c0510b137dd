"""A coordinator that was taken for dead and continues, although another one has taken over the run.

It has a disk of its own. It hears no peer, since they talk to the other coordinator, but they hear it.
"""

from collections.abc import Callable
from typing import Any

from jaxdt.membership.peer import DrivenMachine
from jaxdt.protocol import events as ev


class StaleCoordinator:
    """`machine` stopped to run at since_s. `at(when_s, callback, args)` is the event queue's; `post` sends messages as
    Delivery.post does."""

    def __init__(self, machine: DrivenMachine, since_s: float, at: Callable[..., None], post: Callable[..., None]):
        self.machine = machine
        self._since_s = since_s
        self._at = at
        self._post = post
        self._has_ended = False

    def go_on(self, now_s: float, until_s: float) -> None:
        """Run from now on. At until_s a person ends it, as the coordinator of the run."""
        self._handle(now_s, ev.Paused(now_s - self._since_s))
        self._handle(now_s, ev.Woke("tick"))
        self._at(until_s, self._handle, (until_s, ev.Interrupted()))

    def _handle(self, now_s: float, event: ev.Event) -> None:
        if self._has_ended:
            return
        for action in self.machine.handle(now_s, event):
            if isinstance(action, ev.Send) and action.dst < ev.TEMPORARY_IDS:
                self._post(ev.COORDINATOR, ((action.dst, action.body, action.n_bytes),), action.priority, action.header)
            elif isinstance(action, ev.WakeAt):
                self._later(action.at_s, ev.Woke(action.tag))
            elif isinstance(action, ev.Persist):
                self._later(now_s, ev.Persisted(action.name))
            elif isinstance(action, ev.Stop):
                self._has_ended = True

    def _later(self, at_s: float, event: Any) -> None:
        self._at(at_s, self._handle, (at_s, event))
