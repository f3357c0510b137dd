"""Which checkpoints are complete, and when the run is over."""

from collections.abc import Collection, Iterable

from jaxdt.protocol.events import Checkpoint, Part, Saved


class CheckpointProgress:
    """`checkpoint`: the newest complete one. A checkpoint is complete when each stage's part is on min(`n_copies`, live
    disks) of the disks that are live."""

    def __init__(self, n_stages: int, n_steps: int, checkpoint: Checkpoint, n_copies: int):
        self.checkpoint = checkpoint
        self._n_stages = n_stages
        self._n_steps = n_steps
        self._n_copies = n_copies
        self._parts: dict[int, dict[tuple[int, str], Part]] = {}  # version -> stage and digest -> part
        self._blocked_s: dict[int, float] = {}  # version -> most seconds in which a member did nothing else
        self._done: set[int] = set()

    def saved(self, saved: Saved, disk: str) -> None:
        """A stage's part is durable on a disk. A part of an older checkpoint changes nothing."""
        version = saved.version
        if version <= self.checkpoint.version:
            return
        parts = self._parts.setdefault(version, {})
        known = parts.get((saved.stage, saved.digest))
        disks = {disk, *(known.disks if known else ())}
        part = Part(version, saved.stage, saved.digest, saved.n_words, tuple(sorted(disks)))
        parts[saved.stage, saved.digest] = part
        self._blocked_s[version] = max(saved.blocked_s, self._blocked_s.get(version, 0.0))

    def found(self, generation: int, live: Collection[str]) -> Checkpoint | None:
        """The newest checkpoint that is complete and that is not known as such yet, if any."""
        for version in sorted(self._parts, reverse=True):
            parts = [self._best_part(version, stage, live) for stage in range(self._n_stages)]
            enough = [part for part in parts if part and self._n_live(part, live) >= self._n_wanted(live)]
            if version > self.checkpoint.version and len(enough) == self._n_stages:
                return Checkpoint(version, generation, tuple(enough))
        return None

    def _n_wanted(self, live: Collection[str]) -> int:
        return max(1, min(self._n_copies, len(live)))

    def _n_live(self, part: Part, live: Collection[str]) -> int:
        return len(set(part.disks) & set(live))

    def _best_part(self, version: int, stage: int, live: Collection[str]) -> Part | None:
        """The part of a stage that is on the most live disks: another process may have written one of its own."""
        parts = [part for (of, _), part in sorted(self._parts[version].items()) if of == stage]
        return max(parts, key=lambda part: self._n_live(part, live), default=None)

    def complete(self, checkpoint: Checkpoint) -> float:
        """The checkpoint is durable as complete. Returns the most seconds for which saving it kept a member from its
        work."""
        self.checkpoint = checkpoint
        blocked_s = self._blocked_s.get(checkpoint.version, 0.0)
        self._parts = {version: parts for version, parts in self._parts.items() if version > checkpoint.version}
        self._blocked_s = {version: s for version, s in self._blocked_s.items() if version > checkpoint.version}
        return blocked_s

    def done(self, peer: int) -> None:
        """A member has applied all steps."""
        self._done.add(peer)

    def is_over(self, members: Iterable[int]) -> bool:
        """Whether every member is done and the last checkpoint complete."""
        return self.checkpoint.version == self._n_steps and self._done.issuperset(members)

    def roll_back(self) -> None:
        """A generation begins: parts and members of the earlier one do not count."""
        self._parts.clear()
        self._blocked_s.clear()
        self._done.clear()
