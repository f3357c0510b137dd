"""The changes of a run's members since its first view."""

from collections.abc import Mapping


class MembershipChanges:
    """Counted over the views of a run. A peer that moves to another stage is in no view for a while."""

    def __init__(self):
        self._stage_of: dict[int, int] = {}  # each peer that was ever in a view -> its last stage
        self._present: set[int] = set()
        self._n_gone = self._n_joined = self._n_moved = 0

    def view(self, members: Mapping[int, int]) -> None:
        """A view with these members, peer -> stage, is durable."""
        is_first = not self._stage_of
        self._n_gone += len(self._present - members.keys())
        for peer in members if not is_first else ():
            self._enter(peer, members[peer])
        self._stage_of |= members
        self._present = set(members)

    def _enter(self, peer: int, stage: int) -> None:
        has_moved = self._stage_of.get(peer, stage) != stage
        if has_moved:
            self._n_moved += 1
            self._n_gone -= peer not in self._present
        elif peer not in self._present:
            self._n_joined += 1

    @property
    def text(self) -> str:
        """Such as "2 peers gone, 1 joined"; "" if the members are those of the first view, and have always been."""
        counts = {"gone": self._n_gone, "joined": self._n_joined, "moved to another stage": self._n_moved}
        n_first, *_ = [n for n in counts.values() if n] or [0]
        noun = "peer" if n_first == 1 else "peers"
        return ", ".join(f"{n} {verb}" for verb, n in counts.items() if n).replace(" ", f" {noun} ", 1)
