"""A way to wake a thread that waits, by itself or in poll() beside a connection."""

import os
import threading

_NOT_OPEN = -1
_READ_BYTES = 1 << 12


class SelfPipe:
    """One thread waits, other threads wake it.

    Only a thread that polls a connection needs a descriptor for this. It is opened by the first `fileno`, an eventfd
    where the system has them, else a pipe; so a process that has no descriptor left can still wait for one."""

    def __init__(self):
        self._condition = threading.Condition()
        self._reader = self._writer = _NOT_OPEN
        self._woken = False
        self._closed = False

    def fileno(self) -> int:
        """The descriptor to poll; OSError if the system has none left."""
        with self._condition:
            if self._reader == _NOT_OPEN and not self._closed:
                self._reader, self._writer = _open()
                if self._woken:
                    self._write()
            return self._reader

    def wake(self) -> None:
        """End the wait, from any thread. After `close` this does nothing."""
        with self._condition:
            if not self._closed:
                self._woken = True
                self._condition.notify()
                self._write()

    def clear(self) -> None:
        """Discard past wakes."""
        with self._condition:
            self._woken = False
            if self._reader == _NOT_OPEN:
                return
            try:
                os.read(self._reader, _READ_BYTES)
            except BlockingIOError:
                return

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until woken or until the time is over; returns whether it was woken."""
        with self._condition:
            woken = self._condition.wait_for(lambda: self._woken, timeout_s)
        self.clear()
        return woken

    def close(self) -> None:
        with self._condition:
            self._closed = True
            for descriptor in {self._reader, self._writer} - {_NOT_OPEN}:
                os.close(descriptor)
            self._reader = self._writer = _NOT_OPEN

    def _write(self) -> None:
        if self._writer == _NOT_OPEN:
            return
        try:
            os.write(self._writer, (1).to_bytes(8, "little"))  # an eventfd takes eight bytes, of any value above 0
        except BlockingIOError:
            return  # the pipe is full: the reader will wake anyway


def _open() -> tuple[int, int]:
    """A descriptor to read from, and one to write to."""
    if hasattr(os, "eventfd"):
        both = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return both, both
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        os.set_blocking(descriptor, False)
    return reader, writer


def poll_ms(timeout_s: float | None) -> int | None:
    """A timeout in the whole milliseconds that poll() takes; None means no limit."""
    return None if timeout_s is None else max(0, int(timeout_s * 1000))
