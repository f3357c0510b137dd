"""A download in slices from several peers: a stage's state, or a part of a checkpoint.

A peer asks one donor for each slice, and each donor for a few slices at a time. A donor that leaves meanwhile, that
does not have the slice, or that sends a damaged one is replaced, and the slices that are here stay here. A download
that no step waits for keeps below a rate. Only slices of a state that were asked for are kept, those of each download
apart (FetchedStates): so a state that is installed is that of one download.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Sequence
from typing import Any

from jaxdt.protocol import events as ev

WORD_BYTES = 4
Slices = list[tuple[ev.StateKey, Any]]
IN_FLIGHT = 2  # slices asked of one donor at a time


def slice_problem(key: ev.StateKey, n_words: int, slice_words: int) -> str:
    """'' if the key is a slice of a state of `n_words`."""
    is_slice = 0 <= key.lo < n_words and key.lo % slice_words == 0 and key.hi == min(key.lo + slice_words, n_words)
    where = f"words {key.lo}..{key.hi} of a state that has {n_words} in slices of {slice_words}"
    return "" if is_slice else f"asks for {where}"


def kept(event: ev.Received) -> list[ev.Action]:
    """The slice that has arrived is kept."""
    return [] if event.tensor is None else [ev.StoreTensor(event.header.src, event.body, event.tensor)]


class Rate:
    """A limit of bytes per second over all downloads that share it. `free_s`: the time when the next one may begin."""

    def __init__(self, bytes_per_s: float):
        self.free_s = -math.inf
        self._bytes_per_s = bytes_per_s

    def spend(self, now_s: float, n_bytes: int) -> None:
        self.free_s = max(now_s, self.free_s) + n_bytes / self._bytes_per_s


class Download:
    """All words of `whole`, in slices of `slice_words`, at no more than `rate`. `here`: bounds of the slices that
    an earlier attempt has fetched."""

    def __init__(
        self,
        whole: ev.StateKey,
        slice_words: int,
        began_s: float,
        rate: Rate | None = None,
        here: Collection[tuple[int, int]] = (),
    ):
        self.whole, self.began_s = whole, began_s
        self.n_words = whole.hi
        self.rate = rate or Rate(math.inf)
        starts = range(0, self.n_words, slice_words)
        slices = [ev.StateKey(whole.version, lo, min(lo + slice_words, self.n_words), whole.part) for lo in starts]
        self._left = [key for key in reversed(slices) if (key.lo, key.hi) not in here]
        self._asked: dict[ev.StateKey, int] = {}
        self._begins = not whole.part  # the slices of a part lie in its own file

    @property
    def version(self) -> int:
        return self.whole.version

    @property
    def done(self) -> bool:
        return not self._left and not self._asked

    @property
    def progress(self) -> ev.Fetching:
        """The progress of the download, for the coordinator. A state without words is here at once."""
        left_bytes = sum(WORD_BYTES * (key.hi - key.lo) for key in self._left)
        asked_bytes = sum(WORD_BYTES * (key.hi - key.lo) for key in self._asked)
        of_bytes = WORD_BYTES * self.n_words
        return ev.Fetching(of_bytes - left_bytes - asked_bytes, asked_bytes, of_bytes)

    def waits(self, now_s: float) -> bool:
        """Whether only the rate keeps the download from asking for more."""
        return bool(self._left) and now_s < self.rate.free_s

    def ask(self, now_s: float, donors: Sequence[int]) -> list[ev.Action]:
        """Ask for what can be asked for now. Slices that a donor owed when it left are asked of the others."""
        for key, donor in list(self._asked.items()):
            if donor not in donors:
                self._ask_again(key)
        actions: list[ev.Action] = [ev.Discard(self.whole)] if self._begins else []
        self._begins = False
        load = Counter(self._asked.values())
        for _ in range(IN_FLIGHT):
            for donor in donors:
                if self._left and load[donor] < IN_FLIGHT and now_s >= self.rate.free_s:
                    key = self._left.pop()
                    self._asked[key] = donor
                    load[donor] += 1
                    self.rate.spend(now_s, WORD_BYTES * (key.hi - key.lo))
                    actions.append(ev.Send(donor, ev.Fetch(key)))
        return actions

    def arrived(self, key: ev.StateKey) -> bool:
        """A slice is here; False if it was not asked for."""
        return self._asked.pop(key, None) is not None

    def refused(self, donor: int) -> None:
        """This donor sent damaged data: all that it still owes is asked for again."""
        for key, other in list(self._asked.items()):
            if other == donor:
                self._ask_again(key)

    def _ask_again(self, key: ev.StateKey) -> None:
        del self._asked[key]
        self._left.append(key)


class FetchedStates:
    """The states that downloads bring to a peer, for the compute thread that installs them. `n_words`: words of one.

    That thread may be busy for any time, while slices of the next version arrive. So the slices of each download lie
    apart, and a state that is whole belongs to the Install that its last slice makes the machine ask for: nothing is
    added to it any more. Installs take their states in the order in which these became whole. The driver's loop calls
    `begin` and `put`, the compute thread calls `take`."""

    def __init__(self, n_words: int):
        self._n_words = n_words
        self._slices: dict[ev.StateKey, Any] = {}  # of the download under way
        self._n_missing = n_words
        self._whole: deque[tuple[int, Slices]] = deque()  # with their versions: those of the compute thread

    def begin(self) -> None:
        """A download begins. What the one before has brought is of no use, unless it is whole."""
        self._slices, self._n_missing = {}, self._n_words

    def put(self, key: ev.StateKey, words: Any) -> None:
        """Hold a slice, which its download asked for. The caller no longer writes into `words`."""
        if self._slices and next(iter(self._slices)).version != key.version:
            self.begin()
        self._n_missing -= 0 if key in self._slices else key.hi - key.lo
        self._slices[key] = words
        if not self._n_missing:
            self._whole.append((key.version, sorted(self._slices.items())))
            self.begin()

    def take(self, version: int) -> Slices:
        """The slices of the state that an Install of `version` makes this peer's own, in order."""
        found, slices = self._whole.popleft() if self._whole else (None, [])
        if found != version:
            raise RuntimeError(f"installs the state of {version} steps: the one that is whole is of {found}")
        return slices
