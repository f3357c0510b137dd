"""Sends the messages of one channel to one peer: one thread, one connection at a time, until the channel is closed.

The work has three parts. The send queue (`send_queue.py`) holds the messages and decides what goes next; a new
connection starts again what the peer does not have. This file finds the connections: it dials the peer, or takes one
that the peer has opened for this purpose. The chunk writer (`chunk_writer.py`) writes to a connection until it breaks.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdt.runtime.net import frame, handshake
from jaxdt.runtime.net.address import Address
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.chunk_writer import ChunkWriter
from jaxdt.runtime.net.connection import Connection, SelfPipe
from jaxdt.runtime.net.dialer import Dialer
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.handshake import HandshakeHello
from jaxdt.runtime.net.options import LinkState, TransportLimits
from jaxdt.runtime.net.send_queue import SendQueue
from jaxdt.runtime.net.shaper import Shaper


@dataclass(frozen=True)
class WayBack:
    """The requests of a channel to its transport where only one of two sides can dial the other.

    ask: this side cannot dial the peer; the peer learns of it with the next greeting.
    give: the peer cannot dial this side, so this side opens the connections of both directions from now on.
    """

    ask: Callable[[], None]
    give: Callable[[], None]


class OutboundChannel:
    """One channel to one peer. `hello(session, oldest)` makes the greeting; `link_state` gets what happens."""

    def __init__(
        self,
        name: str,
        hello: Callable[[int, int], HandshakeHello],
        authentication: Authentication,
        link_state: LinkState,
        shaper: Shaper | None,
        limits: TransportLimits,
        way_back: WayBack,
    ):
        self._name = name
        self._way_back = way_back
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
                self._way_back.give()
        elif self._dialer.is_unanswered:
            self._failing_since_s = None
        elif time.monotonic() - self._failing_since_s >= self._limits.undialable_s:
            self._failing_since_s = time.monotonic()
            self._n_rounds += 1
            if self._link_state.is_up and not self._has_asked_back:
                self._has_asked_back = True
                self._way_back.ask()
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
