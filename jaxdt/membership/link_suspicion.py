"""Who has to leave when members lose one another but not the coordinator: not simply whom the first of them accuses.

A broken link has two ends, each of which accuses the other, so an accusation waits until others have had the time to
say theirs. Then goes whose stage can do without it; of two such the one with more broken links, since its going mends
more; of equals the one that was admitted last. So a peer that comes and goes cannot drive out those who stay.
"""

from collections import Counter
from collections.abc import Mapping

from jaxdt.membership.roster import Roster


class LinkSuspicion:
    """Links that their ends say are broken. An accusation waits for `patience_s`, but for those of oneself and of a
    newcomer whose state is still to come. Time comes in as an argument."""

    def __init__(self, patience_s: float):
        self._patience_s = patience_s
        self._broken: dict[tuple[int, int], tuple[float, str]] = {}  # the ends; since when, and why

    def accuse(self, now_s: float, src: int, peer: int, reason: str) -> float:
        """`src` says that it cannot go on with `peer`, which may be itself. When it can be judged at the latest."""
        ends = (min(src, peer), max(src, peer))
        self._broken.setdefault(ends, (now_s, f"{reason} (said by peer {src} of peer {peer})"))
        return now_s + self._patience_s

    def judged(self, now_s: float, roster: Roster) -> tuple[int, str] | None:
        """One member that has to go now, and why."""
        here = roster.members - roster.lost - roster.missing
        self._broken = {ends: said for ends, said in self._broken.items() if set(ends) <= here}
        joining = set(roster.view.joining) if roster.view else set()
        for ends, (since_s, reason) in self._broken.items():
            if since_s + self._patience_s <= now_s or ends[0] == ends[1] or joining & set(ends):
                del self._broken[ends]
                return self._worse(ends, roster), reason
        return None

    def _worse(self, ends: tuple[int, int], roster: Roster) -> int:
        links = Counter(end for pair in (ends, *self._broken) for end in pair)
        return max(ends, key=lambda peer: (_spared(peer, roster), links[peer], *_age(peer, roster.admissions)))


def _spared(peer: int, roster: Roster) -> bool:
    """Whether its stage can do without it."""
    return bool(roster.live(roster.stage_of[peer]) - {peer}) or peer in roster.view.joining


def _age(peer: int, admissions: Mapping[int, int]) -> tuple[int, int]:
    return admissions[peer], peer
