"""What comes in from one peer on one lane: each message once, straight into the arrays that the caller chose.

A connection may break at any byte. What its stream had received stays known, so that the next connection of the
same session leaves it out, and a message that was half there is filled again from its start, in the same arrays.
"""

import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxdt.runtime.net import frame
from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.frame import DTYPES, Frame, FrameError, Leaf, Payload
from jaxdt.runtime.net.handshake import N_RANGES, Hello
from jaxdt.runtime.net.limits import Limits
from jaxdt.runtime.net.link_state import Link
from jaxdt.spec.errors import BadInput

_N_SESSIONS = 4  # load_durable_state per lane: a late connection of an earlier one must not erase the present one
_SCRATCH_BYTES = 1 << 16

Read = Callable[[dict], Any]
OnMessage = Callable[[int, Any, list[np.ndarray]], None]
Expect = Callable[[int, Any, list[tuple[np.dtype, tuple[int, ...]]]], list | None]


@dataclass(eq=False)
class Assembly:
    """A message on its way in. `leaves` is None when nobody wants it: its bytes are read and dropped."""

    head: Any
    table: tuple[Leaf, ...]
    leaves: list[np.ndarray] | None
    payload: Payload | None
    total_bytes: int
    n_bytes: int = 0


@dataclass(eq=False)
class Stream:
    """The messages of one session: all up to `floor` and those in `beyond` have arrived; `partial` have begun."""

    floor: int = 0
    beyond: set[int] = field(default_factory=set)
    partial: dict[int, Assembly] = field(default_factory=dict)

    def has(self, sequence: int) -> bool:
        return sequence <= self.floor or sequence in self.beyond

    def add(self, sequence: int) -> None:
        self.beyond.add(sequence)
        while self.floor + 1 in self.beyond:
            self.floor += 1
            self.beyond.remove(self.floor)

    def forget_below(self, oldest: int) -> None:
        """The sender holds nothing older, so that what is missing below will never come."""
        self.floor = max(self.floor, oldest - 1)
        self.beyond = {sequence for sequence in self.beyond if sequence > self.floor}
        while self.floor + 1 in self.beyond:
            self.floor += 1
            self.beyond.remove(self.floor)

    def ranges(self) -> list[list[int]]:
        """What has arrived, as inclusive ranges."""
        ranges = [[0, self.floor]]
        for sequence in sorted(self.beyond):
            if sequence == ranges[-1][1] + 1:
                ranges[-1][1] = sequence
            elif len(ranges) < N_RANGES:
                ranges.append([sequence, sequence])
        return ranges


