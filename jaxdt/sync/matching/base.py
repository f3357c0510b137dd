"""A matcher is the rule that answers ready replicas with averaging groups. Here: its interface, and the table.

A replica that has done its local steps says that it is ready, and waits. The matcher of its stage decides with whom it
averages. It sees peers, step numbers and times, and never a parameter. A new rule is one file and one entry of
MATCHERS.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from jaxdt.run.config import GroupsConfig, RunConfig
from jaxdt.run.errors import BadInput, nearest
from jaxdt.run.plan import Plan
from jaxdt.sync.matching.token import EnforcementToken

# Name of a rule -> the module that holds its `ENTRY`, imported when the rule is used.
MATCHERS: dict[str, str] = {
    "all": "jaxdt.sync.matching.all",
    "none": "jaxdt.sync.matching.none",
    "pairs": "jaxdt.sync.matching.pairs",
    "window": "jaxdt.sync.matching.window",
}


@dataclass(frozen=True)
class AveragingGroup:
    """Replicas of a stage that average once. `members` are sorted. `cause`: what closed the group: "full" (every
    replica is in it), "timeout", "enforced", "cap", "abandoned", or "step" (the step's number says who averages).
    `enforced`: the stage has waited until the last groups connect all its replicas. `suspended`: they do not, and the
    rule let it pass."""

    members: tuple[int, ...]
    cause: str
    enforced: bool = False
    suspended: bool = False


@dataclass(frozen=True)
class Matched:
    """The groups that form now. `timer`: (at_s, tag), when the matcher wants its `timer` to be called, with that
    tag."""

    groups: tuple[AveragingGroup, ...] = ()
    timer: tuple[float, int] | None = None


class Matcher(ABC):
    """One for each stage, and for each fragment of its parameters that averages by itself. The defaults are those of a
    rule that knows no other replica and sets no timer."""

    @abstractmethod
    def ready(self, now_s: float, peer: int, step: int) -> Matched:
        """A replica has done `step` local steps, and waits for a group. No replica is ready twice at a time."""

    def timer(self, now_s: float, tag: int) -> Matched:
        """The time of an earlier Matched.timer has come; it may be out of date by now."""
        return Matched()

    def on_left(self, now_s: float, *peers: int) -> Matched:
        """Replicas have gone at the same time, whether they were ready or not."""
        return Matched()

    def on_joined(self, now_s: float, peer: int, donor: int) -> Matched:
        """A replica has come, with the parameters of `donor`."""
        return Matched()

    def on_restarted(self, step_s: float) -> None:
        """The coordinator was started again; a local step takes about so many seconds."""
        return

    def on_failed(self, number: int, survivors: tuple[int, ...]) -> None:
        """Group `number` of the stage, counted from 0 in the order in which groups formed, averages only these members
        (possibly none), because others of it have left. Survivors do not become ready again for it. It may be told more
        than once, the last time with those whose mean was adopted."""
        return


@dataclass(frozen=True)
class MatcherEntry:
    """The answers of a rule to the rest of jaxdt.

    build      a matcher with these settings, for a stage, its replicas in the order of their pipelines, and the
               enforcement token that the matchers of all stages of a run share
    check      '' if config and plan make sense with it, else a line that names the field and the reason
    averages   whether replicas average at all; if not, no replica says that it is ready
    keeps_step whether replicas continue in step with one another: then a row of the metrics is of one step of all
    period     after how many averages of so many replicas the rule's course repeats
    """

    build: Callable[[GroupsConfig, int, tuple[int, ...], EnforcementToken], Matcher]
    check: Callable[[RunConfig, Plan], str] = lambda config, plan: ""
    averages: bool = True
    keeps_step: bool = False
    period: Callable[[GroupsConfig, int], int] = lambda settings, n_replicas: 1


def matcher_entry(match: str) -> MatcherEntry:
    """The entry of a rule; BadInput for one that does not exist."""
    if match not in MATCHERS:
        raise BadInput(
            f"sync.groups.match: got {match!r}, expected one of {', '.join(MATCHERS)}{nearest(match, MATCHERS)}"
        )
    return importlib.import_module(MATCHERS[match]).ENTRY
