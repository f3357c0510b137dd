"""Receives the messages of one channel from one peer: each once, straight into the arrays that the caller chose.

A connection may break at any byte. The channel remembers which messages of a session have arrived, so that the next
connection of the same session leaves them out. A message that was received in part starts again, in the same arrays.
The sender opens the connections; a host that cannot be dialed (NAT) opens them itself, with a `ReverseDialer`.
"""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxdt.run.errors import BadInput
from jaxdt.runtime.net import frame
from jaxdt.runtime.net.address import Address
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Connection, SelfPipe
from jaxdt.runtime.net.dialer import Dialer
from jaxdt.runtime.net.frame import DTYPES, Frame, FrameError, Leaf, Payload
from jaxdt.runtime.net.handshake import N_RANGES, HandshakeHello
from jaxdt.runtime.net.options import Expect, LinkState, OnMessage, Read, TransportLimits

_N_SESSIONS = 4  # remembered per channel: a late connection of an earlier session must not erase the present one
_SCRATCH_BYTES = 1 << 16


@dataclass(eq=False)
class PartialMessage:
    """A message of which `n_bytes` of payload have arrived.

    `leaves` and `payload` are None for an unwanted message: its bytes are read and dropped.
    """

    head: Any
    table: tuple[Leaf, ...]
    leaves: list[np.ndarray] | None
    payload: Payload | None
    total_bytes: int
    n_bytes: int = 0


@dataclass(eq=False)
class InboundSession:
    """The messages of one session of a sender. All sequences up to `floor` and those in `beyond` have arrived;
    `partial` have begun."""

    floor: int = 0
    beyond: set[int] = field(default_factory=set)
    partial: dict[int, PartialMessage] = field(default_factory=dict)

    def has(self, sequence: int) -> bool:
        return sequence <= self.floor or sequence in self.beyond

    def add(self, sequence: int) -> None:
        """This message has arrived."""
        self.beyond.add(sequence)
        self._raise_floor()

    def forget_below(self, oldest: int) -> None:
        """Treat everything below `oldest` as arrived: the sender does not hold it any more."""
        self.floor = max(self.floor, oldest - 1)
        self.beyond = {sequence for sequence in self.beyond if sequence > self.floor}
        self._raise_floor()

    def ranges(self) -> list[list[int]]:
        """The sequences that have arrived, as inclusive ranges."""
        ranges = [[0, self.floor]]
        for sequence in sorted(self.beyond):
            if sequence == ranges[-1][1] + 1:
                ranges[-1][1] = sequence
            elif len(ranges) < N_RANGES:
                ranges.append([sequence, sequence])
        return ranges

    def _raise_floor(self) -> None:
        while self.floor + 1 in self.beyond:
            self.floor += 1
            self.beyond.remove(self.floor)


