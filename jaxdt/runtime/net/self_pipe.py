"""Wakes a thread that waits for a connection."""

import select
import socket
import threading

_READ_BYTES = 1 << 12


class SelfPipe:
    """Ends another thread's wait: a byte in a socket pair, which poll sees beside the connection."""

    def __init__(self):
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """From any thread; nothing once it is closed."""
        with self._lock:
            if self._closed:
                return
            try:
                self._writer.send(b"\0")
            except BlockingIOError:
                return  # thousands of unread wakes wake as well

    def clear(self) -> None:
        try:
            self._reader.recv(_READ_BYTES)
        except BlockingIOError:
            return

    def wait(self, timeout_s: float | None) -> bool:
        """Until woken or the time is over; says whether it was woken."""
        poller = select.poll()
        poller.register(self, select.POLLIN)
        woken = bool(poller.poll(poll_ms(timeout_s)))
        self.clear()
        return woken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()


def poll_ms(timeout_s: float | None) -> int | None:
    """poll counts whole milliseconds; None is for ever."""
    return None if timeout_s is None else max(0, int(timeout_s * 1000))
