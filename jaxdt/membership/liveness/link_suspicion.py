"""Which member leaves when two members cannot reach each other, while both reach the coordinator.

A broken link has two ends, and each accuses the other. An accusation therefore waits until other members have had the
time to report their links. Then we evict the peer whose stage keeps another replica. If both do, we evict the one with
more broken links, since that mends more. If both have as many, we evict the one that was admitted last (of two first
members the one with the higher number). So a peer that comes and goes cannot drive out those that stay.
"""

from collections import Counter
from collections.abc import Collection, Container

from jaxdt.membership.roster import Roster

SAID_BY = "said by peer"  # in the reason of an eviction that another member has asked for


class LinkSuspicion:
    """Links that one of their ends has reported as broken. An accusation waits for `patience_s`; one of a peer against
    itself, and one that concerns a joining member, does not wait. Time comes in as an argument."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._broken: dict[tuple[int, int], tuple[float, str]] = {}  # the two ends -> since when, and why

    def accuse(self, now_s: float, src: int, peer: int, reason: str) -> float:
        """`src` cannot continue with `peer`, which may be itself. Returns when this can be judged at the latest."""
        ends = (min(src, peer), max(src, peer))
        self._broken.setdefault(ends, (now_s, f"{reason} ({SAID_BY} {src} of peer {peer})"))
        return now_s + self._patience_s

    def on_admitted(self, peers: Collection[int]) -> None:
        """A view admits these peers, whose links are new: what was said of them before does not count."""
        self._broken = {ends: since for ends, since in self._broken.items() if not set(ends) & set(peers)}

    def judged(self, now_s: float, roster: Roster, replaceable: Container[int] = ()) -> tuple[int, str] | None:
        """One member that has to leave now, and why. `replaceable`: stages that can continue without any replica."""
        present = roster.present
        self._broken = {ends: since for ends, since in self._broken.items() if set(ends) <= present}
        joining: set[int] = set(roster.view.joining) if roster.view else set()
        for ends, (since_s, reason) in self._broken.items():
            if since_s + self._patience_s <= now_s or ends[0] == ends[1] or joining & set(ends):
                del self._broken[ends]
                return self._to_evict(ends, roster, replaceable), reason
        return None

    def preferred(self, src: int, peer: int, roster: Roster, replaceable: Container[int]) -> int:
        """Which of two members leaves, if one has to."""
        return self._to_evict((min(src, peer), max(src, peer)), roster, replaceable)

    def _to_evict(self, ends: tuple[int, int], roster: Roster, replaceable: Container[int]) -> int:
        n_broken = Counter(end for pair in (ends, *self._broken) for end in pair)

        def preference(peer: int) -> tuple[bool, int, int, int]:
            is_spared = roster.peers[peer].stage in replaceable or _has_replica(peer, roster)
            return is_spared, n_broken[peer], roster.admissions[peer], peer

        return max(ends, key=preference)


def _has_replica(peer: int, roster: Roster) -> bool:
    """Whether the peer's stage keeps a replica without it."""
    return bool(roster.live(roster.peers[peer].stage) - {peer}) or peer in roster.current_view.joining
