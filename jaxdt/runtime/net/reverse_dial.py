"""Opens the connections on which a peer sends to us: for a host that nobody can dial (NAT)."""

import ssl
import time
from collections.abc import Callable

from jaxdt.runtime.net.connection import Address, Connection
from jaxdt.runtime.net.handshake import Dialler, Hello
from jaxdt.runtime.net.inbound import Inbound
from jaxdt.runtime.net.limits import Limits
from jaxdt.runtime.net.link_state import Link
from jaxdt.runtime.net.self_pipe import SelfPipe


class ReverseDialer:
    """One lane from one peer. `hello(session, oldest, have)` makes our greeting."""

    def __init__(
        self,
        address: Address,
        hello: Callable[[int, int, list], Hello],
        context: ssl.SSLContext | None,
        inbound: Inbound,
        link: Link,
        limits: Limits,
    ):
        self._address = address
        self._hello = hello
        self._inbound = inbound
        self._link = link
        self._limits = limits
        self._waker = SelfPipe()
        self._dialler = Dialler(context, link, limits, self._waker)
        self._closing = False

    def run(self) -> None:
        """Until closed: dial, receive, dial again."""
        try:
            while not self._closing:
                self._waker.clear()  # before looking: what changes after that wakes again
                hello = self._hello(self._inbound.last_session, 0, self._inbound.have())
                found = self._dialler.attempt(self._address, hello)
                if found is not None:
                    self._receive(*found)
        finally:
            self._waker.close()

    def dial_to(self, address: Address) -> None:
        """From now on reach the peer there."""
        if address != self._address:
            self._address = address
            self._waker.wake()

    def close(self) -> None:
        """End, from any thread."""
        self._closing = True
        self._dialler.cut()
        self._waker.wake()

    def _receive(self, wire: Connection, theirs: Hello) -> None:
        since_s = time.monotonic()
        self._inbound.serve(wire, theirs, self._link)
        if time.monotonic() - since_s > self._limits.backoff_s_max:
            self._dialler.reset()
        if not self._closing:
            self._dialler.pause()
