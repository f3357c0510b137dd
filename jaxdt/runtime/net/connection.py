"""One connection, plain or encrypted. One thread at a time uses it; any thread may cut it, or wake its owner.

Two threads at once may neither read nor write TLS, or the records after it, so each connection has one owner: the
sender thread of a channel, which writes frames and reads acknowledgements, or a receiver thread, which reads frames and
writes acknowledgements. An owner that waits for its connection also polls a `SelfPipe`, by which other threads wake it.
"""

import errno
import os
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

from jaxdt.runtime.net.aead_records import RECORD_BYTES, AeadRecords
from jaxdt.runtime.net.options import TransportLimits

_N_PIECES = 64  # in one sendmsg; the system's limit is 1024
_SEND_S = 0.2  # a blocking write may take this long before acknowledgements are read
_SMALL_BYTES = 1 << 12  # below this a copy costs less than a record of its own
_READ_BYTES = 1 << 12
_WAKES_BYTES = 1 << 12  # of a self pipe
_NOT_OPEN = -1
_UNIX_BYTES = 1 << 22  # send buffer of a Unix socket, as far as the system allows; with a smaller one senders stall


class OtherSideClosed(ConnectionAbortedError):
    """The other side has closed the connection."""


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
                self._reader, self._writer = _open_wakes()
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
                os.read(self._reader, _WAKES_BYTES)
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


def _open_wakes() -> tuple[int, int]:
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


class Connection:
    """A connected socket. `deadline_s` (monotonic) bounds a whole handshake; after it, each read has idle_s."""

    def __init__(self, sock: socket.socket, limits: TransportLimits):
        self._sock: socket.socket = sock
        self._limits = limits
        self._lock = threading.Lock()
        self._cut = False
        self._poller = select.poll()
        # A flag, not a bound method: a reference cycle would keep the buffers until the garbage collector runs.
        self._reads_whole_buffers = False
        self._records: AeadRecords | None = None
        self._has_spoken = False
        self.deadline_s: float | None = None
        try:
            _set_options(sock, limits)
        except OSError:
            sock.close()
            raise

    def first_byte(self, timeout_s: float) -> bytes:
        """The first byte, which stays unread; before TLS only. OSError when none comes within the time."""
        self._sock.settimeout(timeout_s)
        try:
            byte = self._sock.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            raise TimeoutError(f"nothing came within {timeout_s:g} s") from None
        if not byte:
            raise OtherSideClosed("closed before its first byte")
        self._has_spoken = True
        return byte

    def is_silent(self) -> bool:
        """Whether not even a first byte has come; from any thread."""
        with self._lock:
            if self._has_spoken or self._cut or self._sock.fileno() < 0:
                return False
            poller = select.poll()
            poller.register(self._sock, select.POLLIN)
            return not poller.poll(0)

    def enter_tls(self, context: ssl.SSLContext, server_side: bool) -> None:
        """Do the TLS handshake, within the deadline."""
        with self._lock:
            self._limit_next_call()
            self._sock = context.wrap_socket(self._sock, server_side=server_side, do_handshake_on_connect=False)
            if self._cut:
                raise ConnectionAbortedError("cut")
        self._sock.do_handshake()

    def certificate_of_other_side(self) -> bytes:
        """The verified certificate of the other side (DER), within TLS."""
        assert isinstance(self._sock, ssl.SSLSocket), "enter_tls was called before"
        der = self._sock.getpeercert(binary_form=True)
        assert der is not None, "both contexts require a certificate"
        return der

    def leave_tls(self, records: AeadRecords) -> None:
        """From here on both sides send records. Neither may have sent more in TLS, or have begun with records."""
        with self._lock:
            assert isinstance(self._sock, ssl.SSLSocket), "enter_tls was called before"
            if self._sock.pending():
                raise ConnectionAbortedError("more was sent in TLS than a share of the keys")
            self._sock = socket.socket(fileno=self._sock.detach())
            if self._cut:
                raise ConnectionAbortedError("cut")
        self._records = records

    def read_exactly(self, buffer: memoryview, may_wait: bool = False) -> None:
        """Read until the buffer is full. With `may_wait` the first byte may take any time."""
        n_read = 0
        while n_read < len(buffer):
            try:
                n = self._read_some(buffer[n_read:])
            except TimeoutError as error:
                if error.errno is not None:
                    raise  # from the system: the link is dead
                if may_wait and not n_read:
                    continue
                raise TimeoutError(f"{n_read} of {len(buffer)} expected bytes came in time") from None
            if not n:
                raise OtherSideClosed("closed by the other side")
            n_read += n

    def read_available(self) -> bytes | None:
        """The bytes that have arrived, without waiting; None when there are none."""
        try:
            data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not data:
            raise OtherSideClosed("closed by the other side")
        return self._records.decrypt(data) if self._records else data

    def write(self, data: bytes) -> None:
        """Write a handshake frame or an acknowledgement; blocks."""
        if self.deadline_s is not None:
            self._sock.settimeout(left_s(self.deadline_s))
        self._sock.sendall(b"".join(self._records.encrypt(data)) if self._records else data)

    def write_pieces(self, pieces: Sequence, read_acks: Callable[[], None]) -> None:
        """Write all pieces.

        While the socket has no room, `read_acks` reads acknowledgements: otherwise two peers whose both directions are
        full would wait for each other.
        """
        if self._records:
            for piece in _merged(pieces):
                for start in range(0, len(piece), RECORD_BYTES):
                    record = self._records.encrypt(piece[start : start + RECORD_BYTES])
                    self._write_reversed(record[::-1], read_acks)
        else:
            self._write_reversed(list(reversed(pieces)), read_acks)

    def start_receiving(self) -> None:
        """From here on the owner is a receiver thread."""
        self.deadline_s = None
        # The timeout is the system's own, so that one call can wait for a whole chunk.
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._limits.idle_s))
        self._reads_whole_buffers = True

    def start_sending(self, self_pipe: SelfPipe) -> None:
        """From here on the owner is a sender thread, which `self_pipe` wakes."""
        self.deadline_s = None
        # The socket is blocking, so that one call accepts a whole chunk; reads ask not to wait.
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_S))
        self._poller.register(self._sock, select.POLLIN)
        self._poller.register(self_pipe, select.POLLIN)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until bytes arrive, the self pipe wakes this thread, or the time is over; for a sender thread."""
        if timeout_s is not None and timeout_s < 1e-3:
            time.sleep(max(timeout_s, 0.0))  # poll() takes whole milliseconds
        else:
            self._poller.poll(poll_ms(timeout_s))

    def cut(self) -> None:
        """End the connection, from any thread: the owner's read or write fails at once."""
        with self._lock:
            self._cut = True
            try:
                # SSLSocket.shutdown would make the owner's next read return ciphertext.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            except OSError:
                return  # it is closed, or was never connected

    def linger(self, timeout_s: float) -> None:
        """Let the other side read the last frame. Closing now would reset the connection if there is unread input."""
        deadline_s = time.monotonic() + timeout_s
        try:
            socket.socket.shutdown(self._sock, socket.SHUT_WR)
            self._sock.settimeout(timeout_s)
            while time.monotonic() < deadline_s and socket.socket.recv(self._sock, _READ_BYTES):
                pass
        except OSError:
            return

    def close(self) -> None:
        with self._lock:
            self._sock.close()

    def _limit_next_call(self) -> None:
        """Let the socket's next call take no longer than what is left of the handshake's time."""
        assert self.deadline_s is not None, "a handshake has a deadline"
        self._sock.settimeout(left_s(self.deadline_s))

    def _read_some(self, buffer: memoryview) -> int:
        return self._records.read(self._read_ciphertext, buffer) if self._records else self._receive(buffer)

    def _read_ciphertext(self, buffer: memoryview, begun: bool) -> None:
        """Read until the buffer is full. TimeoutError has no errno only where no record has begun."""
        n_read = 0
        while n_read < len(buffer):
            try:
                n = self._receive(buffer[n_read:])
            except TimeoutError as error:
                if begun or n_read:
                    raise TimeoutError(errno.ETIMEDOUT, "a record stopped in its middle") from error
                raise
            if not n:
                raise OtherSideClosed("closed by the other side")
            n_read += n

    def _receive(self, buffer: memoryview) -> int:
        if not self._reads_whole_buffers:
            self._limit_next_call()
            return self._sock.recv_into(buffer)
        try:
            return self._sock.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError from None

    def _write_reversed(self, pieces: list, read_acks: Callable[[], None]) -> None:
        """Write a list of pieces whose last piece goes first; empties the list."""
        stalled_s = 0.0
        while pieces:
            try:
                n = self._sock.sendmsg(pieces[: -_N_PIECES - 1 : -1])
            except BlockingIOError:
                n = 0
            _remove_written(pieces, n)
            stalled_s = 0.0 if n else stalled_s + _SEND_S
            if stalled_s >= self._limits.idle_s:
                raise TimeoutError(f"nothing could be written for {self._limits.idle_s:g} s")
            if pieces:
                read_acks()


