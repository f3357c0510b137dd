"""No replica averages with another: N independent runs, and the upper bound of throughput."""

from jaxdt.run.config import GroupsConfig, RunConfig
from jaxdt.run.plan import Plan
from jaxdt.sync.matching.base import AveragingGroup, Matched, MatcherEntry
from jaxdt.sync.matching.token import EnforcementToken


class MatchNone:
    """The rule by which a ready replica averages alone: it is a group of its own."""

    def ready(self, now_s: float, peer: int, step: int) -> Matched:
        return Matched((AveragingGroup((peer,), "full"),))

    def timer(self, now_s: float, tag: int) -> Matched:
        return Matched()

    def on_left(self, now_s: float, *peers: int) -> Matched:
        return Matched()

    def on_joined(self, now_s: float, peer: int, donor: int) -> Matched:
        return Matched()

    def on_restarted(self, step_s: float) -> None:
        pass

    def on_failed(self, number: int, survivors: tuple[int, ...]) -> None:
        pass


def _build(settings: GroupsConfig, stage: int, replicas: tuple[int, ...], token: EnforcementToken) -> MatchNone:
    return MatchNone()


def _check(config: RunConfig, plan: Plan) -> str:
    return ""


ENTRY = MatcherEntry(_build, _check, averages=False)