class InboundChannel:
    """One channel from one peer, over all its connections. It serves at most one connection at a time."""

    def __init__(
        self, peer: int, name: str, limits: TransportLimits, *, on_message: OnMessage, expect: Expect, read: Read
    ):
        self.peer = peer
        self._name = name
        self._parse_head = read
        self._on_message = on_message
        self._expect = expect
        self._limits = limits
        self._sessions: dict[int, InboundSession] = {}
        self._connection: Connection | None = None
        self._link_state: LinkState | None = None
        self._serving = threading.Lock()  # held by the thread that receives
        self._dropped = False
        self._closed = False
        self._scratch: memoryview | None = None  # receives unwanted payload; None while there is none
        self.last_session = 0
        self._bytes_in = 0
        self._messages_in = 0
        self._duplicates = 0
        self._unwanted = 0

    def received(self) -> list[list[int]]:
        """The sequences of the last session that have arrived, as inclusive ranges."""
        with self._serving:
            session = self._sessions.get(self.last_session)
            return session.ranges() if session else []

    def serve(
        self,
        connection: Connection,
        hello: HandshakeHello,
        link_state: LinkState,
        send_welcome: Callable[[list], None] | None = None,
    ) -> None:
        """Receive on a greeted connection until it ends.

        `send_welcome(received)` answers a greeting with the sequences that have arrived already.
        """
        try:
            with self._only_connection(connection):
                session = self._session_of(hello)
                if send_welcome is not None:
                    send_welcome(session.ranges())
                self._link_state = link_state
                self._receive(connection, session)
        except (OSError, FrameError) as error:
            link_state.unreachable(f"inbound {self._name} channel: {error}")
        finally:
            connection.close()

    def stats(self) -> dict[str, int]:
        """Counters since the channel was made."""
        return {
            "bytes_in": self._bytes_in,
            "messages_in": self._messages_in,
            "duplicates": self._duplicates,
            "unwanted": self._unwanted,
        }

    def cut(self) -> None:
        """End the present connection, from any thread."""
        connection = self._connection
        if connection is not None:
            connection.cut()

    def drop(self) -> None:
        """End the connection and free partial messages. A kilobyte remains: which messages have arrived."""
        self._dropped = True
        self.cut()
        if self._serving.acquire(blocking=False):
            self._free_buffers()
            self._link_state = None
            self._serving.release()

    def close(self) -> None:
        self._closed = True
        self.drop()

    @contextmanager
    def _only_connection(self, connection: Connection):
        """Cut the channel's earlier connection and wait for its thread: two threads must not fill the same arrays."""
        self.cut()
        if not self._serving.acquire(timeout=self._limits.handshake_s):
            raise TimeoutError("an earlier connection is still delivering a message")
        try:
            self._connection = connection
            self._dropped = False
            if self._closed:
                raise ConnectionAbortedError("closed")
            yield
        finally:
            self._connection = None
            if self._dropped:
                self._free_buffers()
                self._link_state = None
            self._serving.release()

    def _free_buffers(self) -> None:
        self._scratch = None
        for session in self._sessions.values():
            session.partial.clear()

    def _session_of(self, hello: HandshakeHello) -> InboundSession:
        """The session that a sender announces, new or remembered."""
        session = self._sessions.pop(hello.session, None) or InboundSession()
        session.forget_below(hello.oldest)
        if hello.session != self.last_session:
            self._free_buffers()
        self.last_session = hello.session
        self._sessions[hello.session] = session  # last in order: the oldest sessions are forgotten first
        for session_id in list(self._sessions)[:-_N_SESSIONS]:
            del self._sessions[session_id]
        return session

    @property
    def _served_link_state(self) -> LinkState:
        assert self._link_state is not None, "it is set for as long as a connection is served"
        return self._link_state

    def _receive(self, connection: Connection, session: InboundSession) -> None:
        reason = f"inbound {self._name} channel: a bug"
        try:
            self._served_link_state.up()
            self._read_frames(connection, session)
        except (OSError, FrameError) as error:
            reason = f"inbound {self._name} channel: {error}"
        finally:
            self._served_link_state.down(reason)

    def _read_frames(self, connection: Connection, session: InboundSession) -> None:
        """Read frames until the connection ends with FrameError or OSError."""
        connection.start_receiving()
        parser = frame.parse(
            self._limits,
            (frame.MESSAGE,),
            buffers_for=lambda chunk: self._buffers_for(session, chunk),
            on_frame=lambda chunk: self._on_chunk(connection, session, chunk),
        )
        for buffer, between_frames in parser:
            connection.read_exactly(buffer, may_wait=between_frames)
            self._bytes_in += len(buffer)

    def _buffers_for(self, session: InboundSession, chunk: Frame) -> Iterable[memoryview]:
        if session.has(chunk.sequence):
            return self._scratch_buffers(chunk.payload_bytes)
        message = self._begin(session, chunk) if not chunk.offset else session.partial.get(chunk.sequence)
        if message is None or chunk.offset != message.n_bytes:
            expected = message.n_bytes if message else 0
            raise FrameError(f"message {chunk.sequence}: chunk at byte {chunk.offset}, expected byte {expected}")
        if chunk.total_bytes != message.total_bytes:
            expected = message.total_bytes
            raise FrameError(f"message {chunk.sequence}: payload of {chunk.total_bytes} bytes, expected {expected}")
        if message.payload is None:
            return self._scratch_buffers(chunk.payload_bytes)
        return message.payload.part(chunk.offset, chunk.payload_bytes)

    def _begin(self, session: InboundSession, chunk: Frame) -> PartialMessage:
        """The message of a first chunk: a new one, or one that an earlier connection had begun."""
        known = session.partial.get(chunk.sequence)
        if known is not None and known.table == chunk.table:
            known.n_bytes = 0
            return known
        if len(session.partial) >= self._limits.partial_max:
            raise FrameError(f"message {chunk.sequence}: {len(session.partial)} others begun and not ended")
        head, leaves = self._prepare(chunk)
        payload = None if leaves is None else Payload(leaves)
        message = PartialMessage(head, chunk.table, leaves, payload, chunk.total_bytes)
        session.partial[chunk.sequence] = message
        return message

    def _prepare(self, chunk: Frame) -> tuple[Any, list[np.ndarray] | None]:
        """The parsed head, and the arrays that receive the leaves; None instead of arrays for an unwanted message."""
        try:
            head = self._parse_head(chunk.head)
            table = [(DTYPES[leaf.dtype], leaf.shape) for leaf in chunk.table]
            buffers = self._expect(self.peer, head, table) if table else []
        except BadInput as error:
            self._served_link_state.refused(str(error))
            return None, None
        return head, None if buffers is None else _checked_leaves(buffers, chunk.table)

    def _scratch_buffers(self, n_bytes: int) -> Iterable[memoryview]:
        """Buffers for bytes that are dropped."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while n_bytes > 0:
            piece = self._scratch[:n_bytes]
            n_bytes -= len(piece)
            yield piece

    def _on_chunk(self, connection: Connection, session: InboundSession, chunk: Frame) -> None:
        """A chunk is whole. Deliver and acknowledge its message if it was the last one."""
        if session.has(chunk.sequence):
            self._duplicates += chunk.offset == 0
        elif not chunk.table and not chunk.total_bytes:
            self._deliver(session, chunk.sequence, *self._prepare(chunk))
        else:
            message = session.partial[chunk.sequence] if chunk.total_bytes else self._begin(session, chunk)
            message.n_bytes += chunk.payload_bytes
            if message.n_bytes < chunk.total_bytes:
                return
            del session.partial[chunk.sequence]
            self._deliver(session, chunk.sequence, message.head, message.leaves)
        if chunk.offset + chunk.payload_bytes == chunk.total_bytes:
            connection.write(frame.pack(frame.ACK, sequence=chunk.sequence))

    def _deliver(self, session: InboundSession, sequence: int, head: Any, leaves: list[np.ndarray] | None) -> None:
        session.add(sequence)
        if leaves is None:
            self._unwanted += 1
            return
        try:
            self._on_message(self.peer, head, leaves)
        except BadInput as error:
            self._unwanted += 1
            self._served_link_state.refused(str(error))
        else:
            self._messages_in += 1


class ReverseDialer:
    """The thread that keeps one inbound channel connected, where this side cannot be dialed.

    `hello(session, oldest, received)` makes the greeting.
    """

    def __init__(
        self,
        address: Address,
        hello: Callable[[int, int, list], HandshakeHello],
        authentication: Authentication,
        inbound: InboundChannel,
        link_state: LinkState,
        limits: TransportLimits,
    ):
        self._address = address
        self._hello = hello
        self._inbound = inbound
        self._link_state = link_state
        self._limits = limits
        self._self_pipe = SelfPipe()
        self._dialer = Dialer(authentication, link_state, limits, self._self_pipe)
        self._closing = False

    def run(self) -> None:
        """Dial, receive, and dial again, until closed."""
        try:
            while not self._closing:
                self._self_pipe.clear()  # before reading the address: a change after that wakes the thread again
                hello = self._hello(self._inbound.last_session, 0, self._inbound.received())
                greeted = self._dialer.attempt(self._address, hello)
                if greeted is not None:
                    self._receive(*greeted)
        finally:
            self._self_pipe.close()

    def dial_to(self, address: Address) -> None:
        """Dial this address from now on; from any thread."""
        if address != self._address:
            self._address = address
            self._self_pipe.wake()

    def close(self) -> None:
        """End the thread; from any thread."""
        self._closing = True
        self._dialer.cut()
        self._self_pipe.wake()

    def _receive(self, connection: Connection, hello: HandshakeHello) -> None:
        since_s = time.monotonic()
        self._inbound.serve(connection, hello, self._link_state)
        if time.monotonic() - since_s > self._limits.backoff_s_max:
            self._dialer.reset()
        if not self._closing:
            self._dialer.pause()


def _checked_leaves(buffers: list, table: tuple[Leaf, ...]) -> list[np.ndarray]:
    """The buffers of `expect` as arrays; ValueError, for a bug of the caller, when they do not fit the table."""
    if len(buffers) != len(table):
        raise ValueError(f"expect returned {len(buffers)} buffers for {len(table)} leaves")
    leaves = []
    for i, (buffer, leaf) in enumerate(zip(buffers, table, strict=True)):
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, DTYPES[leaf.dtype])
        fits = array.dtype == DTYPES[leaf.dtype] and array.nbytes == leaf.n_bytes
        if not (fits and array.flags.c_contiguous and array.flags.writeable):
            raise ValueError(f"expect: buffer {i} is {array.dtype}{array.shape}, expected writable contiguous {leaf}")
        leaves.append(array if isinstance(buffer, np.ndarray) else array.reshape(leaf.shape))
    return leaves
