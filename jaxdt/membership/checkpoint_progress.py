"""Which checkpoints are complete, and when the run is over."""

from collections.abc import Iterable

from jaxdt.protocol.events import Saved


class CheckpointProgress:
    """`checkpoint`: version of the newest complete one."""

    def __init__(self, n_stages: int, n_steps: int, checkpoint: int):
        self.checkpoint = checkpoint
        self._n_stages = n_stages
        self._n_steps = n_steps
        self._saved: dict[int, dict[int, float]] = {}  # version -> stage -> seconds in which a member did nothing else
        self._done: set[int] = set()

    def saved(self, part: Saved) -> float | None:
        """A stage's part is durable. With the last part the checkpoint is complete; then returns the most seconds for
        which saving kept a member from its work. A part of an older checkpoint changes nothing."""
        if part.version <= self.checkpoint:
            return None
        blocked_s = self._saved.setdefault(part.version, {})
        blocked_s[part.stage] = part.blocked_s
        if len(blocked_s) < self._n_stages:
            return None
        self.checkpoint = part.version
        self._saved = {version: parts for version, parts in self._saved.items() if version > part.version}
        return max(blocked_s.values())

    def done(self, peer: int) -> None:
        """A member has applied all steps."""
        self._done.add(peer)

    def is_over(self, members: Iterable[int]) -> bool:
        """Whether every member is done and the last checkpoint complete."""
        return self.checkpoint == self._n_steps and self._done.issuperset(members)

    def roll_back(self) -> None:
        """A generation begins: parts and members of the earlier one do not count."""
        self._saved.clear()
        self._done.clear()
