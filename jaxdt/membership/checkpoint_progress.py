"""The coordinator's record of which checkpoints are complete, and of when the run is over."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from jaxdt.protocol import events as ev


@dataclass(frozen=True)
class Holder:
    """A member that may hold parts: its stage, and the disk on which it keeps them."""

    peer: int
    stage: int
    disk: str


class CheckpointProgress:
    """`checkpoint`: the newest complete one. A checkpoint is complete when each stage's part is on `n_copies` of the
    live disks, or on all that there are. If there are several copies, a peer of another stage has one where any can:
    the loss of all peers of a stage must not take all copies of its part along.

    Copies are made of one checkpoint at a time, the newest whose parts are all written, and that one is kept to until
    it is complete: on slow links there may be newer ones before the copies are through."""

    def __init__(self, n_stages: int, n_steps: int, checkpoint: ev.Checkpoint, n_copies: int):
        self.checkpoint = checkpoint
        self._n_stages = n_stages
        self._n_steps = n_steps
        self._n_copies = n_copies
        self._parts: dict[int, dict[tuple[int, str], ev.Part]] = {}  # version -> stage and digest -> part
        self._blocked_s: dict[int, float] = {}  # version -> most seconds in which a member did nothing else
        self._copying = checkpoint.version  # the version of which copies are being made
        self._ordered: set[tuple[int, str]] = set()  # peer and digest, in this view
        self._unfit: set[str] = set()  # disks that could not take a copy
        self._done: set[int] = set()

    def on_saved(self, saved: ev.Saved, disk: str) -> None:
        """A stage's part is durable on a disk. A part of an older checkpoint changes nothing."""
        version = saved.version
        if version == self.checkpoint.version:
            parts = [self._with_disk(part, disk) for part in self.checkpoint.parts if part.digest == saved.digest]
            others = [part for part in self.checkpoint.parts if part.digest != saved.digest]
            by_stage = sorted([*parts, *others], key=lambda part: part.stage)
            self.checkpoint = replace(self.checkpoint, parts=tuple(by_stage))
        if version <= self.checkpoint.version:
            return
        known = self._parts.setdefault(version, {}).get((saved.stage, saved.digest))
        part = known or ev.Part(version, saved.stage, saved.digest, saved.n_words)
        self._parts[version][saved.stage, saved.digest] = self._with_disk(part, disk)
        self._blocked_s[version] = max(saved.blocked_s, self._blocked_s.get(version, 0.0))

    def _with_disk(self, part: ev.Part, disk: str) -> ev.Part:
        return replace(part, disks=tuple(sorted({disk, *part.disks})))

    def on_part_missing(self, digest: str, disk: str) -> None:
        """A disk does not hold a part, or cannot take it."""
        known = [*self.checkpoint.parts, *(part for parts in self._parts.values() for part in parts.values())]
        if not any(part.digest == digest and disk in part.disks for part in known):
            self._unfit.add(disk)
        parts_left = tuple(_without(part, digest, disk) for part in self.checkpoint.parts)
        self.checkpoint = replace(self.checkpoint, parts=parts_left)
        for parts in self._parts.values():
            for key, part in parts.items():
                parts[key] = _without(part, digest, disk)

    def found(self, generation: int, n_reseeds: int, holders: Collection[Holder]) -> ev.Checkpoint | None:
        """The newest checkpoint that is complete and that is not known as such yet, if any."""
        live = {holder.disk for holder in holders}
        for version in sorted(self._parts, reverse=True):
            parts = self._best_parts(version, live)
            if parts and all(self._n_missing(part, holders) <= 0 for part in parts):
                return ev.Checkpoint(version, generation, tuple(parts), n_reseeds)
        return None

    def _best_parts(self, version: int, live: Collection[str]) -> list[ev.Part]:
        """For each stage the part that is on the most live disks, since two processes may have written different parts.
        Empty if a stage has none."""
        found: list[ev.Part] = []
        for stage in range(self._n_stages):
            parts = [part for (of, _), part in sorted(self._parts[version].items()) if of == stage]
            best = max(parts, key=lambda part: len(set(part.disks) & set(live)), default=None)
            if best is None or not set(best.disks) & set(live):
                return []
            found.append(best)
        return found

    def _n_missing(self, part: ev.Part, holders: Collection[Holder]) -> int:
        """The number of copies of a part that are still to be made."""
        live = {holder.disk for holder in holders}
        of_others = {holder.disk for holder in holders if holder.stage != part.stage}
        holding = set(part.disks) & live
        fit = holding | (live - self._unfit)
        n_missing = max(1, min(self._n_copies, len(fit))) - len(holding)
        if self._n_copies > 1 and of_others & fit and not of_others & holding:
            return max(1, n_missing)
        return n_missing

    def orders(self, holders: Collection[Holder]) -> list[tuple[int, ev.Part]]:
        """The peers that are to copy parts now, and have not been told so in this view, each with its parts."""
        live = {holder.disk for holder in holders}
        written = [version for version in self._parts if self._best_parts(version, live)]
        if self._copying not in written:
            self._copying = max(written, default=self.checkpoint.version)
        parts = self._best_parts(self._copying, live) if self._copying in written else self.checkpoint.parts
        found: list[tuple[int, ev.Part]] = []
        load = Counter(disk for part in parts for disk in part.disks)
        for part in parts:
            for peer, disk in self._places(part, holders, load)[: max(0, self._n_missing(part, holders))]:
                load[disk] += 1
                if (peer, part.digest) not in self._ordered:
                    self._ordered.add((peer, part.digest))
                    found.append((peer, part))
        return found

    def _places(self, part: ev.Part, holders: Collection[Holder], load: Mapping[str, int]) -> list[tuple[int, str]]:
        """Members that could copy a part, one for each disk, those of other stages first."""
        of_stage = {holder.disk for holder in holders if holder.stage == part.stage}
        first: dict[str, int] = {}
        for holder in sorted(holders, key=lambda holder: holder.peer):
            if holder.disk not in part.disks and holder.disk not in self._unfit:
                first.setdefault(holder.disk, holder.peer)
        disks = sorted(first, key=lambda disk: (disk in of_stage, load[disk], disk))
        return [(first[disk], disk) for disk in disks] if set(part.disks) & {holder.disk for holder in holders} else []

    def without_holder(self, disks: Collection[str]) -> list[int]:
        """Stages of the newest complete checkpoint of which none of these disks holds the part."""
        return [part.stage for part in self.checkpoint.parts if not set(part.disks) & set(disks)]

    def on_view(self) -> None:
        """Members may not have read what they were told in the view before."""
        self._ordered.clear()

    def on_complete(self, checkpoint: ev.Checkpoint) -> float:
        """The checkpoint is durable as complete. Returns the most seconds for which saving it kept a member from its
        work."""
        self.checkpoint = checkpoint
        blocked_s = self._blocked_s.get(checkpoint.version, 0.0)
        self._parts = {version: parts for version, parts in self._parts.items() if version > checkpoint.version}
        self._blocked_s = {version: s for version, s in self._blocked_s.items() if version > checkpoint.version}
        return blocked_s

    def on_done(self, peer: int) -> None:
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


def _without(part: ev.Part, digest: str, disk: str) -> ev.Part:
    """The part as it is if that of this digest is not on this disk."""
    return replace(part, disks=tuple(d for d in part.disks if (part.digest, d) != (digest, disk)))
