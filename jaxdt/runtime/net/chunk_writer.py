"""Writes the chunks of a send queue to a connection, and reads the acknowledgements."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxdt.runtime.net import frame
from jaxdt.runtime.net.connection import Connection, SelfPipe
from jaxdt.runtime.net.frame import Frame, FrameFeed
from jaxdt.runtime.net.options import TransportLimits
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
