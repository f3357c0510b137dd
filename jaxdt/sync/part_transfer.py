"""The transfer of checkpoint parts: a peer gets a part that its disk lacks, and gives parts to others.

Two things need it. The coordinator wants each part on several disks before a checkpoint is complete, and tells members
to copy some. And a generation that begins with a checkpoint makes every member restore its stage's state from the part,
which only members with other disks may hold. A part is named by the digest of its content, so it does not matter who
sends which slice of it.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import math

from jaxdt.protocol import events as ev
from jaxdt.protocol.wake_up import WakeUp
from jaxdt.run.exit_codes import ExitCode
from jaxdt.sync.download import WORD_BYTES, Download, Rate


class PartTransfer:
    """One peer's side of it. `slice_bytes` is the size of a slice, `bytes_per_s` the rate of copies, for which no
    step waits. `start_version`: the checkpoint with which the run began may be of another cut, so all its parts are
    needed."""

    READS = frozenset(
        {
            ev.ViewChanged,
            ev.Evicted,
            ev.GoBack,
            ev.CopyPart,
            ev.Fetch,
            ev.State,
            ev.PartMissing,
            ev.FoundPart,
            ev.KeptPart,
            ev.LostPart,
            ev.Refused,
            ev.Woke,
        }
        | {ev.WroteCheckpoint}
    )

    def __init__(self, peer: int, stage: int, slice_bytes: int, bytes_per_s: float, start_version: int):
        self._peer = peer
        self._stage = stage
        self._slice_words = max(1, slice_bytes // WORD_BYTES)
        self._rate = Rate(bytes_per_s)
        self._start_version = start_version
        self._view: ev.View | None = None
        self._goal: ev.View | None = None  # the generation that this peer is still to restore
        self._held: dict[str, int] = {}  # digest of a part that is whole on this disk -> its words
        self._wanted: dict[str, ev.Part] = {}
        self._downloads: dict[str, Download] = {}
        self._without: dict[str, set[int]] = {}  # digest -> members that have said that they do not hold it
        self._requests: dict[str, list[tuple[int, ev.StateKey]]] = {}  # that wait until the disk has been looked at
        self._askers: dict[str, set[int]] = {}
        self._wake_up = WakeUp("parts")

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(now_s, view)
            case ev.Evicted():
                self._view = self._goal = None
                self._forget()
            case ev.GoBack(view):
                return self._go_back(now_s, view)
            case ev.FoundPart():
                return self._found(now_s, event)
            case ev.KeptPart(digest, problem):
                return self._fetched(digest) if not problem else self._failed(digest, problem)
            case ev.LostPart(digest, reason):
                return self._lost(digest, reason)
            case ev.WroteCheckpoint():
                self._held[event.digest] = event.n_words
            case ev.Refused(peer, _) if peer is not None:
                for download in self._downloads.values():
                    download.refused(peer)
                return self._ask(now_s)
            case ev.Woke("parts"):
                self._wake_up.woke(now_s)
                return self._ask(now_s)
            case ev.Received(header, body) if self._view:
                return self._received(now_s, header.src, body)
        return []

    def _received(self, now_s: float, src: int, body: object) -> ev.Actions:
        match body:
            case ev.CopyPart(part):
                return self._copy(now_s, part)
            case ev.Fetch(key) if key.part:
                return self._on_fetch(src, key)
            case ev.State(key) if key.part in self._downloads and self._downloads[key.part].arrived(key):
                return self._ask(now_s)
            case ev.PartMissing(digest, _):
                self._without.setdefault(digest, set()).add(src)
                return self._ask(now_s)
        return []

    def _forget(self) -> None:
        self._wanted.clear()
        self._downloads.clear()
        self._without.clear()
        self._requests.clear()
        self._askers.clear()

    def _adopt(self, now_s: float, view: ev.View) -> ev.Actions:
        is_first_view = self._view is None
        self._view = view
        if view.rolled_back:  # copies for the generation before are not wanted any more
            self._goal = None
            self._forget()
        elif is_first_view and view.number == 1:  # the parts with which the run begins may lie on any disk
            return [ev.FindPart(part.version, part.digest) for part in view.parts]
        return self._ask(now_s)

    # -------------------------------------------------------------------------------------------------- as a donor

    def _on_fetch(self, src: int, key: ev.StateKey) -> ev.Actions:
        """A slice of a part, if this disk holds it: that is looked up once."""
        self._askers.setdefault(key.part, set()).add(src)
        if key.part in self._held:
            return self._give(src, key)
        is_first = key.part not in self._requests
        self._requests.setdefault(key.part, []).append((src, key))
        return [ev.FindPart(key.version, key.part)] if is_first and key.part not in self._wanted else []

    def _give(self, src: int, key: ev.StateKey) -> ev.Actions:
        n_words = self._held[key.part]
        if not 0 <= key.lo < key.hi <= n_words:
            return [ev.Send(src, ev.PartMissing(key.part, f"it has {n_words} words, not {key.lo}..{key.hi}"))]
        return [ev.Send(src, ev.State(key), WORD_BYTES * (key.hi - key.lo + 1), ev.BULK)]

    def _lost(self, digest: str, reason: str) -> ev.Actions:
        """A part that was on this disk, or was being fetched to it, is of no use."""
        if self._held.pop(digest, None) is None:
            return self._failed(digest, reason)
        told = [ev.COORDINATOR, *sorted(self._askers.pop(digest, ()))]
        return [ev.Send(dst, ev.PartMissing(digest, reason)) for dst in told]

    # --------------------------------------------------------------------------------------------- what is wanted

    @property
    def _current_view(self) -> ev.View:
        assert self._view is not None, "parts are given and fetched only inside of a view"
        return self._view

    def _copy(self, now_s: float, part: ev.Part) -> ev.Actions:
        """The coordinator wants the part on this disk. Parts of older checkpoints are not wanted any more, but for a
        restore."""
        if part.digest in self._held:
            return [ev.HoldsPart(part)]
        if self._goal is None:
            for digest in [digest for digest, other in self._wanted.items() if other.version < part.version]:
                self._drop(digest)
        return self._want(now_s, part)

    def _want(self, now_s: float, part: ev.Part) -> ev.Actions:
        is_known = part.digest in self._wanted
        self._wanted[part.digest] = part
        return self._ask(now_s) if is_known else [ev.FindPart(part.version, part.digest)]

    def _drop(self, digest: str) -> None:
        self._wanted.pop(digest, None)
        self._downloads.pop(digest, None)
        self._without.pop(digest, None)

    def _go_back(self, now_s: float, view: ev.View) -> ev.Actions:
        self._goal = view
        missing = [part for part in self._needed(view) if part.digest not in self._held]
        wants = [action for part in missing for action in self._want(now_s, part)]
        return wants or self._restore_if_here()

    def _needed(self, view: ev.View) -> tuple[ev.Part, ...]:
        """The parts of which this peer's stage is restored."""
        every = view.n_committed == self._start_version
        return tuple([part for part in view.parts if every or part.stage == self._stage])

    def _restore_if_here(self) -> ev.Actions:
        view = self._goal
        if view is None or any(part.digest not in self._held for part in self._needed(view)):
            return []
        self._goal = None
        return [ev.Restore(view.n_committed, view.generation, view.n_reseeds, self._needed(view))]

    def _found(self, now_s: float, found: ev.FoundPart) -> ev.Actions:
        digest = found.digest
        if found.n_words:
            self._held[digest] = found.n_words
            return self._fetched(digest)
        if part := self._wanted.get(digest):  # who asks for it as well waits
            whole = ev.StateKey(part.version, 0, part.n_words, digest)
            rate = self._rate if self._goal is None else Rate(math.inf)
            self._downloads[digest] = Download(whole, self._slice_words, now_s, rate, found.slices)
            return self._ask(now_s)
        told = {src for src, _ in self._requests.pop(digest, ())}
        return [ev.Send(dst, ev.PartMissing(digest, "is not on its disk")) for dst in sorted({ev.COORDINATOR, *told})]

    def _ask(self, now_s: float) -> ev.Actions:
        """Ask for slices of what is wanted, and keep what is here."""
        actions: ev.Actions = []
        if self._view is None:
            return actions
        for digest, download in list(self._downloads.items()):
            part = self._wanted[digest]
            if download.done:
                del self._downloads[digest]
                actions.append(ev.KeepPart(part))
                continue
            actions += download.ask(now_s, self._donors(part))
            if download.waits(now_s):
                actions += self._wake_up.at(download.rate.free_s)
        return actions

    def _donors(self, part: ev.Part) -> list[int]:
        without = self._without.get(part.digest, ())
        members = self._current_view.members
        return [m.peer for m in members if m.disk in part.disks and m.peer != self._peer and m.peer not in without]

    def _fetched(self, digest: str) -> ev.Actions:
        """The part is on this disk: say so if it was wanted, and give it to those who have asked for it."""
        begins_with = {part.digest: part for part in self._view.parts} if self._view else {}
        part = self._wanted.get(digest) or begins_with.get(digest)
        self._drop(digest)
        actions: ev.Actions = []
        if part:
            self._held[digest] = part.n_words
            actions = [ev.HoldsPart(part), *self._restore_if_here()]
        requests = self._requests.pop(digest, ())
        return actions + [action for src, key in requests for action in self._give(src, key)]

    def _failed(self, digest: str, reason: str) -> ev.Actions:
        """This disk cannot hold the part. The coordinator has it copied elsewhere; without its own state a member is of
        no use."""
        if digest not in self._wanted:
            return []
        self._drop(digest)
        if self._goal and any(part.digest == digest for part in self._needed(self._goal)):
            return [ev.Stop(ExitCode.BAD_INPUT, f"peer {self._peer}: {reason}")]
        return [ev.Send(ev.COORDINATOR, ev.PartMissing(digest, reason))]
