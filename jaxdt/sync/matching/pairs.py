"""Pairs that the number of the step decides, equal at all stages: AD-PSGD as SDPipe's public code runs it.

For every step the pipelines are shuffled, with a seed, and each averages with the one beside it; if their number is odd
one stays alone. The replica that is ready first waits for its mate. A run cannot get stuck: by induction over steps and
stages, the mate comes. (AD-PSGD as published, Lian et al. 2018, averages with a neighbour that is not asked. First
come, first served is the rule "window" with group_size_max 2 and no connectivity.)
"""

import functools
import random

from jaxdt.run.config import GroupsConfig
from jaxdt.sync.matching.base import AveragingGroup, Matched, Matcher, MatcherEntry
from jaxdt.sync.matching.token import EnforcementToken


@functools.lru_cache(maxsize=256)
def shuffled(seed: int, step: int, n: int) -> tuple[int, ...]:
    """The places 0..n-1 in the order of a step."""
    places = list(range(n))
    random.Random(f"pairs {seed} {step}").shuffle(places)
    return tuple(places)


class MatchPairs(Matcher):
    """The matcher of one stage. A pipeline has a place, equal at all stages as far as the same pipelines have left and
    joined: a pipeline that comes back takes its own place, a newcomer the first place that is open."""

    def __init__(self, replicas: tuple[int, ...], seed: int):
        self._planned = replicas
        self._places: list[int | None] = list(replicas)
        self._seed = seed
        self._waiting: dict[int, int] = {}  # replica -> its step
        self._last_steps: dict[int, int] = {}  # replica -> the last step with which it was ready

    def ready(self, now_s: float, peer: int, step: int) -> Matched:
        if peer not in self._places or peer in self._waiting:
            known = "is ready already" if peer in self._waiting else "is no replica of the stage"
            raise ValueError(f"peer {peer} is ready with step {step}, but it {known}")
        self._waiting[peer] = step
        self._last_steps[peer] = step
        return self._matched()

    def on_left(self, now_s: float, *peers: int) -> Matched:
        for peer in peers:
            if peer in self._places:
                self._places[self._places.index(peer)] = None
            self._waiting.pop(peer, None)
            self._last_steps.pop(peer, None)
        return self._matched()

    def on_joined(self, now_s: float, peer: int, donor: int) -> Matched:
        own = self._planned.index(peer) if peer in self._planned else None
        if own is not None and self._places[own] is None:
            self._places[own] = peer
        elif None in self._places:
            self._places[self._places.index(None)] = peer
        else:
            self._places.append(peer)
        return Matched()

    def _matched(self) -> Matched:
        """The groups of all who need not wait any longer."""
        groups: list[AveragingGroup] = []
        for peer in sorted(self._waiting):
            if peer not in self._waiting:
                continue  # its mate came first
            step = self._waiting[peer]
            mate = self._mate(peer, step)
            if mate is not None and self._waiting.get(mate) == step:
                members = sorted((peer, mate))
            elif mate is None or self._last_steps.get(mate, step) > step:
                members = [peer]  # a mate that joined with later steps never has this one
            else:
                continue
            groups.append(AveragingGroup(tuple(members), "step"))
            for member in members:
                del self._waiting[member]
        return Matched(tuple(groups))

    def _mate(self, peer: int, step: int) -> int | None:
        """The replica beside `peer` after the step's shuffle; None if `peer` stays alone."""
        places = shuffled(self._seed, step, len(self._places))
        beside = places.index(self._places.index(peer)) ^ 1
        return self._places[places[beside]] if beside < len(places) else None


# ------------------------------------------------------------------------------------------------------ table entry


def _build(settings: GroupsConfig, stage: int, replicas: tuple[int, ...], token: EnforcementToken) -> MatchPairs:
    return MatchPairs(replicas, settings.seed)


ENTRY = MatcherEntry(_build)
