"""Machine: the interface of all protocol logic. Peer: membership + wiring + sync as one machine."""

from collections import deque
from dataclasses import replace
from typing import Protocol

from jaxdt.core.events import INTERNAL, Action, Event, Received, Report, Send, ViewChanged
from jaxdt.core.membership import DROP, HOLD, Membership


class Machine(Protocol):
    """A pure state machine: no clock, socket, thread, global randomness or array."""

    def handle(self, now_s: float, event: Event) -> list[Action | Event]: ...


class Peer:
    """Hands each event to the three machines, and what they tell one another on to all of them, in order. Messages of a
    view that this peer has not adopted wait here; messages of another run, lineage or old view are counted and dropped.
    """

    def __init__(self, membership: Membership, wiring: Machine, sync: Machine):
        self.membership = membership
        self._machines = (membership, wiring, sync)
        self._held: list[Received] = []
        self.n_dropped = 0

    def handle(self, now_s: float, event: Event) -> list[Action]:
        queue, actions = deque([event]), []
        while queue:
            event = queue.popleft()
            if isinstance(event, Received):
                verdict = self.membership.admit(event.header, event.body)
                if verdict == HOLD:
                    self._held.append(event)
                if verdict == DROP:
                    self.n_dropped += 1
                    what = {"kind": type(event.body).__name__, "src": event.header.src, "view": event.header.view}
                    actions.append(Report("dropped", what))
                if verdict in (HOLD, DROP):
                    continue
            for machine in self._machines:
                for answer in machine.handle(now_s, event):
                    if isinstance(answer, INTERNAL):
                        queue.append(answer)
                    else:
                        actions.append(self._stamped(answer))
            if isinstance(event, ViewChanged):
                queue.extend(self._held)
                self._held.clear()
        return actions

    def _stamped(self, action: Action) -> Action:
        return replace(action, header=self.membership.header) if isinstance(action, Send) else action
