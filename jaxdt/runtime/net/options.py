"""Between a transport and its owner: the types of its callbacks, the limits of connections, the state of each link."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdt.runtime.identity.certificate import SignedCertificate

Read = Callable[[dict], Any]
OnMessage = Callable[[int, Any, list[np.ndarray]], None]
OnDeath = Callable[[str, Exception], None]
OnLink = Callable[[int | None, str, str], None]
Issue = Callable[[SignedCertificate, bytes], bytes]
Expect = Callable[[int, Any, list[tuple[np.dtype, tuple[int, ...]]]], list | None]


@dataclass(frozen=True)
class TransportLimits:
    """Sizes that a frame may claim, and how long a connection may make others wait.

    Sizes are checked before anything of that size is allocated. `chunk_bytes` is how much a sender writes before it
    looks at its queue again: a smaller chunk lets an urgent message overtake sooner; below about 256 KB throughput
    falls. `partial_max` bounds the unfinished messages of one session; a sender has at most one for each priority in
    use.
    """

    head_bytes_max: int = 1 << 20
    table_bytes_max: int = 1 << 20
    n_leaves_max: int = 1 << 14
    n_dims_max: int = 16
    payload_bytes_max: int = 1 << 34
    chunk_bytes: int = 1 << 20
    chunk_bytes_max: int = 1 << 22
    partial_max: int = 1024

    connect_s: float = 3.0  # until a host answers at all; the system repeats a lost packet after 1 s
    handshake_s: float = 10.0  # from the first packet to the end of the greeting
    idle_s: float = 30.0  # a frame that has begun and does not advance
    dead_link_s: float = 6.0  # unanswered keepalives or unacknowledged bytes
    undialable_s: float = 4.0  # of failed dials before the other side is asked to dial, and again before "no way"
    backoff_s_min: float = 0.05
    backoff_s_max: float = 5.0
    first_byte_s: float = 3.0  # from the accept to the first byte; the system repeats a lost packet after 1 s
    slow_handshake_s: float = 2.0  # a handshake that takes longer gives way where there is no other place
    n_greeting_max: int = 64  # accepted connections that have not identified themselves yet
    n_greeting_stranger_max: int = 32  # those from addresses from which no member has come
    n_greeting_source_max: int = 16  # those from one address


class LinkState:
    """Reports "up" with the first connection to a peer, and "down" when the last one is lost or a dial fails. "gone"
    says more than "down": a host that answers refused a dial, so the process there has ended.

    There are up to four connections: two channels in two directions. When one of them breaks and comes back, nothing is
    reported. Calls of `on_link` for one peer never overlap.
    """

    def __init__(self, peer: int, on_link: OnLink):
        self._peer = peer
        self._on_link = on_link
        self._lock = threading.RLock()
        self._n_connections = 0
        self._state = ""
        self._was_up = False
        self._refusal = ""
        self._silent = False

    @property
    def is_up(self) -> bool:
        """Whether there is a connection in either direction."""
        return self._n_connections > 0

    def up(self) -> None:
        """A connection has opened."""
        with self._lock:
            self._n_connections += 1
            self._was_up = True
            self._report("up", "")

    def down(self, reason: str) -> None:
        """A connection has ended."""
        with self._lock:
            self._n_connections -= 1
            self.unreachable(reason)

    def unreachable(self, reason: str) -> None:
        """An attempt to connect has failed."""
        with self._lock:
            if not self._n_connections and self._state != "gone":
                self._report("down", reason)

    def gone(self, reason: str) -> None:
        """The peer's host answers, and no process listens at the peer's address."""
        with self._lock:
            if not self._n_connections:
                self._report("gone", reason)

    def refused(self, reason: str) -> None:
        """One side has refused the other, or one of its messages. A repeated reason is reported once."""
        with self._lock:
            if reason != self._refusal and not self._silent:
                self._refusal = reason
                self._on_link(self._peer, "refused", reason)

    def no_way(self, reason: str) -> None:
        """Messages wait, and neither side can dial the other. A link that is lost as a whole is "down", and no more."""
        with self._lock:
            if not self._silent and (self._n_connections or not self._was_up):
                self._on_link(self._peer, "no way", reason)

    def silence(self) -> None:
        """Report nothing more: the peer has been dropped.

        This takes no lock, because the caller may hold it already: inside `on_link`, in another thread.
        """
        self._silent = True

    def _report(self, state: str, reason: str) -> None:
        if state != self._state and not self._silent:
            self._state = state
            self._on_link(self._peer, state, reason)
