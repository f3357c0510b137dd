"""What goes out to one peer on one lane: a queue by priority, one sender thread, one connection at a time.

A message stays here until the other side acknowledges it; a new connection starts with what was not. Between two
chunks the most urgent message goes on, so an activation overtakes a gradient shard. With a shaper, chunks wait in a
delay line for their instant of arrival.
"""

import heapq
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdt.runtime.net import frame, handshake
from jaxdt.runtime.net.connection import Address, Connection
from jaxdt.runtime.net.frame import Feed, Frame, FrameError, Payload
from jaxdt.runtime.net.handshake import Dialler, Hello
from jaxdt.runtime.net.limits import Limits
from jaxdt.runtime.net.link_state import Link
from jaxdt.runtime.net.self_pipe import SelfPipe
from jaxdt.runtime.net.shaper import Shaper


@dataclass(eq=False)
class Outgoing:
    """A message until it is acknowledged. `offset` is how far it has been handed to the connection."""

    sequence: int
    priority: int
    view: int
    head: bytes
    table: bytes
    leaves: Sequence
    total_bytes: int
    payload: Payload | None = None
    offset: int = 0
    ready_s: float = 0.0


class OutboundChannel:
    """`hello(session, oldest)` makes our greeting; `link` hears up, down, refused and unreachable."""

    def __init__(
        self,
        name: str,
        hello: Callable[[int, int], Hello],
        context: ssl.SSLContext | None,
        link: Link,
        shaper: Shaper | None,
        limits: Limits,
    ):
        self._name = name
        self._hello = hello
        self._link = link
        self._shaper = shaper
        self._limits = limits
        self.session = secrets.randbits(62) + 1
        self._waker = SelfPipe()
        self._dialler = Dialler(context, link, limits, self._waker)

        self._lock = threading.Lock()  # of what other threads touch, down to the blank line
        self._address: Address | None = None
        self._offer: tuple[Connection, Hello] | None = None
        self._wire: Connection | None = None
        self._inbox: list[Outgoing] = []
        self._unacked: dict[int, Outgoing] = {}  # by sequence, ascending
        self._sequence = 0
        self._queued_bytes = 0
        self._asleep = False
        self._closing_s: float | None = None
        self._ended = False

        self._heap: list[tuple[int, int, Outgoing]] = []
        self._line: deque[tuple[float, list]] = deque()
        self._n_connections = 0
        self.bytes_out = self.messages_out = self.resent_bytes = 0

    # --- any thread ---

    def send(self, head: bytes, table: bytes, leaves: Sequence, total_bytes: int, priority: int, view: int) -> bool:
        """Queue a message; false when the lane has ended."""
        with self._lock:
            if self._ended or self._closing_s is not None:
                return False
            self._sequence += 1
            message = Outgoing(self._sequence, priority, view, head, table, leaves, total_bytes)
            self._unacked[message.sequence] = message
            self._inbox.append(message)
            self._queued_bytes += total_bytes
            self.messages_out += 1
            if self._asleep:
                self._asleep = False
                self._waker.wake()
            return True

    def dial_to(self, address: Address) -> None:
        """From now on reach the peer there."""
        with self._lock:
            if address != self._address:
                self._address = address
                self._waker.wake()

    def take_over(self, wire: Connection, theirs: Hello) -> None:
        """Send on a connection that the peer opened for that; it replaces what there is."""
        try:
            handshake.say(wire, frame.WELCOME, self._hello(self.session, self.oldest()))
        except OSError as error:
            self._link.unreachable(str(error))
            wire.close()
            return
        with self._lock:
            previous, self._offer = self._offer, (wire, theirs)
            if previous:
                previous[0].close()
            if self._wire:
                self._wire.cut()
            self._waker.wake()
            if self._ended:
                wire.close()

    def oldest(self) -> int:
        """Sequence of the oldest message that is not acknowledged, or of the next one."""
        with self._lock:
            return next(iter(self._unacked), self._sequence + 1)

    def close(self, flush_s: float) -> None:
        """Send what is queued for at most flush_s, then end. The caller cuts after that."""
        with self._lock:
            self._closing_s = time.monotonic() + flush_s
            self._waker.wake()

    def cut(self) -> None:
        """End the present connection or handshake."""
        with self._lock:
            self._dialler.cut()
            if self._wire:
                self._wire.cut()
            self._waker.wake()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def reconnects(self) -> int:
        return max(0, self._n_connections - 1)

    # --- the sender thread ---

    def run(self) -> None:
        """Until closed: find a connection, serve it, find the next."""
        try:
            while not self._finished():
                found = self._find()
                if found is not None:
                    self._use(*found)
        finally:
            with self._lock:
                self._ended = True
                self._queued_bytes = 0
                self._waker.close()
                if self._offer:
                    self._offer[0].close()

    def _finished(self) -> bool:
        if self._closing_s is None:
            return False
        return not self._unacked or time.monotonic() >= self._closing_s

    def _find(self) -> tuple[Connection, Hello] | None:
        self._waker.clear()  # before looking: what changes after that wakes again
        with self._lock:
            found, self._offer = self._offer, None
            address = self._address
        if found is not None:
            return found
        if address is not None:
            return self._dialler.attempt(address, self._hello(self.session, self.oldest()))
        self._waker.wait(self._until_closing(None))
        return None

    def _use(self, wire: Connection, theirs: Hello) -> None:
        with self._lock:
            self._wire = wire
            overtaken = self._offer is not None
        if overtaken:
            wire.cut()
        self._n_connections += 1
        since_s = time.monotonic()
        reason = f"{self._name} lane: a bug"
        try:
            self._link.up()
            self._serve(wire, theirs)
            reason = "closed"
        except (OSError, FrameError) as error:
            reason = f"{self._name} lane: {error}"
        finally:
            with self._lock:
                self._wire = None
                lost = self._closing_s is None and self._offer is None
            wire.close()
            self._link.down(reason)
        if time.monotonic() - since_s > self._limits.backoff_s_max:
            self._dialler.reset()
        if lost and self._address is not None:
            self._dialler.pause()

    def _serve(self, wire: Connection, theirs: Hello) -> None:
        wire.unblock(self._waker)
        self._restart(theirs)
        acks = Feed(frame.parse(self._limits, (frame.ACK,), place=lambda _: (), done=self._acknowledged))

        def pick_up_acks() -> None:
            while data := wire.take():
                acks.feed(data)

        pick_up_acks()
        while not self._finished():
            self._take_in()
            wait_s = self._step(wire, pick_up_acks)
            if wait_s is None or wait_s > 0:
                self._sleep(wire, wait_s)
            pick_up_acks()

    def _restart(self, theirs: Hello) -> None:
        """Drop what has arrived, and begin the rest again."""
        with self._lock:
            self._inbox.clear()
            again = list(self._unacked.values())
        if theirs.session == self.session:
            arrived = {m.sequence for m in again if any(a <= m.sequence <= b for a, b in theirs.have)}
            for sequence in arrived:
                self._settle(sequence)
            again = [message for message in again if message.sequence not in arrived]
        self._heap.clear()
        self._line.clear()
        for message in again:
            self.resent_bytes += message.offset
            message.offset = 0
            self._enqueue(message)

    def _take_in(self) -> None:
        with self._lock:
            new, self._inbox = self._inbox, []
        for message in new:
            self._enqueue(message)

    def _enqueue(self, message: Outgoing) -> None:
        if message.payload is None:
            # Waits for the device where need be: here, not in send().
            message.payload = Payload([np.ascontiguousarray(leaf) for leaf in message.leaves])
            message.leaves = ()
        message.ready_s = time.monotonic()
        heapq.heappush(self._heap, (message.priority, message.sequence, message))

    def _step(self, wire: Connection, meanwhile: Callable[[], None]) -> float | None:
        """Write or pick one chunk; the seconds until there is more to do, None for as long as nothing new comes."""
        now_s = time.monotonic()
        if self._line and self._line[0][0] <= now_s:
            self._write(wire, self._line.popleft()[1], meanwhile)
        elif self._heap and self._link_free_s() <= now_s:
            message, pieces = self._pick()
            if self._shaper is None:
                self._write(wire, pieces, meanwhile)
            else:
                self._line.append((self._shaper.transmit(message.ready_s, sum(map(len, pieces))), pieces))
        else:
            return self._until_next(now_s)
        return 0.0

    def _write(self, wire: Connection, pieces: list, meanwhile: Callable[[], None]) -> None:
        wire.push(pieces, meanwhile)
        self.bytes_out += sum(map(len, pieces))

    def _pick(self) -> tuple[Outgoing, list]:
        """The next chunk of the most urgent message: its pieces, header first."""
        message = self._heap[0][2]
        offset = message.offset
        if not offset and self._shaper is not None and self._shaper.drops():
            raise ConnectionAbortedError("emulated drop")
        n_bytes = min(self._limits.chunk_bytes, message.total_bytes - offset)
        message.offset += n_bytes
        if message.offset == message.total_bytes:
            heapq.heappop(self._heap)
        control = frame.pack(
            frame.MESSAGE,
            b"" if offset else message.head,
            b"" if offset else message.table,
            view=message.view,
            sequence=message.sequence,
            offset=offset,
            payload_bytes=n_bytes,
            total_bytes=message.total_bytes,
        )
        return message, [control, *message.payload.part(offset, n_bytes)]

    def _link_free_s(self) -> float:
        # A control message is small and never waits for more than the chunk that is on the link.
        if self._shaper is None or self._name == "control":
            return float("-inf")
        return self._shaper.free_s

    def _until_next(self, now_s: float) -> float | None:
        instants = [self._line[0][0]] if self._line else []
        if self._heap:
            instants.append(self._link_free_s())
        wait_s = max(0.0, min(instants) - now_s) if instants else None
        return self._until_closing(wait_s)

    def _until_closing(self, wait_s: float | None) -> float | None:
        if self._closing_s is None:
            return wait_s
        left_s = max(0.0, self._closing_s - time.monotonic())
        return left_s if wait_s is None else min(left_s, wait_s)

    def _sleep(self, wire: Connection, timeout_s: float | None) -> None:
        with self._lock:
            if self._inbox:
                return
            self._asleep = True
        wire.wait(timeout_s)
        with self._lock:
            self._asleep = False
        self._waker.clear()

    def _acknowledged(self, ack: Frame) -> None:
        message = self._unacked.get(ack.sequence)
        if message is not None and message.offset < message.total_bytes:
            raise FrameError(f"ack of message {ack.sequence}, of which {message.offset} bytes are sent")
        self._settle(ack.sequence)
        self._dialler.reset()

    def _settle(self, sequence: int) -> None:
        with self._lock:
            message = self._unacked.pop(sequence, None)
            if message is not None:
                self._queued_bytes -= message.total_bytes
