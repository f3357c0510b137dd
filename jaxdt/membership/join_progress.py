"""Members whose state is still to come. The step waits for them, so each has to get on with it, or go.

Judged by progress, not by time: who has nothing under way goes after the floor; who has asked for some of its state is
waited for as long as the slowest link takes that is worth waiting for, and once some has come, for some times the
longest wait so far, but always for some floors, since donors answer when their update is done. So a large state on a
slow link comes in peace. What has come and what is asked for, each joiner says in its heartbeats.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxdt.membership.roster import Roster
from jaxdt.protocol.events import FETCHED, Fetching

SLOWEST_BYTES_PER_S = 12_500.0
WAITS_MAX = 4.0  # times the longest wait that brought something
ASKED_FLOORS = 5.0


@dataclass
class _JoiningPeer:
    admission: int
    since_s: float  # when something came the last time
    last: Fetching = Fetching(0, 0, 1)
    longest_s: float = 0.0

    def heard(self, now_s: float, word: Fetching) -> None:
        if word.here_bytes > self.last.here_bytes or word.asked_bytes and not self.last.asked_bytes:
            self.longest_s = max(self.longest_s, now_s - self.since_s)
            self.since_s = now_s
        self.last = word

    def timeout_s(self, floor_s: float) -> float:
        if self.last.here_bytes == self.last.of_bytes:
            return float("inf")
        if not self.last.asked_bytes:
            return floor_s
        first_s = 0.0 if self.last.here_bytes else self.last.asked_bytes / SLOWEST_BYTES_PER_S
        return max(ASKED_FLOORS * floor_s + first_s, WAITS_MAX * self.longest_s)


class JoinProgress:
    """Those of the present view. Time comes in as an argument."""

    def __init__(self, floor_s: float):
        self._floor_s = floor_s
        self._known: dict[int, _JoiningPeer] = {}

    def heard(self, now_s: float, peer: int, status: Mapping[str, float]) -> None:
        """A heartbeat."""
        if peer in self._known and all(name in status for name in FETCHED):
            self._known[peer].heard(now_s, Fetching(*(status[name] for name in FETCHED)))

    def judged(self, now_s: float, roster: Roster) -> tuple[int, str] | None:
        """One that has to go now, and why. Nobody is blamed while there is nobody to fetch from."""
        blind = roster.view is None or roster.vacant
        joining = set() if blind else roster.joining - roster.lost
        new = {peer: _JoiningPeer(roster.admissions[peer], now_s) for peer in sorted(joining)}
        self._known = {peer: self._same(peer, one) for peer, one in new.items()}
        for peer, one in self._known.items():
            if now_s - one.since_s > one.timeout_s(self._floor_s):
                there = f"{one.last.here_bytes:.0f} bytes are there, no more for {now_s - one.since_s:.1f} s"
                return peer, f"joins and does not fetch its state: {there}"
        return None

    def _same(self, peer: int, new: _JoiningPeer) -> _JoiningPeer:
        """What is known of its present admission."""
        known = self._known.get(peer, new)
        return known if known.admission == new.admission else new
