"""Bounds on the cost of connections from unknown senders: places, and reports.

Anybody may connect to the port of a run, and each connection costs a thread and a descriptor until it has said who it
is. `GreetingPlaces` bounds how many there are, so that no single address can take all of them: a silent connection
gives its place to a new one, and some places are for addresses from which a member has come before. `ReportLimiter`
bounds how many lines a log gets from refused connections. Time comes in as an argument.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from jaxdt.runtime.net.connection import Connection
from jaxdt.runtime.net.options import TransportLimits

# In places of one source. A thread for each connection takes the listener up to 5 ms where others compute: at some
# hundred a second the system's queue of connections would fill, and members would find no room in it.
_BURST = 4
_PER_S = 1
_KNOWN_MAX = 1024  # remembered addresses of members; a fleet of 256 peers on hosts of their own needs a quarter
_SOURCES_MAX = 256  # whose connections, and whose reports within one window, are counted apart
# One window holds at most 21 lines, about 3 KB: an attack of a day adds 4 MB to a log.
_WINDOW_S = 60.0
_N_REPORTS_SOURCE = 5
_N_REPORTS = 20


class NoPlace(Exception):
    """One line: why a connection gets no place."""


@dataclass(eq=False)
class Place:
    """The place of one connection; `source` is the address that it came from, as `source_of` gives it."""

    source: str
    connection: Connection
    since_s: float


class GreetingPlaces:
    """The places of connections that have not greeted yet. Calls must not overlap."""

    def __init__(self, limits: TransportLimits):
        self._limits = limits
        self._places: list[Place] = []  # oldest first
        self._known_sources: dict[str, None] = {}  # sources of members, the longest unused first
        self._tokens: dict[str, tuple[float, float]] = {}  # how many more of a stranger are admitted, and since when

    def learn(self, source: str) -> None:
        """A member connects from this source."""
        self._known_sources.pop(source, None)
        self._known_sources[source] = None
        if len(self._known_sources) > _KNOWN_MAX:
            del self._known_sources[next(iter(self._known_sources))]

    def claim(self, source: str, connection: Connection, now_s: float) -> Place:
        """A place for a new connection, NoPlace when none can be had. This may cut another connection.

        Where all places that the source may use are taken, the connection takes over the place of a silent one, else of
        one whose handshake has already taken `slow_handshake_s`; of several, one of the source that holds most places,
        and of these the oldest. A source from which no member has come may not connect too often.
        """
        if source not in self._known_sources:
            self._take_token(source, now_s)
        rivals = self._rivals(source)
        if rivals is not None:
            victim = self._victim(rivals, now_s)
            if victim is None:
                raise NoPlace(f"{len(rivals)} others have not greeted yet")
            self.release(victim)
            victim.connection.cut()
        place = Place(source, connection, now_s)
        self._places.append(place)
        return place

    def release(self, place: Place) -> None:
        """The connection has greeted or ended; its place may have gone to another one already."""
        if place in self._places:
            self._places.remove(place)

    def _take_token(self, source: str, now_s: float) -> None:
        n_max = _BURST * self._limits.n_greeting_source_max
        n, since_s = self._tokens.pop(source, (n_max, now_s))
        n = min(n_max, n + (now_s - since_s) * _PER_S * self._limits.n_greeting_source_max)
        self._tokens[source] = (n - 1.0 if n >= 1.0 else n), now_s
        if len(self._tokens) > _SOURCES_MAX:
            del self._tokens[next(iter(self._tokens))]
        if n < 1.0:
            raise NoPlace("too many connections from this address")

    def _rivals(self, source: str) -> list[Place] | None:
        """The places among which a new connection of this source needs one; None when it can have a free one."""
        limits = self._limits
        own = [place for place in self._places if place.source == source]
        if len(own) >= limits.n_greeting_source_max:
            return own
        strangers = [place for place in self._places if place.source not in self._known_sources]
        if source not in self._known_sources and len(strangers) >= limits.n_greeting_stranger_max:
            return strangers
        return self._places if len(self._places) >= limits.n_greeting_max else None

    def _victim(self, rivals: Iterable[Place], now_s: float) -> Place | None:
        n_places = Counter(place.source for place in self._places)
        slow_since_s = now_s - self._limits.slow_handshake_s
        silent = [place for place in rivals if place.connection.is_silent()]
        slow = [place for place in rivals if place.since_s <= slow_since_s]
        return max(silent or slow, key=lambda place: n_places[place.source], default=None)  # the first is the oldest


class ReportLimiter:
    """Lets a few reports of each source and of all sources through in each window, and counts the others."""

    def __init__(self):
        self._until_s = float("-inf")
        self._n_of_source: Counter[str] = Counter()
        self._n_suppressed: Counter[str] = Counter()

    def admits(self, source: str, now_s: float) -> bool:
        """Whether a report that this source has caused may be written."""
        if now_s >= self._until_s:
            self._until_s = now_s + _WINDOW_S
            self._n_of_source.clear()
        if self._n_of_source[source] < _N_REPORTS_SOURCE and self._n_of_source.total() < _N_REPORTS:
            self._n_of_source[source] += 1
            return True
        is_counted = source in self._n_suppressed or len(self._n_suppressed) < _SOURCES_MAX
        self._n_suppressed[source if is_counted else "others"] += 1
        return False

    def due_in_s(self, now_s: float) -> float | None:
        """Seconds until `summary` has a line to tell; None as long as no report is suppressed."""
        return max(0.0, self._until_s - now_s) if self._n_suppressed else None

    def summary(self, now_s: float) -> str | None:
        """One line about the reports that were suppressed in the window that is over; None when there are none."""
        if now_s < self._until_s or not self._n_suppressed:
            return None
        (source, n_most), n = self._n_suppressed.most_common(1)[0], self._n_suppressed.total()
        n_sources = len(self._n_suppressed)
        self._n_suppressed.clear()
        return (
            f"{n} more connections within {_WINDOW_S:g} s, from {n_sources} addresses, {n_most} of them from {source}"
        )


def source_of(host: str) -> str:
    """The key under which connections from an address are counted: an IPv4 address, or the /64 network of an IPv6
    address, all of which one host may use; a text that is no address stands for itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 6:
        mapped = address.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((int(address), 64), strict=False))
    return str(address)
