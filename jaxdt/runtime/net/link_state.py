"""The state of the connections to one peer, as the owner of the transport sees it."""

import threading

from jaxdt.runtime.net.options import OnLink


class LinkState:
    """Reports "up" with the first connection to a peer, and "down" when the last one is lost or a dial fails.

    There are up to four connections: two channels in two directions. When one of them breaks and comes back, nothing is
    reported. Calls of `on_link` for one peer never overlap.
    """

    def __init__(self, peer: int, on_link: OnLink):
        self._peer = peer
        self._on_link = on_link
        self._lock = threading.RLock()
        self._n_connections = 0
        self._state = ""
        self._refusal = ""
        self._silent = False

    def up(self) -> None:
        """A connection has opened."""
        with self._lock:
            self._n_connections += 1
            self._report("up", "")

    def down(self, reason: str) -> None:
        """A connection has ended."""
        with self._lock:
            self._n_connections -= 1
            self.unreachable(reason)

    def unreachable(self, reason: str) -> None:
        """An attempt to connect has failed."""
        with self._lock:
            if not self._n_connections:
                self._report("down", reason)

    def refused(self, reason: str) -> None:
        """One side has refused the other, or one of its messages. A repeated reason is reported once."""
        with self._lock:
            if reason != self._refusal and not self._silent:
                self._refusal = reason
                self._on_link(self._peer, "refused", reason)

    def silence(self) -> None:
        """Report nothing more: the peer has been dropped.

        This takes no lock, because the caller may hold it already: inside `on_link`, in another thread.
        """
        self._silent = True

    def _report(self, state: str, reason: str) -> None:
        if state != self._state and not self._silent:
            self._state = state
            self._on_link(self._peer, state, reason)
