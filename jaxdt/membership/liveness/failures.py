"""The failures of peers, and whether any peer is left that could continue.

A peer that fails is that peer's trouble: the run continues without it, or waits for another. The run ends with it only
where waiting is in vain: no peer is left, or one peer after another fails at the same stage for the same reason.
"""

from collections import Counter
from collections.abc import Iterable

from jaxdt.membership.roster import FORGIVEN_STEPS

SAVE_FAILURES_MAX = 3  # checkpoints in a row that a peer may fail to write
OVERDUE_MAX = 3  # times within FORGIVEN_STEPS that the Work of a peer may be overdue
SAME_FAILURES_MAX = 3  # peers in a row that may fail for the same reason at a stage without any other


class Failures:
    """Kept by the coordinator."""

    def __init__(self):
        self._failed: set[int] = set()  # whose processes have ended
        self._last: dict[int, tuple[str, int]] = {}  # stage -> the last reason, and how often in a row
        self._n_saves_failed: Counter[int] = Counter()
        self._overdue: dict[int, dict[str, int]] = {}  # peer -> its Work that was overdue, and in which step

    def on_failed(self, peer: int, stage: int, reason: str) -> None:
        """A peer cannot continue, and its process ends."""
        self._failed.add(peer)
        before, n = self._last.get(stage, ("", 0))
        self._last[stage] = (reason, n + 1 if reason == before else 1)

    def on_started(self, peer: int) -> None:
        """A process of this peer says hello."""
        self._failed.discard(peer)

    def on_committed(self) -> None:
        """A step is committed: every stage has a peer that works."""
        self._last.clear()

    def is_final(self, stage: int, is_deserted: bool, peers: Iterable[int]) -> bool:
        """Whether the last failure at a stage leaves no peer that could continue. `is_deserted`: the stage has no peer,
        and waits for no known one. `peers`: members and candidates."""
        in_vain = is_deserted and self._last.get(stage, ("", 0))[1] >= SAME_FAILURES_MAX
        return in_vain or self._failed.issuperset(peers)

    def on_save_failed(self, peer: int) -> int:
        """A peer could not write its part of a checkpoint; for how many in a row."""
        self._n_saves_failed[peer] += 1
        return self._n_saves_failed[peer]

    def on_saved(self, peer: int) -> None:
        del self._n_saves_failed[peer]

    def on_overdue(self, peer: int, step: int, work: str) -> int:
        """A peer's Work is overdue in this step; how much of its Work was so of late. The same Work counts once."""
        known = self._overdue.get(peer, {})
        recent = {one: at for one, at in known.items() if step - FORGIVEN_STEPS < at <= step}
        self._overdue[peer] = recent | {work: step}
        return len(self._overdue[peer])

    def on_evicted(self, peer: int) -> None:
        """This process of a peer may not come back; the next one starts again."""
        del self._n_saves_failed[peer]
