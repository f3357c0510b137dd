"""One connection, plain or sealed, used by one thread at a time; any thread may cut it.

Neither TLS nor the records after it may be read or written by two threads at once, so each connection has one owner: a
lane's sender thread (it writes frames and picks up acks) or a receiver thread (it reads frames and writes acks).
"""

import errno
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence

from jaxdt.runtime.net import unix_socket
from jaxdt.runtime.net.aead_records import RECORD_BYTES, AeadRecords
from jaxdt.runtime.net.limits import Limits
from jaxdt.runtime.net.self_pipe import SelfPipe, poll_ms

Address = tuple[str, int]

_N_PIECES = 64  # of one sendmsg; the system's limit is 1024
_SEND_S = 0.2  # that one blocking write may take before acks are looked for
_SMALL_BYTES = 1 << 12  # below this a copy costs less than a record of its own
_READ_BYTES = 1 << 12
_UNIX_BYTES = 1 << 22  # on their way over a Unix socket, as far as the system allows: senders stall below


class Connection:
    """A connected socket. `deadline_s` (monotonic) bounds a whole handshake; without it each read has idle_s."""

    def __init__(self, sock: socket.socket, limits: Limits):
        self._sock = sock
        self._limits = limits
        self._lock = threading.Lock()
        self._cut = False
        self._waits = select.poll()
        self._by_chunks = False  # not a bound method: a cycle would keep the buffers until the collector comes
        self._sealed: AeadRecords | None = None
        self.deadline_s: float | None = None
        try:
            _tune(sock, limits)
        except OSError:
            sock.close()
            raise

    def first_byte(self) -> bytes:
        """What the next read begins with, left there; before TLS only."""
        self._sock.settimeout(_left_s(self.deadline_s))
        return self._sock.recv(1, socket.MSG_PEEK)

    def enter_tls(self, context: ssl.SSLContext, server_side: bool) -> None:
        """TLS handshake, within the deadline; `handshake.secure` calls this and `leave_tls`."""
        with self._lock:
            self._sock.settimeout(_left_s(self.deadline_s))
            self._sock = context.wrap_socket(self._sock, server_side=server_side, do_handshake_on_connect=False)
            if self._cut:
                raise ConnectionAbortedError("cut")
        self._sock.do_handshake()

    def leave_tls(self, sealed: AeadRecords) -> None:
        """From here on all is records of `sealed`. Nobody may have more to say in TLS, or have begun with records."""
        with self._lock:
            if self._sock.pending():
                raise ConnectionAbortedError("more was said in TLS than a share of the keys")
            self._sock = socket.socket(fileno=self._sock.detach())
            if self._cut:
                raise ConnectionAbortedError("cut")
        self._sealed = sealed

    def fill(self, buffer: memoryview, may_wait: bool = False) -> None:
        """Read until the buffer is full. `may_wait`: the first byte may take for ever."""
        got = 0
        while got < len(buffer):
            try:
                n = self._read_some(buffer[got:])
            except TimeoutError as error:
                if error.errno is not None:
                    raise  # the system's: the link is dead
                if may_wait and not got:
                    continue
                raise TimeoutError(f"{got} of {len(buffer)} expected bytes came in time") from None
            if not n:
                raise ConnectionAbortedError("closed by the other side")
            got += n

    def _read_some(self, buffer: memoryview) -> int:
        return self._sealed.read(self._fill_raw, buffer) if self._sealed else self._receive(buffer)

    def _fill_raw(self, buffer: memoryview, begun: bool) -> None:
        """Ciphertext until the buffer is full; TimeoutError without errno only where no record has begun."""
        got = 0
        while got < len(buffer):
            try:
                n = self._receive(buffer[got:])
            except TimeoutError as error:
                if begun or got:
                    raise TimeoutError(errno.ETIMEDOUT, "a record stopped in its middle") from error
                raise
            if not n:
                raise ConnectionAbortedError("closed by the other side")
            got += n

    def write(self, data: bytes) -> None:
        """Blocking: a handshake frame or an ack."""
        if self.deadline_s is not None:
            self._sock.settimeout(_left_s(self.deadline_s))
        self._sock.sendall(b"".join(self._sealed.seal(data)) if self._sealed else data)

    def block(self) -> None:
        """From here on the owner is a receiver thread."""
        self.deadline_s = None
        # The system's own timeout, so that one call may wait for a whole chunk.
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(self._limits.idle_s))
        self._by_chunks = True

    def unblock(self, waker: SelfPipe) -> None:
        """From here on the owner is a sender thread, which `waker` wakes."""
        self.deadline_s = None
        # Blocking, so that one call takes in a whole chunk; reads ask not to wait.
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(_SEND_S))
        self._waits.register(self._sock, select.POLLIN)
        self._waits.register(waker, select.POLLIN)

    def take(self) -> bytes | None:
        """What has come, without waiting; None for nothing."""
        try:
            data = self._sock.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        if not data:
            raise ConnectionAbortedError("closed by the other side")
        return self._sealed.take(data) if self._sealed else data

    def push(self, pieces: Sequence, meanwhile: Callable[[], None]) -> None:
        """Write all pieces. While the socket has no room, `meanwhile` picks up acks: two full directions never meet."""
        if self._sealed:
            for piece in _merged(pieces):
                for start in range(0, len(piece), RECORD_BYTES):
                    self._push_plain(self._sealed.seal(piece[start : start + RECORD_BYTES])[::-1], meanwhile)
        else:
            self._push_plain(list(reversed(pieces)), meanwhile)

    def _push_plain(self, rest: list, meanwhile: Callable[[], None]) -> None:
        stalled_s = 0.0
        while rest:
            try:
                n = self._sock.sendmsg(rest[: -_N_PIECES - 1 : -1])
            except BlockingIOError:
                n = 0
            _advance(rest, n)
            stalled_s = 0.0 if n else stalled_s + _SEND_S
            if stalled_s >= self._limits.idle_s:
                raise TimeoutError(f"nothing could be written for {self._limits.idle_s:g} s")
            if rest:
                meanwhile()

    def wait(self, timeout_s: float | None) -> None:
        """Until something comes, the waker wakes, or the time is over."""
        if timeout_s is not None and timeout_s < 1e-3:
            time.sleep(max(timeout_s, 0.0))  # poll counts whole milliseconds
        else:
            self._waits.poll(poll_ms(timeout_s))

    def cut(self) -> None:
        """End it from any thread: the owner's read or write fails at once."""
        with self._lock:
            self._cut = True
            try:
                # Not SSLSocket.shutdown, which would turn the owner's next read into one of ciphertext.
                socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
            except OSError:
                return  # closed or never connected: as wished

    def linger(self, timeout_s: float) -> None:
        """Let the other side read our last words: closing with unread input would reset the connection first."""
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

    def _receive(self, buffer: memoryview) -> int:
        if not self._by_chunks:
            self._sock.settimeout(_left_s(self.deadline_s))
            return self._sock.recv_into(buffer)
        try:
            return self._sock.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError from None


