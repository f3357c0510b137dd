"""All replicas of a stage average together: a group forms when the last of them is ready.

With one local step in between this is all-reduce over parameters; with several it is local SGD.
"""

from jaxdt.run.config import GroupsConfig
from jaxdt.sync.matching.base import AveragingGroup, Matched, Matcher, MatcherEntry
from jaxdt.sync.matching.token import EnforcementToken


class MatchAll(Matcher):
    """One stage's. It needs no timer: a replica that is awaited comes, or leaves."""

    def __init__(self, replicas: tuple[int, ...]):
        self._replicas = set(replicas)
        self._ready: set[int] = set()

    def ready(self, now_s: float, peer: int, step: int) -> Matched:
        self._ready.add(peer)
        return self._close_if_full()

    def on_left(self, now_s: float, *peers: int) -> Matched:
        self._replicas.difference_update(peers)
        self._ready.difference_update(peers)
        return self._close_if_full()

    def on_joined(self, now_s: float, peer: int, donor: int) -> Matched:
        self._replicas.add(peer)
        return Matched()

    def _close_if_full(self) -> Matched:
        if not self._ready or self._ready != self._replicas:
            return Matched()
        group = AveragingGroup(tuple(sorted(self._ready)), "full")
        self._ready.clear()
        return Matched((group,))


def _build(settings: GroupsConfig, stage: int, replicas: tuple[int, ...], token: EnforcementToken) -> MatchAll:
    return MatchAll(replicas)


ENTRY = MatcherEntry(_build, keeps_step=True)
