"""The listening side: accepts connections, reads who they are, and refuses those that do not belong to this peer.

Until its greeting has arrived, a connection costs one thread for at most `handshake_s`, or `first_byte_s` if it says
nothing. How many there may be, and who gives way to whom, is in `strangers.py`. A fault of one connection affects no
other. A connection over the Unix socket needs no place: only processes of this user get one.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from jaxdt.runtime.net import frame, handshake, unix_socket
from jaxdt.runtime.net.address import Address, bind
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Connection, OtherSideClosed, SelfPipe, poll_ms
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.handshake import HandshakeHello, HandshakeRefused
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.strangers import GreetingPlaces, NoPlace, Place, ReportLimiter, source_of

_FULL_S = 0.1  # pause when the system has no file descriptor or no thread left
_LINGER_S = 1.0


class Acceptor:
    """Accepts connections at an address, and hands those with a good greeting over.

    check(hello): raises HandshakeRefused for a connection that does not belong to this peer.
    welcome(connection, hello): takes over a greeted connection, in that connection's thread.
    refused(peer, reason): hears of every other connection; peer is None when the connection has not said who it is.
    spawn(name, target): starts a thread; RuntimeError if the system has no room for it.
    """

    def __init__(
        self,
        address: Address,
        authentication: Authentication,
        limits: TransportLimits,
        *,
        check: Callable[[HandshakeHello], None],
        welcome: Callable[[Connection, HandshakeHello], None],
        refused: Callable[[int | None, str], None],
        spawn: Callable[[str, Callable[[], None]], None],
    ):
        self._authentication = authentication
        self._limits = limits
        self._check = check
        self._welcome = welcome
        self._refused = refused
        self._spawn = spawn
        self._lock = threading.Lock()  # guards everything below down to the blank line
        self._greeting: set[Connection] = set()
        self._places = GreetingPlaces(limits)
        self._reports = ReportLimiter()
        self._last_refusal: tuple[int | None, str] | None = None
        self._closing = False

        tcp = bind(address)
        self._self_pipe = SelfPipe()
        self._self_pipe.fileno()  # opened here, since the thread that accepts must not fail
        self.address: Address = tcp.getsockname()[:2]
        self._listeners = [sock for sock in (tcp, unix_socket.listener(self.address)) if sock is not None]

    def run(self) -> None:
        """Accept until closed."""
        poller = select.poll()
        for listener in (*self._listeners, self._self_pipe):
            poller.register(listener, select.POLLIN)
        try:
            while not self._closing:
                ready = {fd for fd, _ in poller.poll(poll_ms(self._until_summary_s()))}
                for listener in self._listeners:
                    if listener.fileno() in ready:
                        self._accept_one(listener)
                self._self_pipe.clear()
                self._report_suppressed()
        finally:
            for listener in self._listeners:
                listener.close()
            self._self_pipe.close()

    def close(self) -> None:
        """Accept no more connections, and end the handshakes in progress; from any thread."""
        with self._lock:
            self._closing = True
            for connection in self._greeting:
                connection.cut()
        self._self_pipe.wake()

    def expect_from(self, host: str) -> None:
        """A member is reached at this host, so that it may come from there; from any thread."""
        with self._lock:
            self._places.learn(source_of(host))

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # the other side has ended the connection already
        except OSError as error:
            self._pause(f"cannot accept: {error.strerror}")
            return
        source = source_of(address[0]) if sock.family != socket.AF_UNIX else ""
        host = source or "this host"
        if not source and not unix_socket.is_of_this_user(sock):
            sock.close()
            self._report(None, host, "the process on the Unix socket is of another user")
            return
        try:
            connection = Connection(sock, self._limits)
        except OSError:
            return  # the other side has ended the connection already
        try:
            place = self._admit(connection, source)
        except NoPlace as error:
            connection.close()
            self._report(None, host, error)
        else:
            self._serve(connection, host, place)

    def _serve(self, connection: Connection, host: str, place: Place | None) -> None:
        """Read the greeting in a thread. Where the system has no room for one, the connection ends, and no other."""
        try:
            self._spawn(f"accepted-{host}", lambda: self._greet(connection, host, place))
        except RuntimeError as error:
            with self._lock:
                self._greeting.discard(connection)
                if place is not None:
                    self._places.release(place)
            connection.close()
            self._pause(f"cannot serve a connection: {error}")

    def _pause(self, reason: str) -> None:
        """The system has no room for another connection. It may have some when others have ended."""
        self._report(None, "", reason)
        self._self_pipe.wait(_FULL_S)

    def _admit(self, connection: Connection, source: str) -> Place | None:
        """The place of a connection; None for a connection over the Unix socket. NoPlace if there is no place for
        it."""
        with self._lock:
            if self._closing:
                raise NoPlace("this side is closing")
            place = self._places.claim(source, connection, time.monotonic()) if source else None
            self._greeting.add(connection)
        return place

    def _greet(self, connection: Connection, host: str, place: Place | None) -> None:
        connection.deadline_s = time.monotonic() + self._limits.handshake_s
        try:
            hello = self._read_greeting(connection, host)
        finally:
            with self._lock:
                self._greeting.remove(connection)
                if place is not None:
                    self._places.release(place)
        if hello is None:
            connection.close()
            return
        if place is not None:
            with self._lock:
                self._places.learn(place.source)
        self._welcome(connection, hello)

    def _read_greeting(self, connection: Connection, host: str) -> HandshakeHello | None:
        """The greeting of a connection; None when it is refused, or was a token's."""
        peer = None
        try:
            first_byte = connection.first_byte(min(self._limits.first_byte_s, self._limits.handshake_s))
            shown = self._authentication.accept(connection, first_byte)
            if self._authentication.redeem(connection, shown):
                connection.linger(_LINGER_S)
                return None
            hello = handshake.parse_hello(handshake.read_frame(connection, (frame.GREETING,)).head)
            self._authentication.check(shown, hello.src)
            peer = hello.src
            self._check(hello)
        except (HandshakeRefused, FrameError) as error:
            self._report(peer, host, error)
            handshake.send_refusal(connection, str(error))
            connection.linger(_LINGER_S)
        except (OtherSideClosed, ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
            # The other side has ended it, so no peer was refused. A process that asks the coordinator one question
            # opens several connections, and ends those that still shake hands when it has its answer.
            return None
        except ssl.SSLError as error:
            self._report(peer, host, self._authentication.explain(error))
            connection.linger(_LINGER_S)
        except OSError as error:
            self._report(peer, host, f"a connection ended before its greeting: {error}")
        else:
            return hello
        return None

    def _report(self, peer: int | None, host: str, reason: object) -> None:
        # A process that does not belong to the run dials every few seconds; a repeated refusal is reported once.
        refusal = (peer, f"{host}: {reason}" if host else str(reason))
        with self._lock:
            if self._closing or refusal == self._last_refusal:
                return
            self._last_refusal = refusal
            now_s = time.monotonic()
            had_suppressed = self._reports.due_in_s(now_s) is not None
            is_admitted = self._reports.admits(host, now_s)
        if is_admitted:
            self._refused(*refusal)
        elif not had_suppressed:
            self._self_pipe.wake()  # the accepting thread sums up when the window is over

    def _until_summary_s(self) -> float | None:
        with self._lock:
            return self._reports.due_in_s(time.monotonic())

    def _report_suppressed(self) -> None:
        with self._lock:
            summary = self._reports.summary(time.monotonic())
        if summary is not None:
            self._refused(None, summary)
