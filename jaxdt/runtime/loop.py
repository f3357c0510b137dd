"""The runtime driver: one machine under the real clock. Events come in over a queue, actions go out.

Three slots never wait for one another (DT-FM Sec. 3.5): the transport's threads receive and send, one thread computes,
and this loop only passes keys around between them. Back pressure: no new Work starts while a peer has more than
`queue_bytes` waiting on a link; receiving never stops, so queues always drain.
"""

import heapq
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from jaxdt.membership.peer import Machine
from jaxdt.protocol.events import (
    Action,
    Connect,
    Discard,
    Disconnect,
    Event,
    Fetch,
    Forget,
    Free,
    Header,
    Install,
    Installed,
    Interrupted,
    LinkChanged,
    MarkCheckpoint,
    Meet,
    Message,
    MoveTo,
    Persist,
    Persisted,
    Post,
    Ran,
    Received,
    Refused,
    Report,
    Restore,
    Restored,
    Run,
    Send,
    Started,
    State,
    StateKey,
    Status,
    Stop,
    Sum,
    Summed,
    WakeAt,
    Woke,
    WriteCheckpoint,
)
from jaxdt.protocol.message import tensor_key, to_plain
from jaxdt.protocol.reports import HeartbeatReport, UsageReport
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.net.handshake import name_of
from jaxdt.runtime.net.transport import Transport
from jaxdt.runtime.storage.checkpoint import Checkpointer
from jaxdt.runtime.storage.durable import FileStore, refusal
from jaxdt.runtime.storage.store import Store
from jaxdt.spec.errors import BadInput
from jaxdt.spec.work import UPDATE

CONGESTED_S = 0.002
FLUSH_S = 1.0


