"""Machine: the interface of all protocol logic. Peer: membership + wiring + sync + handover as one machine."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from jaxdt.membership.member import ACCEPT, DROP, HOLD, Membership
from jaxdt.protocol.events import INTERNAL, Action, Event, Post, Received, Report, Send, ViewChanged

BETWEEN_MACHINES = frozenset(INTERNAL)
_FILL_IN = {kind: kind.header.__set__ for kind in (Send, Post)}


class Machine(Protocol):
    """A pure state machine: no clock, socket, thread, global randomness or array. It may say with READS which events it
    looks at (types of events, and for Received the types of bodies), and is then spared the others."""

    def handle(self, now_s: float, event: Event) -> list[Action | Event]: ...


class Readers(dict):
    """Kind of event, or of a message's body -> who of the machines looks at it, and the function that does. All peers
    with machines of the same types share it."""

    def __init__(self, machines: tuple[type, ...]):
        self._machines = machines

    def __missing__(self, kind: type) -> tuple[tuple[int, Callable], ...]:
        reads = [getattr(machine, "READS", None) for machine in self._machines]
        found = [i for i, kinds in enumerate(reads) if kinds is None or kind in kinds]
        return self.setdefault(kind, tuple([(i, self._machines[i].handle) for i in found]))


_readers = functools.lru_cache(maxsize=16)(Readers)


class Peer:
    """Hands each event to its machines, and what they tell one another on to all of them, in order. Messages of a
    view that this peer has not adopted wait here; messages of another run, generation or old view are counted and
    dropped.
    """

    def __init__(self, membership: Membership, *others: Machine):
        self.membership = membership
        self._machines = (membership, *others)
        self._readers = _readers(tuple(map(type, self._machines)))
        self._held: list[Received] = []
        self.n_dropped = 0

    def handle(self, now_s: float, event: Event) -> list[Action]:
        membership, machines = self.membership, self._machines
        events, actions = [event], []
        for event in events:  # which grows
            kind = type(event)
            if kind is Received:
                body = event.body
                verdict = membership.admit(event.header, body)
                if verdict != ACCEPT:
                    actions += self._not_now(event, verdict)
                    continue
                kind = type(body)
            for i, handle in self._readers[kind]:
                for answer in handle(machines[i], now_s, event):
                    told = type(answer)
                    if told in _FILL_IN:
                        # A new message is nobody else's yet, and its header is filled in where it lies, since they are
                        # many; one that a machine kept and sends again may be on its way still, and is copied.
                        if answer.header is not None:
                            answer = replace(answer, header=None)
                        _FILL_IN[told](answer, membership.header)
                        actions.append(answer)
                    elif told in BETWEEN_MACHINES:
                        events.append(answer)
                    else:
                        actions.append(answer)
            if kind is ViewChanged:
                events += self._held
                self._held.clear()
        return actions

    def _not_now(self, event: Received, verdict: str) -> list[Action]:
        if verdict == HOLD:
            self._held.append(event)
            return []
        assert verdict == DROP
        self.n_dropped += 1
        what = {"kind": type(event.body).__name__, "src": event.header.src, "view": event.header.view}
        return [Report("dropped", what)]
