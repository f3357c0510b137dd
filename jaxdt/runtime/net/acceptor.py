"""The listening side: accepts connections, reads who they are, and refuses those that do not belong to this peer.

Until its greeting has arrived, a connection costs one thread for at most `handshake_s`; there are at most
`n_greeting_max` such connections. A fault of one connection affects no other.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from jaxdt.runtime.net import frame, handshake, unix_socket
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Address, Connection
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.handshake import HandshakeHello, HandshakeRefused
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.self_pipe import SelfPipe
from jaxdt.spec.errors import BadInput

_FULL_S = 0.1  # pause when the system has no file descriptor left
_LINGER_S = 1.0


class Acceptor:
    """Accepts connections at an address, and hands those with a good greeting over.

    check(hello): raises HandshakeRefused for a connection that does not belong to this peer.
    welcome(connection, hello): takes over a greeted connection, in that connection's thread.
    refused(peer, reason): hears of every other connection; peer is None when the connection has not said who it is.
    spawn(name, target): starts a thread.
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
        self._lock = threading.Lock()
        self._greeting: set[Connection] = set()
        self._closing = False
        self._last_refusal: tuple[int | None, str] | None = None
        tcp = _bind(address)
        self._self_pipe = SelfPipe()
        self.address: Address = tcp.getsockname()[:2]
        self._listeners = [sock for sock in (tcp, unix_socket.listener(self.address)) if sock is not None]

    def run(self) -> None:
        """Accept until closed."""
        poller = select.poll()
        for listener in (*self._listeners, self._self_pipe):
            poller.register(listener, select.POLLIN)
        try:
            while not self._closing:
                ready = {fd for fd, _ in poller.poll()}
                for listener in self._listeners:
                    if listener.fileno() in ready:
                        self._accept_one(listener)
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

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, source = listener.accept()
            connection = Connection(sock, self._limits)
        except (BlockingIOError, ConnectionError):
            return  # the other side has ended the connection already
        except OSError as error:
            self._refused(None, f"cannot accept: {error}")
            self._self_pipe.wait(_FULL_S)
            return
        host = source[0] if source else "this host"
        with self._lock:
            admitted = len(self._greeting) < self._limits.n_greeting_max and not self._closing
            if admitted:
                self._greeting.add(connection)
        if admitted:
            self._spawn(f"accepted-{host}", lambda: self._greet(connection, host))
        else:
            connection.close()
            self._report(None, host, f"{self._limits.n_greeting_max} others have not greeted yet")

    def _greet(self, connection: Connection, host: str) -> None:
        connection.deadline_s = time.monotonic() + self._limits.handshake_s
        try:
            hello = self._read_greeting(connection, host)
        finally:
            with self._lock:
                self._greeting.remove(connection)
        if hello is None:
            connection.close()
        else:
            self._welcome(connection, hello)

    def _read_greeting(self, connection: Connection, host: str) -> HandshakeHello | None:
        """The greeting of a connection; None when it is refused, or was a token's."""
        peer = None
        try:
            shown = self._authentication.accept(connection)
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
        except ssl.SSLError as error:
            self._report(peer, host, error)
            connection.linger(_LINGER_S)
        except OSError as error:
            self._report(peer, host, error)
        else:
            return hello
        return None

    def _report(self, peer: int | None, host: str, reason: object) -> None:
        # A process that does not belong to the run dials every few seconds; a repeated refusal is reported once.
        refusal = (peer, f"{host}: {reason}")
        if not self._closing and refusal != self._last_refusal:
            self._last_refusal = refusal
            self._refused(*refusal)


def _bind(address: Address) -> socket.socket:
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise BadInput(f"listen: cannot bind {host}:{port} ({error.strerror})") from None
    listener.setblocking(False)
    return listener
