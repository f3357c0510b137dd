"""Machine: the interface of all protocol logic. Peer: membership + wiring + sync as one machine."""

from collections.abc import Callable
from typing import Protocol

from jaxdt.core.events import INTERNAL, Action, Event, Received, Report, Send, ViewChanged
from jaxdt.core.membership import DROP, HOLD, TAKE, Membership

BETWEEN_MACHINES = frozenset(INTERNAL)


class Machine(Protocol):
    """A pure state machine: no clock, socket, thread, global randomness or array. It may say with READS which events it
    looks at (types of events, and for Received the types of bodies), and is then spared the others."""

    def handle(self, now_s: float, event: Event) -> list[Action | Event]: ...


class Peer:
    """Hands each event to the three machines, and what they tell one another on to all of them, in order. Messages of a
    view that this peer has not adopted wait here; messages of another run, lineage or old view are counted and dropped.
    """

    def __init__(self, membership: Membership, wiring: Machine, sync: Machine):
        self.membership = membership
        self._machines = (membership, wiring, sync)
        self._readers: dict[type, tuple[Callable, ...]] = {}
        self._held: list[Received] = []
        self.n_dropped = 0

    def handle(self, now_s: float, event: Event) -> list[Action]:
        events, actions = [event], []
        for event in events:  # which grows
            kind = type(event)
            if kind is Received:
                verdict = self.membership.admit(event.header, event.body)
                if verdict != TAKE:
                    actions += self._not_now(event, verdict)
                    continue
                kind = type(event.body)
            for handle in self._readers.get(kind) or self._readers_of(kind):
                for answer in handle(now_s, event):
                    told = type(answer)
                    if told is Send:
                        stamp = self.membership.header
                        actions.append(Send(answer.dst, answer.body, answer.n_bytes, answer.priority, stamp))
                    elif told in BETWEEN_MACHINES:
                        events.append(answer)
                    else:
                        actions.append(answer)
            if kind is ViewChanged:
                events += self._held
                self._held.clear()
        return actions

    def _readers_of(self, kind: type) -> tuple[Callable, ...]:
        reads = [(machine, getattr(machine, "READS", None)) for machine in self._machines]
        self._readers[kind] = tuple(machine.handle for machine, kinds in reads if kinds is None or kind in kinds)
        return self._readers[kind]

    def _not_now(self, event: Received, verdict: str) -> list[Action]:
        if verdict == HOLD:
            self._held.append(event)
            return []
        assert verdict == DROP
        self.n_dropped += 1
        what = {"kind": type(event.body).__name__, "src": event.header.src, "view": event.header.view}
        return [Report("dropped", what)]
