"""Peers that are not of the plan: which ids they get, and when they are forgotten."""

from collections.abc import Container, Iterable

IDS_PER_TERM = 100_000
ASKED_S = 120.0  # after so long without a hello a newcomer that has asked is not expected any more
GONE_MAX = 256  # newcomers that are gone and would be known if they came back


class NewcomerIds:
    """Time comes in as an argument."""

    def __init__(self, first_id: int):
        self.first_id = first_id
        self._next_id = first_id
        self._requests: dict[int, tuple[int, float]] = {}  # temporary id -> peer id, and when it asked
        self._gone: dict[int, None] = {}  # newcomers of before, in the order in which they went

    def known_as(self, temporary_id: int) -> int | None:
        """The peer id of a newcomer that has asked before."""
        return self._requests[temporary_id][0] if temporary_id in self._requests else None

    def grant(self, now_s: float, temporary_id: int, certified: int | None) -> int:
        """The id of a newcomer: the one of its certificate, or an unused one."""
        peer = self.new_id() if certified is None else certified
        self._requests[temporary_id] = (peer, now_s)
        return peer

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def take_temporary_ids(self, peer: int) -> list[int]:
        """A newcomer has come under its own id; the temporary ids that it asked under."""
        temporary_ids = [name for name, (granted, _) in self._requests.items() if granted == peer]
        for name in temporary_ids:
            del self._requests[name]
        return temporary_ids

    def expire(self, now_s: float) -> list[int]:
        """The newcomers that asked and did not come, and are not expected any longer."""
        expired = [name for name, (_, asked_s) in self._requests.items() if now_s - asked_s > ASKED_S]
        return [self._requests.pop(name)[0] for name in expired]

    def forget(self, peers: Iterable[int], kept: Container[int]) -> list[int]:
        """The ones of `peers` that are to be forgotten: the longest gone of those that are not `kept`."""
        gone = [peer for peer in peers if peer not in kept]
        self._gone = {peer: None for peer in self._gone if peer in gone} | dict.fromkeys(gone)
        forgotten = list(self._gone)[:-GONE_MAX]
        for peer in forgotten:
            self._gone.pop(peer)
        return forgotten
