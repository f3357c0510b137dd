"""The messages that one channel still has to deliver to one peer, in the order in which they go out.

A message leaves the queue when the peer acknowledges it. The most urgent message comes first, and the queue hands it
out in chunks, so that an activation overtakes a gradient slice between two chunks. After a connection has broken, the
next one starts every message again that the peer does not have.
"""

import heapq
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdt.runtime.net import frame
from jaxdt.runtime.net.frame import FrameError, Payload


@dataclass(eq=False)
class QueuedMessage:
    """A message until it is acknowledged. The connection has accepted its first `offset` bytes of payload.

    `leaves` become `payload` in the sender thread; `ready_s` is when they were ready to be sent.
    """

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


class SendQueue:
    """Any thread puts messages in; one sender thread takes chunks out. `wake_sender` wakes that thread from any other.

    `session` identifies this queue to the peer: sequences count from 1 within it.
    """

    def __init__(self, chunk_bytes: int, wake_sender: Callable[[], None]):
        self.session = secrets.randbits(62) + 1
        self.queued_bytes = 0  # payload that is not acknowledged
        self.messages_out = 0
        self.resent_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._wake_sender = wake_sender

        self._lock = threading.Lock()  # guards the counters, and everything below down to the blank line
        self._new: list[QueuedMessage] = []
        self._unacknowledged: dict[int, QueuedMessage] = {}  # by sequence, ascending
        self._last_sequence = 0
        self._sender_waits = False
        self._closed = False
        self._deadline_s: float | None = None

        self._heap: list[tuple[int, int, QueuedMessage]] = []  # (priority, sequence, message); of the sender thread

    # --- any thread ---

    def put(self, head: bytes, table: bytes, leaves: Sequence, total_bytes: int, priority: int, view: int) -> bool:
        """Queue a message; False when the queue is closed. A lower priority number goes first."""
        with self._lock:
            if self._closed:
                return False
            self._last_sequence += 1
            message = QueuedMessage(self._last_sequence, priority, view, head, table, leaves, total_bytes)
            self._unacknowledged[message.sequence] = message
            self._new.append(message)
            self.queued_bytes += total_bytes
            self.messages_out += 1
            if self._sender_waits:
                self._sender_waits = False
                self._wake_sender()
            return True

    def oldest_sequence(self) -> int:
        """The sequence of the oldest unacknowledged message; without one, that of the next message."""
        with self._lock:
            return next(iter(self._unacknowledged), self._last_sequence + 1)

    def close(self, flush_s: float) -> None:
        """Accept no more messages. The rest may be sent for at most flush_s."""
        with self._lock:
            self._closed = True
            self._deadline_s = time.monotonic() + flush_s
            self._wake_sender()

    def abandon(self) -> None:
        """Accept no more messages, and count none as queued, since none will be sent."""
        with self._lock:
            self._closed = True
            self.queued_bytes = 0

    @property
    def closing(self) -> bool:
        """Whether `close` was called."""
        return self._deadline_s is not None

    # --- the sender thread ---

    def finished(self) -> bool:
        """Whether the sender may end: the queue is closing, and it is empty or its time is over."""
        if self._deadline_s is None:
            return False
        return not self._unacknowledged or time.monotonic() >= self._deadline_s

    def until_deadline_s(self, wait_s: float | None) -> float | None:
        """The wait, no longer than until the deadline of `close`; None means no limit."""
        if self._deadline_s is None:
            return wait_s
        left_s = max(0.0, self._deadline_s - time.monotonic())
        return left_s if wait_s is None else min(left_s, wait_s)

    def begin_waiting(self) -> bool:
        """Have the next `put` wake the sender; False when there are new messages already."""
        with self._lock:
            if self._new:
                return False
            self._sender_waits = True
            return True

    def end_waiting(self) -> None:
        with self._lock:
            self._sender_waits = False

    def restart(self, received: Sequence[Sequence[int]]) -> None:
        """Begin on a new connection: remove the messages that the peer has received, and start all others again.

        `received` lists sequences of this session as inclusive ranges.
        """
        with self._lock:
            self._new.clear()
            messages = list(self._unacknowledged.values())
        self._heap.clear()
        for message in messages:
            if any(first <= message.sequence <= last for first, last in received):
                self._remove(message.sequence)
            else:
                self.resent_bytes += message.offset
                message.offset = 0
                self._push(message)

    def admit_new(self) -> None:
        """Order the messages that were put since the last call among the others."""
        with self._lock:
            messages, self._new = self._new, []
        for message in messages:
            self._push(message)

    def most_urgent(self) -> QueuedMessage | None:
        """The message whose chunk comes next, or None when all have been handed out."""
        return self._heap[0][2] if self._heap else None

    def next_chunk(self) -> list:
        """The next chunk of the most urgent message: the pieces of a frame, its header first."""
        message = self._heap[0][2]
        offset = message.offset
        n_bytes = min(self._chunk_bytes, message.total_bytes - offset)
        message.offset += n_bytes
        if message.offset == message.total_bytes:
            heapq.heappop(self._heap)
        assert message.payload is not None, "it was made when the message entered the heap"
        header = frame.pack_message(
            b"" if offset else message.head,
            b"" if offset else message.table,
            view=message.view,
            sequence=message.sequence,
            offset=offset,
            payload_bytes=n_bytes,
            total_bytes=message.total_bytes,
        )
        return [header, *message.payload.part(offset, n_bytes)]

    def acknowledge(self, sequence: int) -> None:
        """Remove a message that the peer has acknowledged; FrameError when it is not sent completely."""
        message = self._unacknowledged.get(sequence)
        if message is not None and message.offset < message.total_bytes:
            raise FrameError(f"ack of message {sequence}, of which {message.offset} bytes are sent")
        self._remove(sequence)

    def _push(self, message: QueuedMessage) -> None:
        if message.payload is None:
            # This waits for a device that still computes the array; the sender thread may wait, `put` must not.
            message.payload = Payload([np.ascontiguousarray(leaf) for leaf in message.leaves])
            message.leaves = ()
        message.ready_s = time.monotonic()
        heapq.heappush(self._heap, (message.priority, message.sequence, message))

    def _remove(self, sequence: int) -> None:
        with self._lock:
            message = self._unacknowledged.pop(sequence, None)
            if message is not None:
                self.queued_bytes -= message.total_bytes
