"""A way to wake a thread that waits in poll() for a connection."""

import select
import socket
import threading

_READ_BYTES = 1 << 12


class SelfPipe:
    """A socket pair that one thread polls beside its connection; another thread writes a byte to end the wait."""

    def __init__(self):
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def wake(self) -> None:
        """End the wait, from any thread. After `close` this does nothing."""
        with self._lock:
            if self._closed:
                return
            try:
                self._writer.send(b"\0")
            except BlockingIOError:
                return  # the pipe is full: the reader will wake anyway

    def clear(self) -> None:
        """Discard past wakes."""
        try:
            self._reader.recv(_READ_BYTES)
        except BlockingIOError:
            return

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until woken or until the time is over; returns whether it was woken."""
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
    """A timeout in the whole milliseconds that poll() takes; None means no limit."""
    return None if timeout_s is None else max(0, int(timeout_s * 1000))
