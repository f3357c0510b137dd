"""A joining member's fetching of its stage's state: slices from several donors at a time, each until it arrives.

The state is parameters and optimizer state of one version, as one vector of 4-byte words. Donors are the members of the
stage that hold the version; it stays theirs until the step is committed, which waits for the newcomer.
"""

from collections import Counter
from collections.abc import Sequence

from jaxdt.core.events import Fetch, Send, StateKey

IN_FLIGHT = 2  # slices asked of one donor at a time


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
