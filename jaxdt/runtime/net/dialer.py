"""Opens connections to one peer: finds its address, connects, does the handshake, and pauses after a failure."""

import errno
import random
import select
import socket
import ssl
import time
from collections.abc import Callable

from jaxdt.runtime.net import unix_socket
from jaxdt.runtime.net.address import Address, format_address
from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Connection, SelfPipe, left_s, poll_ms
from jaxdt.runtime.net.frame import FrameError
from jaxdt.runtime.net.handshake import HandshakeHello, HandshakeRefused, greet
from jaxdt.runtime.net.options import LinkState, TransportLimits


class Dialer:
    """Dials one peer for one channel and direction, again and again. Each failure in a row doubles the pause.

    `link_state` gets the failures. `self_pipe` ends a pause or a connect early, for a new address or the end.
    """

    def __init__(
        self, authentication: Authentication, link_state: LinkState, limits: TransportLimits, self_pipe: SelfPipe
    ):
        self._authentication = authentication
        self._link_state = link_state
        self._limits = limits
        self._self_pipe = self_pipe
        self._pause_s = limits.backoff_s_min
        self._random = random.Random()
        self._connection: Connection | None = None
        self.failure = ""  # of the last attempt that failed
        self.is_unanswered = False  # the peer's host accepted the last connection, and no process answered in time

    def attempt(self, address: Address, hello: HandshakeHello) -> tuple[Connection, HandshakeHello] | None:
        """Dial once; returns the connection and the peer's answer, or None after a failure and its pause."""
        now_s = time.monotonic()
        self._connection = None
        self.is_unanswered = False
        try:
            sock = connect(address, now_s + self._limits.connect_s, self._self_pipe)
            self._connection = Connection(sock, self._limits)
            self._connection.deadline_s = now_s + self._limits.handshake_s
            self._authentication.dial(self._connection, hello.dst)
            return self._connection, greet(self._connection, hello)
        except InterruptedError:
            return None
        except ssl.SSLEOFError as error:  # the other side has closed meanwhile, as a peer does that ends
            self._fail(self._link_state.unreachable, f"{format_address(address)}: {error}", self._pause_s)
        except ssl.SSLError as error:
            reason = self._authentication.explain(error)
            self._fail(self._link_state.refused, f"{format_address(address)}: {reason}", self._limits.backoff_s_max)
        except FrameError as error:
            self._fail(self._link_state.refused, f"{format_address(address)}: {error}", self._limits.backoff_s_max)
        except HandshakeRefused as error:
            self._fail(self._link_state.refused, error, self._limits.backoff_s_max)
        except ConnectionRefusedError as error:
            self._fail(self._link_state.gone, f"{format_address(address)}: {error}", self._pause_s)
        except OSError as error:
            self.is_unanswered = self._connection is not None and isinstance(error, TimeoutError)
            self._fail(self._link_state.unreachable, f"{format_address(address)}: {error}", self._pause_s)
        return None

    def cut(self) -> None:
        """End a handshake in progress, from any thread."""
        if self._connection is not None:
            self._connection.cut()

    def reset(self) -> None:
        """Start with a short pause at the next failure: the last connection has proved good."""
        self._pause_s = self._limits.backoff_s_min

    def pause(self) -> None:
        """Wait before the next attempt, for a partly random time, so that peers do not come back in step."""
        self._self_pipe.wait(self._pause_s * self._random.uniform(0.7, 1.3))
        self._pause_s = min(2 * self._pause_s, self._limits.backoff_s_max)

    def _fail(self, report: Callable[[str], None], reason: object, pause_s: float) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.failure = str(reason)
        report(self.failure)
        self._pause_s = pause_s
        self.pause()


def connect(address: Address, deadline_s: float, self_pipe: SelfPipe) -> socket.socket:
    """A connected socket; OSError with the last reason, InterruptedError when `self_pipe` wakes meanwhile."""
    unix = unix_socket.dial(address)
    if unix is not None:
        return unix
    last_error: OSError = OSError(f"{address[0]} has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            _connect_one(sock, target, deadline_s, self_pipe)
        except InterruptedError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            last_error = error
        else:
            return sock
    raise last_error


def _connect_one(sock: socket.socket, target, deadline_s: float, self_pipe: SelfPipe) -> None:
    sock.setblocking(False)
    code = sock.connect_ex(target)
    if code == errno.EINPROGRESS:
        poller = select.poll()
        poller.register(sock, select.POLLOUT)
        poller.register(self_pipe, select.POLLIN)
        ready = dict(poller.poll(poll_ms(left_s(deadline_s))))
        if self_pipe.fileno() in ready:
            raise InterruptedError("woken while connecting")
        if not ready:
            raise TimeoutError("no answer")
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, errno.errorcode.get(code, "connect failed"))