class Inbound:
    """One lane from one peer, over all its connections; at most one of them is served at a time."""

    def __init__(self, peer: int, lane: str, read: Read, on_message: OnMessage, expect: Expect, limits: Limits):
        self.peer = peer
        self._lane = lane
        self._read_head = read
        self._on_message = on_message
        self._expect = expect
        self._limits = limits
        self._streams: dict[int, Stream] = {}
        self._wire: Connection | None = None
        self._link: Link | None = None
        self._turn = threading.Lock()
        self._dropped = self._closed = False
        self._scratch: memoryview | None = None  # while something is dropped
        self.last_session = 0
        self.bytes_in = self.messages_in = self.duplicates = self.unwanted = 0

    def have(self) -> list[list[int]]:
        """What has arrived of the last session."""
        with self._turn:
            stream = self._streams.get(self.last_session)
            return stream.ranges() if stream else []

    def serve(self, wire: Connection, theirs: Hello, link: Link, welcome: Callable[[list], None] | None = None) -> None:
        """Receive on a greeted connection until it ends. `welcome` answers a greeting with what we have already."""
        try:
            with self._turn_of(wire):
                stream = self._stream(theirs)
                if welcome is not None:
                    welcome(stream.ranges())
                self._link = link
                self._receive(wire, stream)
        except (OSError, FrameError) as error:
            link.unreachable(f"{self._lane} lane in: {error}")
        finally:
            wire.close()

    def cut(self) -> None:
        """End the present connection, from any thread."""
        wire = self._wire
        if wire is not None:
            wire.cut()

    def drop(self) -> None:
        """End the connection and free what was half received. What has arrived stays known, in a kilobyte."""
        self._dropped = True
        self.cut()
        if self._turn.acquire(blocking=False):
            self._free()
            self._link = None
            self._turn.release()

    def close(self) -> None:
        """End for good."""
        self._closed = True
        self.drop()

    @contextmanager
    def _turn_of(self, wire: Connection):
        """Cuts the lane's earlier connection and waits for its thread: two must not fill the same arrays."""
        self.cut()
        if not self._turn.acquire(timeout=self._limits.handshake_s):
            raise TimeoutError("an earlier connection is still delivering a message")
        try:
            self._wire = wire
            self._dropped = False
            if self._closed:
                raise ConnectionAbortedError("closed")
            yield
        finally:
            self._wire = None
            if self._dropped:
                self._free()
                self._link = None
            self._turn.release()

    def _free(self) -> None:
        self._scratch = None
        for stream in self._streams.values():
            stream.partial.clear()

    def _stream(self, theirs: Hello) -> Stream:
        """The sender's stream, new or known."""
        stream = self._streams.pop(theirs.session, None) or Stream()
        stream.forget_below(theirs.oldest)
        if theirs.session != self.last_session:
            self._free()
        self.last_session = theirs.session
        self._streams[theirs.session] = stream  # last in order: the oldest ones go first
        for session in list(self._streams)[:-_N_SESSIONS]:
            del self._streams[session]
        return stream

    def _receive(self, wire: Connection, stream: Stream) -> None:
        reason = f"{self._lane} lane in: a bug"
        try:
            self._link.up()
            self._read(wire, stream)
        except (OSError, FrameError) as error:
            reason = f"{self._lane} lane in: {error}"
        finally:
            self._link.down(reason)

    def _read(self, wire: Connection, stream: Stream) -> None:
        """Frames until the connection ends, with FrameError or OSError."""
        wire.block()
        parser = frame.parse(
            self._limits,
            (frame.MESSAGE,),
            place=lambda part: self._place(stream, part),
            done=lambda part: self._done(wire, stream, part),
        )
        for buffer, between in parser:
            wire.fill(buffer, may_wait=between)
            self.bytes_in += len(buffer)

    def _place(self, stream: Stream, part: Frame) -> Iterable[memoryview]:
        if stream.has(part.sequence):
            return self._discard(part.payload_bytes)
        assembly = self._begin(stream, part) if not part.offset else stream.partial.get(part.sequence)
        if assembly is None or part.offset != assembly.n_bytes:
            expected = assembly.n_bytes if assembly else 0
            raise FrameError(f"message {part.sequence}: chunk at byte {part.offset}, expected byte {expected}")
        if part.total_bytes != assembly.total_bytes:
            expected = assembly.total_bytes
            raise FrameError(f"message {part.sequence}: payload of {part.total_bytes} bytes, expected {expected}")
        if assembly.payload is None:
            return self._discard(part.payload_bytes)
        return assembly.payload.part(part.offset, part.payload_bytes)

    def _begin(self, stream: Stream, part: Frame) -> Assembly:
        known = stream.partial.get(part.sequence)
        if known is not None and known.table == part.table:
            known.n_bytes = 0
            return known
        if len(stream.partial) >= self._limits.partial_max:
            raise FrameError(f"message {part.sequence}: {len(stream.partial)} others begun and not ended")
        head, leaves = self._open(part)
        payload = None if leaves is None else Payload(leaves)
        assembly = Assembly(head, part.table, leaves, payload, part.total_bytes)
        stream.partial[part.sequence] = assembly
        return assembly

    def _open(self, part: Frame) -> tuple[Any, list[np.ndarray] | None]:
        """What the head says, and where the leaves go: None for nowhere."""
        try:
            head = self._read_head(part.head)
            table = [(DTYPES[leaf.dtype], leaf.shape) for leaf in part.table]
            buffers = self._expect(self.peer, head, table) if table else []
        except BadInput as error:
            self._link.refused(str(error))
            return None, None
        return head, None if buffers is None else _checked(buffers, part.table)

    def _discard(self, n_bytes: int) -> Iterable[memoryview]:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while n_bytes > 0:
            piece = self._scratch[:n_bytes]
            n_bytes -= len(piece)
            yield piece

    def _done(self, wire: Connection, stream: Stream, part: Frame) -> None:
        if stream.has(part.sequence):
            self.duplicates += part.offset == 0
        elif not part.table and not part.total_bytes:
            self._deliver(stream, part.sequence, *self._open(part))
        else:
            assembly = stream.partial[part.sequence] if part.total_bytes else self._begin(stream, part)
            assembly.n_bytes += part.payload_bytes
            if assembly.n_bytes < part.total_bytes:
                return
            del stream.partial[part.sequence]
            self._deliver(stream, part.sequence, assembly.head, assembly.leaves)
        if part.offset + part.payload_bytes == part.total_bytes:
            wire.write(frame.pack(frame.ACK, sequence=part.sequence))

    def _deliver(self, stream: Stream, sequence: int, head: Any, leaves: list[np.ndarray] | None) -> None:
        stream.add(sequence)
        if leaves is None:
            self.unwanted += 1
            return
        try:
            self._on_message(self.peer, head, leaves)
        except BadInput as error:
            self.unwanted += 1
            self._link.refused(str(error))
        else:
            self.messages_in += 1


def _checked(buffers: list, table: tuple[Leaf, ...]) -> list[np.ndarray]:
    """What `expect` returned, as arrays; ValueError when it does not fit the table, which is the caller's bug."""
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
