"""A download in slices from several peers: a stage's state, or a part of a checkpoint.

A peer asks one donor for each slice, and each donor for a few slices at a time. A donor that leaves meanwhile, that
does not have the slice, or that sends a damaged one is replaced, and the slices that are here stay here. A download
that nobody waits for keeps below a rate.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence

from jaxdt.protocol.events import Fetch, Fetching, Send, StateKey

WORD_BYTES = 4
IN_FLIGHT = 2  # slices asked of one donor at a time


def slice_problem(key: StateKey, n_words: int, slice_words: int) -> str:
    """'' if the key is a slice of a state of `n_words`."""
    is_slice = 0 <= key.lo < n_words and key.lo % slice_words == 0 and key.hi == min(key.lo + slice_words, n_words)
    where = f"words {key.lo}..{key.hi} of a state that has {n_words} in slices of {slice_words}"
    return "" if is_slice else f"asks for {where}"


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
        whole: StateKey,
        slice_words: int,
        began_s: float,
        rate: Rate | None = None,
        here: Collection[tuple[int, int]] = (),
    ):
        self.whole, self.began_s = whole, began_s
        self.n_words = whole.hi
        self.rate = rate or Rate(math.inf)
        starts = range(0, self.n_words, slice_words)
        slices = [StateKey(whole.version, lo, min(lo + slice_words, self.n_words), whole.part) for lo in starts]
        self._left = [key for key in reversed(slices) if (key.lo, key.hi) not in here]
        self._asked: dict[StateKey, int] = {}

    @property
    def version(self) -> int:
        return self.whole.version

    @property
    def done(self) -> bool:
        return not self._left and not self._asked

    @property
    def progress(self) -> Fetching:
        """The progress of the download, for the coordinator. A state without words is here at once."""
        left_bytes = sum(WORD_BYTES * (key.hi - key.lo) for key in self._left)
        asked_bytes = sum(WORD_BYTES * (key.hi - key.lo) for key in self._asked)
        of_bytes = WORD_BYTES * self.n_words
        return Fetching(of_bytes - left_bytes - asked_bytes, asked_bytes, of_bytes)

    def waits(self, now_s: float) -> bool:
        """Whether only the rate keeps the download from asking for more."""
        return bool(self._left) and now_s < self.rate.free_s

    def ask(self, now_s: float, donors: Sequence[int]) -> list[Send]:
        """Ask for what can be asked for now. Slices that a donor owed when it left are asked of the others."""
        for key, donor in list(self._asked.items()):
            if donor not in donors:
                self._ask_again(key)
        sends: list[Send] = []
        load = Counter(self._asked.values())
        for _ in range(IN_FLIGHT):
            for donor in donors:
                if self._left and load[donor] < IN_FLIGHT and now_s >= self.rate.free_s:
                    key = self._left.pop()
                    self._asked[key] = donor
                    load[donor] += 1
                    self.rate.spend(now_s, WORD_BYTES * (key.hi - key.lo))
                    sends.append(Send(donor, Fetch(key)))
        return sends

    def arrived(self, key: StateKey) -> bool:
        """A slice is here; False if it was not asked for."""
        return self._asked.pop(key, None) is not None

    def refused(self, donor: int) -> None:
        """This donor sent damaged data: all that it still owes is asked for again."""
        for key, other in list(self._asked.items()):
            if other == donor:
                self._ask_again(key)

    def _ask_again(self, key: StateKey) -> None:
        del self._asked[key]
        self._left.append(key)
