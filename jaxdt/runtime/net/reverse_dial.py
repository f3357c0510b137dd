"""Opens the connections on which another peer sends to this one, for a host that nobody can dial (NAT)."""

import time
from collections.abc import Callable

from jaxdt.runtime.net.authentication import Authentication
from jaxdt.runtime.net.connection import Address, Connection
from jaxdt.runtime.net.dialer import Dialer
from jaxdt.runtime.net.handshake import HandshakeHello
from jaxdt.runtime.net.inbound_channel import InboundChannel
from jaxdt.runtime.net.link_state import LinkState
from jaxdt.runtime.net.options import TransportLimits
from jaxdt.runtime.net.self_pipe import SelfPipe


class ReverseDialer:
    """The thread that keeps one inbound channel connected. `hello(session, oldest, received)` makes the greeting."""

    def __init__(
        self,
        address: Address,
        hello: Callable[[int, int, list], HandshakeHello],
        authentication: Authentication,
        inbound: InboundChannel,
        link_state: LinkState,
        limits: TransportLimits,
    ):
        self._address = address
        self._hello = hello
        self._inbound = inbound
        self._link_state = link_state
        self._limits = limits
        self._self_pipe = SelfPipe()
        self._dialer = Dialer(authentication, link_state, limits, self._self_pipe)
        self._closing = False

    def run(self) -> None:
        """Dial, receive, and dial again, until closed."""
        try:
            while not self._closing:
                self._self_pipe.clear()  # before reading the address: a change after that wakes the thread again
                hello = self._hello(self._inbound.last_session, 0, self._inbound.received())
                greeted = self._dialer.attempt(self._address, hello)
                if greeted is not None:
                    self._receive(*greeted)
        finally:
            self._self_pipe.close()

    def dial_to(self, address: Address) -> None:
        """Dial this address from now on; from any thread."""
        if address != self._address:
            self._address = address
            self._self_pipe.wake()

    def close(self) -> None:
        """End the thread; from any thread."""
        self._closing = True
        self._dialer.cut()
        self._self_pipe.wake()

    def _receive(self, connection: Connection, hello: HandshakeHello) -> None:
        since_s = time.monotonic()
        self._inbound.serve(connection, hello, self._link_state)
        if time.monotonic() - since_s > self._limits.backoff_s_max:
            self._dialer.reset()
        if not self._closing:
            self._dialer.pause()