class Loop:
    """Drives `machine` until it stops. A coordinator has a `durable` store; a peer has `tensors` once
    `prepare` has made them. `transport` is set before `run`.

    `least_s`: how long a Work of a kind takes at least, to emulate a slower device.

    `report` is called with everything the machine says to people, on the loop's thread."""

    def __init__(
        self,
        me: int,
        machine: Machine,
        trace: Trace,
        report: Callable[[Report], None],
        checkpointer: Checkpointer | None,
        durable: FileStore | None = None,
        queue_bytes: int = 1 << 62,
        least_s: Mapping[str, float] | None = None,
    ):
        self._me, self._machine, self._trace, self._report = me, machine, trace, report
        self._checkpointer, self._durable = checkpointer, durable
        self._queue_bytes, self._least_s = queue_bytes, least_s or {}
        self._events: SimpleQueue[Event | Stop | BaseException] = SimpleQueue()
        self._wakes: list[tuple[float, int, str]] = []
        self._ready: deque[Run] = deque()
        self._work: SimpleQueue[Run | Restore | Install | None] = SimpleQueue()
        self._stop: Stop | MoveTo | None = None
        self._busy_s = 0.0
        self._last_step = 0
        self._fetching: dict[StateKey, int] = {}  # slices of a state, and of whom they were asked
        self.transport: Transport | None = None
        self.tensors: Store | None = None

    # ----------------------------------------------------------------------------------- called from other threads

    def post(self, event: Event | Stop | BaseException) -> None:
        """Hand in an event, a Stop from outside (a signal), or an exception that must end the process."""
        self._events.put(event)

    def on_message(self, src: int, event: Received, leaves: Sequence[np.ndarray]) -> None:
        """A whole message; its tensor is kept before its event can be seen. BadInput tells the transport that the
        sender is wrong: the message is dropped and counted."""
        if event.header.src != src:
            raise BadInput(f"message.head.src: got {event.header.src}, expected {src}, whose connection it is")
        if tensor_key(event.body) and len(leaves) != 1:
            raise BadInput(f"message.{type(event.body).__name__}: got {len(leaves)} tensors, expected 1")
        if self.tensors and tensor_key(event.body):
            self.tensors.put(event.body, src, leaves[0])
        self._events.put(event)

    def expect(self, src: int, event: Received, table: list) -> list[np.ndarray]:
        """Where to receive the tensors of a message; BadInput if it does not fit."""
        if self.tensors is None:
            raise BadInput(f"message.{type(event.body).__name__}: brings a tensor to one who holds none")
        if isinstance(event.body, State) and self._fetching.get(event.body.key) != src:
            raise BadInput(f"message.State: {event.body.key} was not asked of {name_of(src)}")
        return self.tensors.expect(event.body, table)

    def on_link(self, peer: int, state: str, reason: str) -> None:
        """The transport's word on a connection."""
        if state == "refused":
            self._events.put(Refused(peer, reason))
        else:
            self._events.put(LinkChanged(peer, state == "up", reason))

    # ------------------------------------------------------------------------------------------------------ the loop

    def run(self, address: str, prepare: Callable[[], Event] | None = None) -> Stop | MoveTo:
        """Start the machine, run `prepare` (compile and time the stage) on the compute thread, and go on until the
        machine stops, or until another has to take its place, for which the compute thread is waited for. The
        transport is closed when this returns, or raises BadInput or the OSError of a disk, of which the others are
        told."""
        compute = threading.Thread(target=self._compute, args=(prepare,), name="compute", daemon=True)
        compute.start()
        flush_s = FLUSH_S if self._durable else 0.0  # a coordinator has last words
        try:
            self._handle(Started(address, secrets.randbelow(1 << 31)))
            while self._stop is None:
                self._turn()
        except (BadInput, OSError) as error:
            flush_s = FLUSH_S
            self._tell(refusal(error, "run_dir") if isinstance(error, OSError) else str(error))
            raise
        finally:
            self._work.put(None)
            self.transport.close(flush_s)
        if isinstance(self._stop, MoveTo):
            compute.join()  # so that the next machine's arrays find room
        return self._stop

    def _tell(self, reason: str) -> None:
        """The others hear why this process cannot go on; nothing else is done any more."""
        for action in self._machine.handle(time.monotonic(), Interrupted(2, reason)):
            if isinstance(action, Send | Post):
                self._act(action)

    def _turn(self) -> None:
        """Wait for one event, or for the next wake-up."""
        self._release()
        wait_s = self._wakes[0][0] - time.monotonic() if self._wakes else 1.0
        if self._ready:
            wait_s = min(wait_s, CONGESTED_S)
        try:
            event = self._events.get(timeout=max(0.0, wait_s))
        except Empty:
            while self._wakes and self._wakes[0][0] <= time.monotonic():
                tag = heapq.heappop(self._wakes)[2]
                if self.tensors:
                    self._handle(self._status())
                self._handle(Woke(tag))
            return
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Stop | Report):
            self._act(event)
        else:
            self._seen(event)
            self._handle(event)

    def _seen(self, event: Event) -> None:
        if isinstance(event, Ran):
            self._busy_s += event.seconds
            self._last_step = event.work.step
            if event.work.kind == UPDATE:
                self._trace.report(self._me, time.monotonic(), UsageReport(event.work.step, time.process_time()))
            self._trace.run(self._me, event.started_s, event.seconds, event.work)
        elif isinstance(event, Received) and (key := tensor_key(event.body)):
            self._trace.recv(self._me, time.monotonic(), event.header.src, key)

    def _handle(self, event: Event) -> None:
        for action in self._machine.handle(time.monotonic(), event):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Send(dst, body, n_bytes, priority, header):
                self._post(((dst, body, n_bytes),), priority, header)
            case Post(letters, priority, header):
                self._post(letters, priority, header)
            case Run():
                self._ready.append(action)
                self._release()
            case Sum(key, members):
                self._handle(Summed(key, *self.tensors.sum(key, members)))
            case Free(step, rounds):
                self.tensors.free(step, rounds)
            case Discard(key):
                self.tensors.discard(key)
            case Forget(round):
                self.tensors.forget(round)
            case Connect(peer, address):
                self._connect(peer, address)
            case Meet(members):
                for member in members:
                    if member.peer != self._me:
                        self._connect(member.peer, member.address)
            case Disconnect(peer):
                self.transport.drop(peer)
            case WakeAt(at_s, tag):
                heapq.heappush(self._wakes, (at_s, len(self._wakes), tag))
            case Persist(name, value):
                self._durable.put(name, value)
                self._handle(Persisted(name))
            case WriteCheckpoint(version):
                self._checkpointer.save(version, self.tensors, self.post)
            case Restore() | Install():
                self._fetching.clear()
                self._work.put(action)
            case MarkCheckpoint(version, generation):
                self._checkpointer.mark_complete(version, generation)
            case Report():
                if not isinstance(action, HeartbeatReport):
                    self._trace.report(self._me, time.monotonic(), action)
                self._report(action)
            case Stop() | MoveTo():
                self._stop = action

    def _post(self, letters: Iterable[tuple[int, Message, int]], priority: int, header: Header) -> None:
        plain = last = None
        for dst, body, n_bytes in letters:
            if body is not last:
                plain, last = to_plain(header, body), body
            if isinstance(body, Fetch):
                self._fetching[body.key] = dst
            key = tensor_key(body)
            leaves = [self.tensors.take(body)] if key else []
            if key:
                self._trace.send(self._me, time.monotonic(), dst, key, n_bytes)
            self.transport.send(dst, plain, leaves, priority=priority)

    def _connect(self, peer: int, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.transport.connect(peer, (host, int(port)) if address else None)

    def _release(self) -> None:
        """Start the Work that waits, unless a link is congested."""
        while self._ready and self.transport.queued_bytes() <= self._queue_bytes:
            self._work.put(self._ready.popleft())

    def _compute(self, prepare: Callable[[], Event] | None) -> None:
        """The compute thread: an exception here ends the process, it is never swallowed."""
        try:
            if prepare:
                self.post(prepare())
            while (action := self._work.get()) is not None:
                started_s = time.monotonic()
                if isinstance(action, Restore):
                    self.tensors.restore(action.version, action.generation)
                    self.post(Restored(action.version))
                elif isinstance(action, Install):
                    self.tensors.install(action.version, action.generation)
                    self.post(Installed(action.version))
                else:
                    if action.work.kind == UPDATE and self._checkpointer:
                        self._checkpointer.wait()
                    values = self.tensors.run(action.work, action.scale, action.rounds)
                    if least_s := self._least_s.get(action.work.kind):
                        time.sleep(max(0.0, started_s + least_s - time.monotonic()))
                    self.post(Ran(action.work, started_s, time.monotonic() - started_s, values))
        except BaseException as error:
            self.post(error)

    def _status(self) -> Status:
        stats: dict[int, Any] = self.transport.stats()
        bytes_to = {str(peer): stat.get("bytes_out", 0) for peer, stat in stats.items() if peer >= 0}
        values = {
            "step": float(self._last_step),
            "busy_s": self._busy_s,
            "bytes_out": float(sum(stat.get("bytes_out", 0) for stat in stats.values())),
            "bytes_in": float(sum(stat.get("bytes_in", 0) for stat in stats.values())),
        }
        return Status(values, bytes_to)
