"""A lease for each peer that the coordinator hears. It runs out when the peer is silent or out of reach for too long.
That of a joining member also runs out when its download makes no progress."""

from collections.abc import Iterator, Mapping

from jaxdt.membership.liveness.join_progress import JoinProgress
from jaxdt.membership.roster import Roster
from jaxdt.protocol.deadline import RECONNECT_S, Deadline

JOINING_FLOORS = 2.0


class Leases:
    """Time comes in as an argument. `floor_s`: the least silence that ends a lease."""

    def __init__(self, floor_s: float):
        self._floor_s = floor_s
        self._deadlines: dict[int, Deadline] = {}
        self._down_since_s: dict[int, float] = {}
        self._gone: set[int] = set()
        self._joining = JoinProgress(JOINING_FLOORS * floor_s)

    def __contains__(self, peer: object) -> bool:
        return peer in self._deadlines

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._deadlines))

    def on_message(self, peer: int, now_s: float) -> None:
        """A message came from the peer; the first one gives it a lease."""
        self._deadlines.setdefault(peer, Deadline(self._floor_s)).arrived(now_s)

    def heard_s(self, peer: int, now_s: float) -> float:
        """The time of the last message from a peer with a lease."""
        return now_s - self._deadlines[peer].silence_s(now_s)

    def silences(self, now_s: float) -> dict[int, float]:
        """The seconds, to a tenth, for which each peer with a lease has been silent."""
        return {peer: round(deadline.silence_s(now_s), 1) for peer, deadline in self._deadlines.items()}

    def on_heartbeat(self, now_s: float, peer: int, status: Mapping[str, float]) -> None:
        """A peer's heartbeat; that of a joining member says how far its download is."""
        self._joining.on_heartbeat(now_s, peer, status)

    def on_link(self, now_s: float, peer: int, up: bool, gone: bool) -> None:
        """The connection to a peer came up or went down; `gone`: its process has ended."""
        if up or peer not in self._deadlines:
            self._down_since_s.pop(peer, None)
            self._gone.discard(peer)
            return
        self._down_since_s.setdefault(peer, now_s)
        if gone:
            self._gone.add(peer)

    def is_gone(self, peer: int) -> bool:
        """Whether the process of a peer that has a lease is known to have ended."""
        return peer in self._gone

    def end(self, peer: int) -> None:
        """The peer has no lease any more."""
        self._deadlines.pop(peer, None)
        self._down_since_s.pop(peer, None)
        self._gone.discard(peer)

    def broken(self, now_s: float) -> list[int]:
        """The peers whose connections broke and did not come back in time."""
        return [peer for peer, since_s in sorted(self._down_since_s.items()) if since_s + RECONNECT_S <= now_s]

    def over(self, now_s: float, roster: Roster) -> tuple[int, str] | None:
        """One peer that has been silent, or has made no progress, for too long; and why."""
        for peer, deadline in sorted(self._deadlines.items()):
            if deadline.passed(now_s):
                return peer, f"silent for {deadline.silence_s(now_s):.1f} s"
        return self._joining.stalled(now_s, roster)
