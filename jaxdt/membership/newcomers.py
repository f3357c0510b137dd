"""Peers that are not of the plan: which ids they get, for which stage they come, and when they are forgotten."""

from collections.abc import Collection, Container, Iterable

IDS_PER_TERM = 100_000
ASKED_S = 120.0  # after so long without a hello a newcomer that has asked is not expected any more
GONE_MAX = 256  # newcomers that are gone and would be known if they came back


class Newcomers:
    """`coming`: newcomers that were told a stage, and members on their way to another one. `sent`: those of them that
    were sent to another stage than the one they first came for. Time comes in as an argument."""

    def __init__(self, first_id: int):
        self.coming: set[int] = set()
        self.sent: set[int] = set()
        self.first_id = first_id
        self._next_id = first_id
        self._asked: dict[int, tuple[int, float]] = {}  # temporary id -> peer id, and when it asked
        self._gone: dict[int, None] = {}  # newcomers of before, in the order in which they went

    def known_as(self, temporary_id: int) -> int | None:
        """The peer id of a newcomer that has asked before."""
        return self._asked[temporary_id][0] if temporary_id in self._asked else None

    def admit(self, now_s: float, temporary_id: int, peer: int | None) -> int:
        """The id of a newcomer: the one of its certificate, or an unused one."""
        if peer is None:
            peer = self.new_id()
        self.coming.add(peer)
        self._asked[temporary_id] = (peer, now_s)
        return peer

    def new_id(self) -> int:
        """An unused id."""
        self._next_id += 1
        return self._next_id - 1

    def arrived(self, peer: int) -> list[int]:
        """A newcomer has come under its own id; the temporary ids that it asked under."""
        temporary_ids = [name for name, (asked, _) in self._asked.items() if asked == peer]
        for name in temporary_ids:
            del self._asked[name]
        return temporary_ids

    def expire(self, now_s: float) -> None:
        """Newcomers that asked and did not come are not expected any longer."""
        for name in [name for name, (_, asked_s) in self._asked.items() if now_s - asked_s > ASKED_S]:
            self.coming.discard(self._asked.pop(name)[0])

    def forget(self, peers: Iterable[int], known: Container[int], reachable: Container[int]) -> list[int]:
        """The ones of `peers` that are to be forgotten: the longest gone of those neither `known` nor `reachable`."""
        gone = [peer for peer in peers if peer not in known and peer not in reachable]
        self._gone = {peer: None for peer in self._gone if peer in gone} | dict.fromkeys(gone)
        forgotten = list(self._gone)[:-GONE_MAX]
        for peer in forgotten:
            self._gone.pop(peer)
            self.sent.discard(peer)
        return forgotten

    def became_members(self, members: Collection[int]) -> None:
        """These peers are in the view."""
        self.coming -= set(members)
        self.sent -= set(members)
