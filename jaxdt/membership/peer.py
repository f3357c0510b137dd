"""Machine: the interface of all protocol logic. Peer: membership, wiring, sync and state transfer as one machine."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from jaxdt.membership.member import ACCEPT, DROP, HOLD, PASS_ON
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import DroppedReport

_SET_HEADER: dict[type, Callable[[Any, ev.Header], None]] = {
    kind: vars(kind)["header"].__set__ for kind in (ev.Send, ev.Post)
}


class Machine(Protocol):
    """A pure state machine: no clock, socket, thread, global randomness or array. READS: the events that it looks at
    (types of events, and for Received the types of bodies); it is spared all others."""

    READS: frozenset[type]

    def handle(self, now_s: float, event: Any) -> ev.Actions: ...


class DrivenMachine(Protocol):
    """All protocol logic of one process, as a driver sees it: a Peer or a Coordinator."""

    def handle(self, now_s: float, event: ev.Event) -> list[ev.Action]: ...


class PeerMembership(Machine, Protocol):
    """The machine that decides which messages a peer reads. `header` stands on the peer's own messages; `view` is the
    view of which the peer is a member now."""

    @property
    def header(self) -> ev.Header: ...

    @property
    def view(self) -> ev.View | None: ...

    def admit(self, header: ev.Header, body: ev.Message) -> str:
        """ACCEPT, HOLD, DROP or PASS_ON."""
        ...


Handle = Callable[[Any, float, Any], ev.Actions]  # a machine, now_s, event


class Readers(dict[type, tuple[tuple[int, Handle], ...]]):
    """Kind of event, or of a message's body -> the machines that read it, by position, and their `handle`. All peers
    with machines of the same types share it."""

    def __init__(self, machines: tuple[tuple[type[Machine], frozenset[type]], ...]):
        self._machines = machines

    def __missing__(self, kind: type) -> tuple[tuple[int, Handle], ...]:
        readers = [(i, machine.handle) for i, (machine, reads) in enumerate(self._machines) if kind in reads]
        return self.setdefault(kind, tuple(readers))


_readers = functools.lru_cache(maxsize=16)(Readers)


class Peer:
    """One step at a replica of a middle stage, with `fixed` wiring and all-reduce: what comes from the driver or from
    another machine, the machine that reads it, and what it answers.

        Received Boundary -> wiring -> Run FORWARD
        Ran FORWARD -> wiring -> Send Boundary
        Received Boundary -> wiring -> Run BACKWARD
        Ran BACKWARD -> wiring -> Accumulated, Send Boundary, Drained
        Accumulated -> sync
        Drained -> sync -> Run GATHER
        Ran GATHER -> sync -> Post Shard
        Received Shard -> sync -> Sum
        Summed -> sync -> Post Reduced
        Received Reduced -> sync -> Send Prepared
        Received Committed -> sync -> Run UPDATE
        Ran UPDATE -> sync -> Updated
        Updated -> wiring
        Updated -> sync

    Hands each event to its machines, and the events that they emit on to all of them, in order. Messages of a view
    that this peer has not adopted wait here; then the driver hands them in again, one after the other: what a machine
    asks for because of one may not be done before the tensors of the next, which it counts on, are stored. Messages of
    another run, generation or old view are counted and dropped, with their tensors. A slice of a state is kept by the
    machine that has asked for it (jaxdt.sync.transfer)."""

    def __init__(self, membership: PeerMembership, *others: Machine):
        self.membership = membership
        self._machines = (membership, *others)
        self._readers = _readers(tuple((type(machine), machine.READS) for machine in self._machines))
        self._early_messages: list[ev.Received] = []
        self.n_dropped = 0

    def handle(self, now_s: float, event: ev.Event) -> list[ev.Action]:
        membership, machines = self.membership, self._machines
        events: list[Any] = [event]
        actions: list[Any] = []
        due: list[ev.Received] = []
        for event in events:  # grows while it is read
            kind = type(event)
            if type(event) is ev.Received:
                body = event.body
                verdict = membership.admit(event.header, body)
                if verdict != ACCEPT and verdict != PASS_ON:
                    actions += self._hold_or_drop(event, verdict)
                    continue
                if event.tensor is not None and verdict == ACCEPT and type(body) is not ev.State:
                    actions.append(ev.StoreTensor(event.header.src, body, event.tensor))
                kind = type(body)
            for i, handle in self._readers[kind]:
                for answer in handle(machines[i], now_s, event):
                    if type(answer) is ev.Send or type(answer) is ev.Post:
                        # A new message belongs to this loop alone, so its header is set in place: messages are many.
                        # One that a machine kept and sends again may still be on its way, so it is copied.
                        if answer.header is not None:
                            answer = replace(answer, header=None)
                        _SET_HEADER[type(answer)](answer, membership.header)
                        actions.append(answer)
                    elif isinstance(answer, ev.InternalEvent):
                        events.append(answer)
                    else:
                        actions.append(answer)
            if kind is ev.ViewChanged:
                due += self._early_messages
                self._early_messages.clear()
        return [*actions, *map(ev.HandleAgain, due)] if due else actions

    def _hold_or_drop(self, event: ev.Received, verdict: str) -> list[ev.Action]:
        if verdict == HOLD:
            self._early_messages.append(event)
            return []
        assert verdict == DROP
        self.n_dropped += 1
        header = event.header
        term = header.coordinator_term if header.src == ev.COORDINATOR else None
        message = type(event.body).__name__
        return [DroppedReport(header.src, message=message, view=header.view, coordinator_term=term)]
