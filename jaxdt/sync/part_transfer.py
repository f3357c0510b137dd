"""The transfer of checkpoint parts: a peer gets a part that its disk lacks, and gives parts to others.

Two things need it. The coordinator wants each part on several disks before a checkpoint is complete, and tells members
to copy some. And a generation that begins with a checkpoint makes every member restore its stage's state from the part,
which only members with other disks may hold. A part is named by the digest of its content, so it does not matter who
sends which slice of it.
"""

from collections.abc import Sequence

from jaxdt.protocol import events as ev
from jaxdt.run.exit_codes import ExitCode
from jaxdt.sync.transfer import MayGive, Rate, TransferEngine, TransferPolicy


class PartTransfer(TransferPolicy):
    """One peer's side of it. `bytes_per_s` is the rate of copies, for which no step waits. `start_version`: the
    checkpoint with which the run began may be of another cut, so all its parts are needed."""

    READS = TransferEngine.READS - {ev.Installed, ev.NotInstalled} | {
        *(ev.ViewChanged, ev.Evicted, ev.GoBack, ev.CopyPart, ev.PartMissing),
        *(ev.FoundPart, ev.KeptPart, ev.LostPart, ev.WroteCheckpoint),
    }

    def __init__(self, peer: int, stage: int, slice_bytes: int, bytes_per_s: float, start_version: int):
        self._peer = peer
        self._stage = stage
        self._transfer = TransferEngine(slice_bytes, self)
        self._rate = Rate(bytes_per_s)
        self._start_version = start_version
        self._view: ev.View | None = None
        self._goal: ev.View | None = None  # the generation that this peer is still to restore
        self._held_parts: dict[str, int] = {}  # digest of a part that is whole on this disk -> its words
        self._requested_parts: dict[str, ev.Part] = {}
        self._looked_for: set[str] = set()  # digests for which the disk is being looked at
        self._without: dict[str, set[int]] = {}  # digest -> members that have said that they do not hold it
        self._askers: dict[str, set[int]] = {}  # digest -> members that have asked for it, and rely on this disk

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(now_s, view)
            case ev.Evicted():
                self._view = None
                self._forget()
            case ev.GoBack(view):
                return self._go_back(now_s, view)
            case ev.FoundPart():
                return self._on_found(now_s, event)
            case ev.KeptPart(digest, problem):
                return self._on_fetched(digest) if not problem else self._on_failed(digest, problem)
            case ev.LostPart(digest, reason):
                is_held = self._held_parts.pop(digest, None) is not None
                return self._missing(digest, reason) if is_held else self._on_failed(digest, reason)
            case ev.WroteCheckpoint():
                self._held_parts[event.digest] = event.n_words
            case ev.Received(_, ev.CopyPart(part)) if self._view:
                return self._copy(now_s, part)
            case ev.Received(header, ev.PartMissing(digest, _)) if self._view:
                self._without.setdefault(digest, set()).add(header.src)
                return self._transfer.ask(now_s)
            case ev.Received(header, ev.Fetch(key)) if self._view and key.part:
                self._askers.setdefault(key.part, set()).add(header.src)
                is_known = key.part in self._held_parts or key.part in self._requested_parts
                finds = [] if is_known else self._find(key.version, key.part)
                return [*finds, *self._transfer.handle(now_s, event)]
            case _:
                return self._transfer.handle(now_s, event)
        return []

    def _forget(self) -> None:
        self._goal = None
        self._requested_parts.clear()
        self._without.clear()
        self._askers.clear()
        self._transfer.forget()

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        is_first_view, self._view = self._view is None, view
        if view.rolled_back:  # copies for the generation before are not wanted any more
            self._forget()
        elif is_first_view and view.number == 1:  # the parts with which the run begins may lie on any disk
            return [action for part in view.parts for action in self._find(part.version, part.digest)]
        return self._transfer.ask(now_s)

    # --------------------------------------------------------------------------------------------- what is wanted

    def _copy(self, now_s: float, part: ev.Part) -> ev.Actions:
        """The coordinator wants the part on this disk. Parts of older checkpoints are not wanted any more, but for a
        restore."""
        if part.digest in self._held_parts:
            return [ev.HoldsPart(part)]
        if self._goal is None:
            for digest in [digest for digest, other in self._requested_parts.items() if other.version < part.version]:
                self._drop(digest)
        return self._want(now_s, part)

    def _want(self, now_s: float, part: ev.Part) -> ev.Actions:
        is_known = part.digest in self._requested_parts
        self._requested_parts[part.digest] = part
        return self._transfer.ask(now_s) if is_known else self._find(part.version, part.digest)

    def _drop(self, digest: str) -> None:
        self._requested_parts.pop(digest, None)
        self._without.pop(digest, None)
        self._transfer.drop(digest)

    def _go_back(self, now_s: float, view: ev.View) -> ev.Actions:
        self._goal = view
        missing = [part for part in self._needed_parts(view) if part.digest not in self._held_parts]
        wants = [action for part in missing for action in self._want(now_s, part)]
        return wants or self._restore_if_here()

    def _needed_parts(self, view: ev.View) -> tuple[ev.Part, ...]:
        """The parts of which this peer's stage is restored."""
        every = view.n_committed == self._start_version
        return tuple([part for part in view.parts if every or part.stage == self._stage])

    def _restore_if_here(self) -> ev.Actions:
        view = self._goal
        if view is None or any(part.digest not in self._held_parts for part in self._needed_parts(view)):
            return []
        self._goal = None
        return [ev.Restore(view.n_committed, view.generation, view.n_reseeds, self._needed_parts(view))]

    # ------------------------------------------------------------------------------------------ what is on the disk

    def _find(self, version: int, digest: str) -> ev.Actions:
        """Look at the disk, unless it is being looked at."""
        if digest in self._looked_for:
            return []
        self._looked_for.add(digest)
        return [ev.FindPart(version, digest)]

    def _on_found(self, now_s: float, found: ev.FoundPart) -> ev.Actions:
        digest = found.digest
        self._looked_for.discard(digest)
        if found.n_words:
            self._held_parts[digest] = found.n_words
            return self._on_fetched(digest)
        if part := self._requested_parts.get(digest):  # who asks for it as well waits
            whole = ev.StateKey(part.version, 0, part.n_words, digest)
            rate = self._rate if self._goal is None else None
            return self._transfer.want(now_s, whole, ev.KeepPart(part), rate=rate, here=found.slices)
        return self._missing(digest, "is not on its disk")

    def _on_fetched(self, digest: str) -> ev.Actions:
        """The part is on this disk: say so if it was wanted, and give it to those who have asked for it."""
        begins_with = {part.digest: part for part in self._view.parts} if self._view else {}
        part = self._requested_parts.get(digest) or begins_with.get(digest)
        self._drop(digest)
        actions: ev.Actions = []
        if part:
            self._held_parts[digest] = part.n_words
            actions = [ev.HoldsPart(part), *self._restore_if_here()]
        return actions + self._transfer.give_waiting()

    def _on_failed(self, digest: str, reason: str) -> ev.Actions:
        """This disk cannot hold a part that was wanted. The coordinator has it copied elsewhere; without its own state
        a member is of no use."""
        if digest not in self._requested_parts:
            return []
        if self._goal and any(part.digest == digest for part in self._needed_parts(self._goal)):
            return [ev.Stop(ExitCode.BAD_INPUT, f"peer {self._peer}: {reason}")]
        return self._missing(digest, reason)

    def _missing(self, digest: str, reason: str) -> ev.Actions:
        """The part is not on this disk, and will not be. The coordinator and all who have asked for it hear it."""
        self._drop(digest)
        self._transfer.forget_requests(digest)
        told = [ev.COORDINATOR, *sorted(self._askers.pop(digest, ()))]
        return [ev.Send(dst, ev.PartMissing(digest, reason)) for dst in told]

    # ---------------------------------------------------------------------------------------------------- the policy

    def donors(self, whole: ev.StateKey) -> Sequence[int]:
        members = self._view.members if self._view else ()
        disks, without = self._requested_parts[whole.part].disks, self._without.get(whole.part, ())
        return [m.peer for m in members if m.disk in disks and m.peer != self._peer and m.peer not in without]

    def may_give(self, src: int, key: ev.StateKey) -> MayGive | str:
        """A slice of a part is given if this disk holds it: the disk is looked at once, or the part is on its way."""
        n_words = self._held_parts.get(key.part)
        if n_words is None:
            return MayGive.LATER if key.part else MayGive.NEVER
        return MayGive.NOW if 0 <= key.lo < key.hi <= n_words else f"it has {n_words} words, not {key.lo}..{key.hi}"

    def refuse(self, src: int, key: ev.StateKey, problem: str) -> ev.Actions:
        return [ev.Send(src, ev.PartMissing(key.part, problem))]
