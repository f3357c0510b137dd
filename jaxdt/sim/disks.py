"""Disks of simulated peers: which parts of checkpoints each holds, by digest. A part has no content, only a length."""

from collections import defaultdict

from jaxdt.protocol import events as ev

PART_WORDS = 600


class Disks:
    """`parts[disk]`: the digests of the parts that are whole there."""

    def __init__(self):
        self.parts: dict[str, set[str]] = {}
        self._fetched: defaultdict[tuple[int, str], set[ev.StateKey]] = defaultdict(set)  # by peer and digest: slices

    def write(self, peer: int, disk: str, write: ev.WriteCheckpoint) -> ev.WroteCheckpoint:
        """A peer writes a part of its own."""
        digest = f"p{peer}v{write.version}g{write.generation}"
        self.parts.setdefault(disk, set()).add(digest)
        return ev.WroteCheckpoint(write.version, 0.0, digest, PART_WORDS, write.generation)

    def find(self, disk: str, find: ev.FindPart) -> ev.FoundPart:
        return ev.FoundPart(find.digest, PART_WORDS if self.holds(disk, find.digest) else 0)

    def holds(self, disk: str, digest: str) -> bool:
        return digest in self.parts.get(disk, ())

    def arrived(self, peer: int, key: ev.StateKey) -> None:
        """A slice of a part has been fetched, perhaps once more."""
        self._fetched[peer, key.part].add(key)

    def keep(self, peer: int, disk: str, keep: ev.KeepPart) -> ev.KeptPart:
        """All slices of a part must have been fetched."""
        digest = keep.part.digest
        n_words = sum(key.hi - key.lo for key in self._fetched.pop((peer, digest), ()))
        if n_words < keep.part.n_words and not self.holds(disk, digest):
            return ev.KeptPart(digest, f"{n_words} words have been fetched, expected {keep.part.n_words}")
        self.parts.setdefault(disk, set()).add(digest)
        return ev.KeptPart(digest)

    def ended(self, peer: int) -> None:
        """A process has ended: what it has fetched of parts is forgotten."""
        for key in [key for key in self._fetched if key[0] == peer]:
            del self._fetched[key]
