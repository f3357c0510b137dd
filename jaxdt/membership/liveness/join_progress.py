"""Members whose state is still to come. The step waits for them, so each has to make progress or leave.

A joining member is judged by progress, not by time. Before it asks for its state it has a floor. Once it has asked, and
before the first bytes arrive, it has as long as the slowest acceptable link needs. After that it has a multiple of the
longest gap so far, and always several floors, because donors answer when their update is done. So a large state on a
slow link is given its time. Each joining member says in its heartbeats what it has asked for and what has arrived.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxdt.membership.roster import Roster
from jaxdt.protocol import events as ev

SLOWEST_BYTES_PER_S = 12_500.0
WAITS_MAX = 4.0  # times the longest gap after which bytes came
ASKED_FLOORS = 5.0


@dataclass
class _JoiningPeer:
    admission: int
    since_s: float  # when bytes came the last time
    last: ev.Fetching = ev.Fetching(0, 0, 1)
    longest_gap_s: float = 0.0

    def update(self, now_s: float, fetching: ev.Fetching) -> None:
        if fetching.here_bytes > self.last.here_bytes or fetching.asked_bytes and not self.last.asked_bytes:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.since_s)
            self.since_s = now_s
        self.last = fetching

    def timeout_s(self, floor_s: float) -> float:
        if self.last.here_bytes == self.last.of_bytes:
            return math.inf
        if not self.last.asked_bytes:
            return floor_s
        first_s = 0.0 if self.last.here_bytes else self.last.asked_bytes / SLOWEST_BYTES_PER_S
        return max(ASKED_FLOORS * floor_s + first_s, WAITS_MAX * self.longest_gap_s)


class JoinProgress:
    """The joining members of the present view. Time comes in as an argument."""

    def __init__(self, floor_s: float):
        self._floor_s = floor_s
        self._joining: dict[int, _JoiningPeer] = {}

    def on_heartbeat(self, now_s: float, peer: int, status: Mapping[str, float]) -> None:
        """A peer's heartbeat."""
        if peer in self._joining and all(name in status for name in ev.FETCHED):
            self._joining[peer].update(now_s, ev.Fetching(*(status[name] for name in ev.FETCHED)))

    def stalled(self, now_s: float, roster: Roster) -> tuple[int, str] | None:
        """One member that has to leave now, and why. No member is blamed while a stage has no replica to fetch from."""
        no_donor = roster.view is None or roster.vacant
        joining: set[int] = set() if no_donor else roster.joining
        present = {peer: _JoiningPeer(roster.admissions[peer], now_s) for peer in sorted(joining)}
        self._joining = {peer: self._known_or(peer, new) for peer, new in present.items()}
        for peer, known in self._joining.items():
            if now_s - known.since_s > known.timeout_s(self._floor_s):
                progress = f"{known.last.here_bytes:.0f} bytes are there, no more for {now_s - known.since_s:.1f} s"
                return peer, f"joins and does not fetch its state: {progress}"
        return None

    def _known_or(self, peer: int, new: _JoiningPeer) -> _JoiningPeer:
        """The record of this admission of the peer, or `new` if there is none."""
        known = self._joining.get(peer, new)
        return known if known.admission == new.admission else new
