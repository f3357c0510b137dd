"""Sends the messages of one channel to one peer: one thread, one connection at a time, until the channel is closed.

The send queue (`send_queue.py`) holds the messages and decides what goes next; a new connection starts again what the
peer does not have. The channel finds the connections: it dials the peer, or takes one that the peer has opened for this
purpose. The chunk writer writes to a connection until it breaks.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxdt.runtime.net import frame, handshake
from jaxdt.runtime.net.address import Address
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Connection, SelfPipe
from jaxdt.runtime.net.dialer import Dialer
from jaxdt.runtime.net.frame import Frame, FrameError, FrameFeed
from jaxdt.runtime.net.handshake import HandshakeHello
from jaxdt.runtime.net.options import LinkState, TransportLimits
from jaxdt.runtime.net.send_queue import SendQueue
from jaxdt.runtime.net.shaper import Shaper


class ChunkWriter:
    """Used by the sender thread of one channel, for one connection after another.

    With a shaper, a chunk waits in `_delay_line` until the instant at which the emulated link delivers it.
    """

    def __init__(
        self, queue: SendQueue, shaper: Shaper | None, limits: TransportLimits, self_pipe: SelfPipe, is_control: bool
    ):
        self._queue = queue
        self._shaper = shaper
        self._limits = limits
        self._self_pipe = self_pipe
        self._is_control = is_control
        self._delay_line: deque[tuple[float, list]] = deque()  # (instant, chunk)
        self.acknowledged = False  # whether the present connection has brought an acknowledgement
        self.bytes_out = 0

    def serve(self, connection: Connection, received: Sequence[Sequence[int]]) -> None:
        """Write until the queue is finished; OSError or FrameError when the connection ends before.

        `received` lists, as inclusive ranges, the sequences of this session that the peer has.
        """
        connection.start_sending(self._self_pipe)
        self.acknowledged = False
        self._delay_line.clear()
        self._queue.restart(received)
        acks = FrameFeed(
            frame.parse(self._limits, (frame.ACK,), buffers_for=lambda _: (), on_frame=self._on_acknowledgement)
        )

        def read_acks() -> None:
            while data := connection.read_available():
                acks.feed(data)

        read_acks()
        while not self._queue.finished():
            self._queue.admit_new()
            wait_s = self._write_next(connection, read_acks)
            if wait_s is None or wait_s > 0:
                self._wait(connection, wait_s)
            read_acks()

    def _write_next(self, connection: Connection, read_acks: Callable[[], None]) -> float | None:
        """Write a chunk, or put one on the emulated link.

        Returns the seconds until there is more to do; None if there is nothing to do until a new message comes.
        """
        now_s = time.monotonic()
        if self._delay_line and self._delay_line[0][0] <= now_s:
            self._write(connection, self._delay_line.popleft()[1], read_acks)
            return 0.0
        message = self._queue.most_urgent()
        if message is None or self._link_free_s() > now_s:
            return self._until_next_s(now_s)
        if self._shaper is None:
            self._write(connection, self._queue.next_chunk(), read_acks)
            return 0.0
        if not message.offset and self._shaper.drops():
            raise ConnectionAbortedError("emulated drop")
        chunk = self._queue.next_chunk()
        self._delay_line.append((self._shaper.transmit(message.ready_s, sum(map(len, chunk))), chunk))
        return 0.0

    def _write(self, connection: Connection, chunk: list, read_acks: Callable[[], None]) -> None:
        self.bytes_out += sum(map(len, chunk))  # before the write, so that whatever the peer has is counted
        connection.write_pieces(chunk, read_acks)

    def _link_free_s(self) -> float:
        # A control message is small: it takes the next place, and waits at most for the chunk that is on the link.
        if self._shaper is None or self._is_control:
            return float("-inf")
        return self._shaper.free_s

    def _until_next_s(self, now_s: float) -> float | None:
        instants_s = [self._delay_line[0][0]] if self._delay_line else []
        if self._queue.most_urgent() is not None:
            instants_s.append(self._link_free_s())
        wait_s = max(0.0, min(instants_s) - now_s) if instants_s else None
        return self._queue.until_deadline_s(wait_s)

    def _wait(self, connection: Connection, timeout_s: float | None) -> None:
        if self._queue.begin_waiting():
            connection.wait(timeout_s)
            self._queue.end_waiting()
            self._self_pipe.clear()

    def _on_acknowledgement(self, ack: Frame) -> None:
        self._queue.acknowledge(ack.sequence)
        self.acknowledged = True


class OutboundChannel:
    """One channel to one peer. `hello(session, oldest)` makes the greeting; `link_state` gets what happens.

    Where only one of two sides can dial the other, the channel calls

    ask_back: this side cannot dial the peer; the peer learns of it with the next greeting.
    dial_back: the peer cannot dial this side, so this side opens the connections of both directions from now on.
    """

    def __init__(
        self,
        name: str,
        hello: Callable[[int, int], HandshakeHello],
        authentication: Authentication,
        link_state: LinkState,
        shaper: Shaper | None,
        limits: TransportLimits,
        *,
        ask_back: Callable[[], None],
        dial_back: Callable[[], None],
    ):
        self._name = name
        self._ask_back = ask_back
        self._dial_back = dial_back
        self._hello = hello
        self._link_state = link_state
        self._limits = limits
        self._self_pipe = SelfPipe()
        self._queue = SendQueue(limits.chunk_bytes, self._self_pipe.wake)
        self._writer = ChunkWriter(self._queue, shaper, limits, self._self_pipe, is_control=name == "control")
        self._dialer = Dialer(authentication, link_state, limits, self._self_pipe)

        self._failing_since_s: float | None = None  # the present round of failed dials; None: none has failed
        self._n_rounds = 0  # of `undialable_s`, without a connection
        self._has_asked_back = False  # for a way back, since then

        self._lock = threading.Lock()  # guards everything below
        self._address: Address | None = None
        self._offered: tuple[Connection, HandshakeHello] | None = None  # opened by the peer, and not in use yet
        self._connection: Connection | None = None  # in use
        self._ended = False

    # --- any thread ---

    def send(self, head: bytes, table: bytes, leaves: Sequence, total_bytes: int, priority: int, view: int) -> bool:
        """Queue a message; False when the channel has ended."""
        return self._queue.put(head, table, leaves, total_bytes, priority, view)

    def dial_to(self, address: Address) -> None:
        """Dial this address from now on."""
        with self._lock:
            if address != self._address:
                self._address = address
                self._self_pipe.wake()

    def send_on(self, connection: Connection, hello: HandshakeHello) -> None:
        """Send on a connection that the peer has opened for this channel. It replaces the present one."""
        try:
            handshake.send_hello(connection, frame.WELCOME, self._next_hello())
        except OSError as error:
            self._link_state.unreachable(str(error))
            connection.close()
            return
        with self._lock:
            previous = self._offered
            self._offered = (connection, hello)
            if previous:
                previous[0].close()
            if self._connection:
                self._connection.cut()
            self._self_pipe.wake()
            if self._ended:
                connection.close()

    def close(self, flush_s: float) -> None:
        """Send what is queued for at most flush_s, then end. The caller cuts the connection after that time."""
        self._queue.close(flush_s)

    def cut(self) -> None:
        """End the present connection or handshake."""
        with self._lock:
            self._dialer.cut()
            if self._connection:
                self._connection.cut()
            self._self_pipe.wake()

    @property
    def queued_bytes(self) -> int:
        """Payload that is queued and not acknowledged."""
        return self._queue.queued_bytes

    def stats(self) -> dict[str, int]:
        """Counters since the channel was made."""
        return {
            "bytes_out": self._writer.bytes_out,
            "messages_out": self._queue.messages_out,
            "resent_bytes": self._queue.resent_bytes,
        }

    # --- the sender thread ---

    def run(self) -> None:
        """Find a connection, send on it, and find the next, until closed."""
        try:
            while not self._queue.finished():
                found = self._find_connection()
                if found is not None:
                    self._use(*found)
        finally:
            self._queue.abandon()
            with self._lock:
                self._ended = True
                self._self_pipe.close()
                if self._offered:
                    self._offered[0].close()

    def _find_connection(self) -> tuple[Connection, HandshakeHello] | None:
        """A connection and the peer's greeting; None after a failed dial, or when the thread was woken."""
        self._self_pipe.clear()  # before reading the state: a change after that wakes the thread again
        with self._lock:
            offered = self._offered
            self._offered = None
            address = self._address
        if offered is not None:
            return offered
        if address is not None:
            return self._dial(address)
        self._self_pipe.wait(self._queue.until_deadline_s(None))
        return None

    def _dial(self, address: Address) -> tuple[Connection, HandshakeHello] | None:
        """Dial once. A peer that connects to this side and that this side cannot dial is asked for a way back. After as
        long again, or where no side reaches the other, the link state hears that there is no way."""
        if self._failing_since_s is None:
            self._failing_since_s, self._n_rounds, self._has_asked_back = time.monotonic(), 0, False
        found = self._dialer.attempt(address, self._next_hello())
        if found is not None:
            self._failing_since_s = None
            if found[1].dial_back:
                self._dial_back()
        elif self._dialer.is_unanswered:
            self._failing_since_s = None
        elif time.monotonic() - self._failing_since_s >= self._limits.undialable_s:
            self._failing_since_s = time.monotonic()
            self._n_rounds += 1
            if self._link_state.is_up and not self._has_asked_back:
                self._has_asked_back = True
                self._ask_back()
            elif self._n_rounds > 1:
                self._link_state.no_way(f"cannot dial {self._dialer.failure}, and it does not dial this peer")
        return found

    def _next_hello(self) -> HandshakeHello:
        return self._hello(self._queue.session, self._queue.oldest_sequence())

    def _use(self, connection: Connection, hello: HandshakeHello) -> None:
        """Send on a connection until it ends. Pause before the next one if this one was lost."""
        self._failing_since_s = None
        with self._lock:
            self._connection = connection
            replaced = self._offered is not None
        if replaced:
            connection.cut()
        since_s = time.monotonic()
        reason = f"outbound {self._name} channel: a bug"
        try:
            self._link_state.up()
            self._writer.serve(connection, hello.received if hello.session == self._queue.session else ())
            reason = "closed"
        except (OSError, FrameError) as error:
            reason = f"outbound {self._name} channel: {error}"
        finally:
            with self._lock:
                self._connection = None
                lost = not self._queue.closing and self._offered is None
            connection.close()
            self._link_state.down(reason)
        if self._writer.acknowledged or time.monotonic() - since_s > self._limits.backoff_s_max:
            self._dialer.reset()
        if lost and self._address is not None:
            self._dialer.pause()
