"""No replica averages with another: N independent runs, and the upper bound of throughput."""

from jaxdt.run.config import GroupsConfig
from jaxdt.sync.matching.base import AveragingGroup, Matched, Matcher, MatcherEntry
from jaxdt.sync.matching.token import EnforcementToken


class MatchNone(Matcher):
    """The rule by which a ready replica averages alone: it is a group of its own."""

    def ready(self, now_s: float, peer: int, step: int) -> Matched:
        return Matched((AveragingGroup((peer,), "full"),))


def _build(settings: GroupsConfig, stage: int, replicas: tuple[int, ...], token: EnforcementToken) -> MatchNone:
    return MatchNone()


ENTRY = MatcherEntry(_build, averages=False)
