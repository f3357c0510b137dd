"""Which checkpoints are complete, and when a run is over."""

from collections.abc import Iterable

from jaxdt.protocol.events import Done, Saved


class CheckpointProgress:
    """`checkpoint`: version of the newest one that is complete."""

    def __init__(self, n_stages: int, n_steps: int, checkpoint: int):
        self.checkpoint = checkpoint
        self._n_stages, self._n_steps = n_stages, n_steps
        self._saved: dict[int, dict[int, float]] = {}
        self._done: set[int] = set()

    def saved(self, part: Saved) -> float | None:
        """A stage's part is durable. With the last one the checkpoint is complete: the most seconds that saving has
        kept a member from its work. Late word of an older one changes nothing."""
        if part.version <= self.checkpoint:
            return None
        blocked_s = self._saved.setdefault(part.version, {})
        blocked_s[part.stage] = part.blocked_s
        if len(blocked_s) < self._n_stages:
            return None
        self.checkpoint = part.version
        self._saved = {version: said for version, said in self._saved.items() if version > part.version}
        return max(blocked_s.values())

    def at_stake(self, n_committed: int) -> dict:
        """What is lost by going back to it now; for people."""
        return {"checkpoint": self.checkpoint, "at_stake": list(range(self.checkpoint, n_committed))}

    def done(self, peer: int, done: Done) -> dict:
        """A member has applied all steps; its totals, for people."""
        self._done.add(peer)
        return {"peer": peer, "bytes_to": done.bytes_to, **done.totals}

    def over(self, members: Iterable[int]) -> bool:
        """Whether every member is done and the last checkpoint complete."""
        return self.checkpoint == self._n_steps and self._done.issuperset(members)

    def begin_again(self) -> None:
        """A generation begins: what was said of the one before does not count."""
        self._saved.clear()
        self._done.clear()
