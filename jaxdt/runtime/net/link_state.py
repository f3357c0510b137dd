"""What the caller hears of its connections to one peer: edges, not every broken socket."""

import threading
from collections.abc import Callable

OnLink = Callable[[int | None, str, str], None]


class Link:
    """`up` with the first connection to a peer, `down` with the loss of the last one or when it cannot be reached.

    Between two lanes and two directions there are up to four connections; one of them breaking and coming back is
    no news. Calls of on_link for one peer never overlap.
    """

    def __init__(self, peer: int, on_link: OnLink):
        self._peer = peer
        self._on_link = on_link
        self._lock = threading.RLock()
        self._n_connections = 0
        self._state = self._refusal = ""
        self._silent = False

    def up(self) -> None:
        with self._lock:
            self._n_connections += 1
            self._tell("up", "")

    def down(self, reason: str) -> None:
        """One connection is gone."""
        with self._lock:
            self._n_connections -= 1
            self.unreachable(reason)

    def unreachable(self, reason: str) -> None:
        """An attempt to connect failed."""
        with self._lock:
            if not self._n_connections:
                self._tell("down", reason)

    def refused(self, reason: str) -> None:
        """We or they say that the two, or a message, do not belong here; told once while it stays the same."""
        with self._lock:
            if reason != self._refusal and not self._silent:
                self._refusal = reason
                self._on_link(self._peer, "refused", reason)

    def silence(self) -> None:
        """The caller has dropped the peer. Without the lock: the caller may be inside on_link in another thread."""
        self._silent = True

    def _tell(self, state: str, reason: str) -> None:
        if state != self._state and not self._silent:
            self._state = state
            self._on_link(self._peer, state, reason)
