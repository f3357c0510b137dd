"""The listening side: takes connections, hears who they are, and turns away what does not belong here.

Until its greeting is heard a connection costs one thread and no more than `handshake_s`; there are at most
`n_greeting_max` of them. What is wrong with one of them harms no other.
"""

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable

from jaxdt.runtime.net import frame, handshake, unix_socket
from jaxdt.runtime.net.connection import Address, Connection
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.handshake import Hello, Refused
from jaxdt.runtime.net.limits import Limits
from jaxdt.runtime.net.self_pipe import SelfPipe
from jaxdt.spec.errors import BadInput

_FULL_S = 0.1  # pause when the system has no file descriptor left
_LINGER_S = 1.0


class Acceptor:
    """`check` raises Refused for a Hello that does not belong here; `welcome` takes over the others, in their thread.

    `refused(peer, reason)` hears of the rest, with None for a peer that has not said who it is; `spawn(name, target)`
    starts a thread.
    """

    def __init__(
        self,
        address: Address,
        context: ssl.SSLContext | None,
        limits: Limits,
        *,
        check: Callable[[Hello], None],
        welcome: Callable[[Connection, Hello], None],
        refused: Callable[[int | None, str], None],
        spawn: Callable[[str, Callable[[], None]], None],
    ):
        self._context = context
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
        self._waker = SelfPipe()
        self.address: Address = tcp.getsockname()[:2]
        self._listeners = [sock for sock in (tcp, unix_socket.listener(self.address)) if sock is not None]

    def run(self) -> None:
        """Accept until closed."""
        poller = select.poll()
        for listener in (*self._listeners, self._waker):
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
            self._waker.close()

    def close(self) -> None:
        """Accept no more, and end the greetings in progress; from any thread."""
        with self._lock:
            self._closing = True
            for wire in self._greeting:
                wire.cut()
        self._waker.wake()

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            sock, where = listener.accept()
            wire = Connection(sock, self._limits)
        except (BlockingIOError, ConnectionError):
            return  # gone before we came to it
        except OSError as error:
            self._refused(None, f"cannot accept: {error}")
            self._waker.wait(_FULL_S)
            return
        name = where[0] if where else "this host"
        with self._lock:
            admitted = len(self._greeting) < self._limits.n_greeting_max and not self._closing
            if admitted:
                self._greeting.add(wire)
        if admitted:
            self._spawn(f"accepted-{name}", lambda: self._greet(wire, name))
        else:
            wire.close()
            self._report(None, name, f"{self._limits.n_greeting_max} others have not greeted yet")

    def _greet(self, wire: Connection, name: str) -> None:
        wire.deadline_s = time.monotonic() + self._limits.handshake_s
        try:
            theirs = self._hear(wire, name)
        finally:
            with self._lock:
                self._greeting.remove(wire)
        if theirs is None:
            wire.close()
        else:
            self._welcome(wire, theirs)

    def _hear(self, wire: Connection, name: str) -> Hello | None:
        """Who it is, or None when it does not belong here."""
        peer = None
        try:
            if self._context is not None:
                if wire.first_byte() == frame.MAGIC[:1]:
                    raise Refused("credential: got plaintext, expected TLS with the credential of this run")
                handshake.secure(wire, self._context, dialled=False)
            theirs = handshake.hello_from(handshake.hear(wire, (frame.GREETING,)).head)
            peer = theirs.me
            self._check(theirs)
        except (Refused, FrameError) as error:
            self._report(peer, name, error)
            handshake.refuse(wire, str(error))
            wire.linger(_LINGER_S)
        except ssl.SSLError as error:
            self._report(peer, name, error)
            wire.linger(_LINGER_S)
        except OSError as error:
            self._report(peer, name, error)
        else:
            return theirs
        return None

    def _report(self, peer: int | None, name: str, reason: object) -> None:
        # Someone who does not belong here knocks every few seconds; one line is enough.
        said = (peer, f"{name}: {reason}")
        if not self._closing and said != self._last_refusal:
            self._last_refusal = said
            self._refused(*said)


def _bind(address: Address) -> socket.socket:
    host, port = address
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise BadInput(f"listen: cannot bind {host}:{port} ({error.strerror})") from None
    listener.setblocking(False)
    return listener