def connect(address: Address, deadline_s: float, waker: SelfPipe) -> socket.socket:
    """A connected socket; OSError with the last reason, InterruptedError when woken meanwhile."""
    if (here := unix_socket.dial(address)) is not None:
        return here
    error: OSError = OSError(f"{address[0]} has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            _connect_one(sock, target, deadline_s, waker)
        except InterruptedError:
            sock.close()
            raise
        except OSError as e:
            sock.close()
            error = e
        else:
            return sock
    raise error


def _connect_one(sock: socket.socket, target, deadline_s: float, waker: SelfPipe) -> None:
    sock.setblocking(False)
    code = sock.connect_ex(target)
    if code == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        poller.register(waker, select.POLLIN)
        ready = dict(poller.poll(poll_ms(_left_s(deadline_s))))
        if waker.fileno() in ready:
            raise InterruptedError("woken while connecting")
        if not ready:
            raise TimeoutError("no answer")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, errno.errorcode.get(code, "connect failed"))


def _tune(sock: socket.socket, limits: Limits) -> None:
    """No Nagle, and a dead link noticed after dead_link_s. SO_SNDBUF stays: setting it ends the system's autotuning."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    third_s = max(1, round(limits.dead_link_s / 3))
    options = {
        "TCP_KEEPIDLE": third_s,
        "TCP_KEEPALIVE": third_s,  # the same under another name
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


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the handshake took too long")
    return left_s


def _advance(rest: list, n_bytes: int) -> None:
    """Take n_bytes off a list of pieces that is in reverse order."""
    while rest and n_bytes >= len(rest[-1]):
        n_bytes -= len(rest.pop())
    if n_bytes:
        rest[-1] = rest[-1][n_bytes:]


def _merged(pieces: Sequence) -> list:
    """Neighbouring small pieces joined, large ones as they are: each record costs a system call."""
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