def _set_options(sock: socket.socket, limits: TransportLimits) -> None:
    """Switch Nagle's algorithm off, and have the system notice a dead link after dead_link_s.

    SO_SNDBUF of TCP stays unset: setting it would end the system's autotuning.
    """
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third_s = max(1, round(limits.dead_link_s / 3))
    options = {
        "TCP_KEEPIDLE": third_s,
        "TCP_KEEPALIVE": third_s,  # another system's name of TCP_KEEPIDLE
        "TCP_KEEPINTVL": third_s,
        "TCP_KEEPCNT": 2,
        "TCP_USER_TIMEOUT": round(limits.dead_link_s * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _timeval(seconds: float) -> bytes:
    whole_s, rest_s = divmod(seconds, 1)
    return struct.pack("@ll", int(whole_s), int(rest_s * 1e6))


def left_s(deadline_s: float) -> float:
    """Seconds until the deadline of a handshake; TimeoutError after it."""
    seconds = deadline_s - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the handshake took too long")
    return seconds


def _remove_written(pieces: list, n_bytes: int) -> None:
    """Remove the first n_bytes from a list of pieces in reverse order."""
    while pieces and n_bytes >= len(pieces[-1]):
        n_bytes -= len(pieces.pop())
    if n_bytes:
        pieces[-1] = pieces[-1][n_bytes:]


def _merged(pieces: Sequence) -> list:
    """The pieces, with neighbouring small ones joined, because each record costs a system call."""
    merged: list = []
    small = bytearray()
    for piece in pieces:
        if len(piece) <= _SMALL_BYTES:
            small += piece
            continue
        if small:
            merged.append(memoryview(small))
            small = bytearray()
        merged.append(piece)
    if small:
        merged.append(memoryview(small))
    return merged
