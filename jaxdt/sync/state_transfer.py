"""How a newcomer gets the state of its stage: parameters and optimizer state of one version, from all who hold it.

The state is one vector of 4-byte words, cut into slices. The newcomer asks the other members of its stage for them, a
few at a time each; whoever leaves meanwhile, or sends a damaged slice, is replaced. A version stays its holders' until
the step is committed that begins with it, and that waits for the newcomer: so every slice is of the same version.
"""

from collections import Counter
from collections.abc import Sequence

from jaxdt.protocol.events import (
    BULK,
    COORDINATOR,
    Action,
    Committed,
    Event,
    Evicted,
    Fetch,
    Fetching,
    Install,
    Installed,
    Joined,
    Ready,
    Received,
    Record,
    Refused,
    Report,
    Send,
    State,
    StateKey,
    Suspect,
    Updated,
    View,
    ViewChanged,
)

WORD_BYTES = 4
IN_FLIGHT = 2  # slices asked of one donor at a time


class StateTransfer:
    """One peer's side of it, as a newcomer and as a donor. `slice_bytes` is the size of a slice."""

    READS = frozenset({ViewChanged, Evicted, Updated, Ready, Installed, Refused, Fetch, State, Committed})

    def __init__(self, peer: int, stage: int, slice_bytes: int):
        self._peer, self._stage = peer, stage
        self._slice_words = max(1, slice_bytes // WORD_BYTES)
        self._n_words = 0
        self._view: View | None = None
        self._has = (-1, -1)  # generation and version of the state that is here
        self._updating = False
        self._download: Download | None = None
        self._waiting: list[tuple[int, StateKey]] = []

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case ViewChanged(view):
                return self._adopt(now_s, view)
            case Evicted(view):
                self._expect(view.records)
                self._view, self._download = None, None
                self._waiting.clear()
            case Ready(_, n_words):
                self._n_words = n_words
            case Updated(_, version):
                return self._updated(version)
            case Installed(version):
                return self._installed(now_s, version)
            case Refused(peer, _) if self._download and peer is not None:
                self._download.refused(peer)
                return self._ask()
            case Received(header, body) if self._view:
                return self._received(header.src, body)
        return []

    def _received(self, src: int, body: object) -> list[Action | Event]:
        match body:
            case Fetch(key):
                return self._give(src, key)
            case State(key) if self._download and self._download.arrived(key):
                return self._go_on()
            case Committed(record):
                self._expect((record,))
        return []

    def _expect(self, records: Sequence[Record]) -> None:
        """An update of what is here is about to begin."""
        self._updating |= any((record.generation, record.step) == self._has for record in records)

    def _adopt(self, now_s: float, view: View) -> list[Action | Event]:
        known, self._view = self._view is not None, view
        self._expect(view.records)
        if view.rolled_back:
            self._download, self._updating = None, False
            self._waiting.clear()
            return []
        if self._peer not in view.joining:
            if not known:
                self._has = (view.generation, view.n_committed)
            return []
        if not known:
            if self._has == (view.generation, view.n_committed):
                return [Fetching(1, 0, 1), Joined(view.n_committed)]
            self._download = Download(view.n_committed, self._n_words, self._slice_words, now_s)
        return self._go_on() if self._download else []

    def _updated(self, version: int) -> list[Action | Event]:
        """A version is here; what was asked of it can be given now."""
        if self._view is None:
            return []
        self._has, self._updating = (self._view.generation, version), False
        waiting, self._waiting = self._waiting, []
        return [send for src, key in waiting for send in self._give(src, key)]

    # -------------------------------------------------------------------------------------------------- as a donor

    def _donors(self) -> list[int]:
        return [peer for peer in self._view.stage_peers(self._stage) if peer not in self._view.joining]

    def _give(self, src: int, key: StateKey) -> list[Action | Event]:
        """A slice of our state, if it is of the version asked for, or as soon as it is. Who asks for what no newcomer
        of this stage would is turned away: the step waits for it, and would wait for ever."""
        if src not in self._view.joining:
            return []
        if problem := self._problem(key):
            return [
                Report("refused", {"reason": f"peer {src}: {problem}"}),
                *(Send(dst, Suspect(src, problem)) for dst in (COORDINATOR, src)),
            ]
        if key.version > self._has[1] or self._updating:
            self._waiting.append((src, key))
            return []
        n_bytes = WORD_BYTES * (key.hi - key.lo + 1)
        return [Send(src, State(key), n_bytes, BULK)] if key.version == self._has[1] else []

    def _problem(self, key: StateKey) -> str:
        """'' if the key is a slice of this stage's state."""
        n_words = self._n_words
        if (
            not 0 <= key.lo < n_words
            or key.lo % self._slice_words
            or key.hi != min(key.lo + self._slice_words, n_words)
        ):
            return f"asks for words {key.lo}..{key.hi} of a state that has {n_words} in slices of {self._slice_words}"
        if key.version > self._view.n_committed:
            return f"asks for the state of {key.version} steps, committed are {self._view.n_committed}"
        return ""

    # ----------------------------------------------------------------------------------------------- as a newcomer

    def _go_on(self) -> list[Action | Event]:
        if self._download.done:
            return [self._download.said, Install(self._download.version, self._view.generation)]
        return self._ask()

    def _ask(self) -> list[Action | Event]:
        return [*self._download.ask(self._donors()), self._download.said]

    def _installed(self, now_s: float, version: int) -> list[Action | Event]:
        """The state is ours; of a download that a view has made void, nothing is."""
        if not self._download or self._download.version != version:
            return []
        download, self._download, self._has = self._download, None, (self._view.generation, version)
        fields = {"version": version, "bytes": WORD_BYTES * download.n_words, "seconds": now_s - download.began_s}
        return [Report("download", fields | {"donors": self._donors()}), Joined(version)]


class Download:
    """Version `version` of n_words words, in slices of `slice_words`."""

    def __init__(self, version: int, n_words: int, slice_words: int, began_s: float):
        self.version, self.n_words, self.began_s = version, n_words, began_s
        starts = range(0, n_words, slice_words)
        self._left = [StateKey(version, lo, min(lo + slice_words, n_words)) for lo in reversed(starts)]
        self._asked: dict[StateKey, int] = {}

    @property
    def done(self) -> bool:
        return not self._left and not self._asked

    @property
    def said(self) -> Fetching:
        """How far it is, for the coordinator; a state of nothing is here at once."""
        left, asked = (sum(WORD_BYTES * (key.hi - key.lo) for key in keys) for keys in (self._left, self._asked))
        of = WORD_BYTES * self.n_words
        return Fetching(of - left - asked, asked, of)

    def ask(self, donors: Sequence[int]) -> list[Send]:
        """Ask for what can be asked for now; what a donor who is gone still owed is asked of the others."""
        for key, donor in list(self._asked.items()):
            if donor not in donors:
                self._again(key)
        sends, load = [], Counter(self._asked.values())
        for _ in range(IN_FLIGHT):
            for donor in donors:
                if self._left and load[donor] < IN_FLIGHT:
                    key = self._left.pop()
                    self._asked[key] = donor
                    load[donor] += 1
                    sends.append(Send(donor, Fetch(key)))
        return sends

    def arrived(self, key: StateKey) -> bool:
        """A slice is here; False if it was not asked for."""
        return self._asked.pop(key, None) is not None

    def refused(self, donor: int) -> None:
        """What this donor sent was damaged: whatever it still owes is asked for again."""
        for key, other in list(self._asked.items()):
            if other == donor:
                self._again(key)

    def _again(self, key: StateKey) -> None:
        del self._asked[key]
        self._left.append(key)
