"""The scheduler of averaging groups: the matcher of a stage's fragment says which replicas that are ready average.

All else is in the book (jaxdt.sync.scheduling.group_book).
"""

import math
from collections.abc import Sequence

from jaxdt.membership.agreement import (
    TIMER,
    CommittedStep,
    CountedRows,
)
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import STASH, Plan
from jaxdt.sync.matching.base import Matched, Matcher, matcher_entry
from jaxdt.sync.matching.token import EnforcementToken
from jaxdt.sync.scheduling.group_book import GroupBook


def no_return(run: RunConfig, plan: Plan) -> str:
    """One line that says why a lost pipeline does not come back; '' if it may."""
    if plan.schedule == STASH:
        return f"plan.schedule {STASH}: a donor's stages are at unlike steps, and cannot wait at one yet"
    return ""


class GroupScheduler(GroupBook):
    """The agreement of `sync.kind = "groups"`."""

    def __init__(self, config: CoordinatorConfig, run: RunConfig, plan: Plan):
        groups = run.sync.groups
        entry = matcher_entry(groups.match)
        super().__init__(
            config,
            run,
            plan,
            n_fragments=groups.fragments,
            averages_alone=groups.outer != "none",
            rows_by_step=entry.keeps_step,
        )
        self.NO_RETURN = no_return(run, plan)
        token = EnforcementToken()
        self._matchers: list[list[Matcher]] = [  # of each stage, one for each fragment
            [entry.build(groups, stage, row, token) for _ in range(groups.fragments)]
            for stage, row in enumerate(plan.placement)
        ]

    def _ready(self, now_s: float, src: int, stage: int, fragment: int) -> list[ev.Action]:
        return self._form(stage, fragment, self._matchers[stage][fragment].ready(now_s, src, self._waiting[src]))

    def _on_left(self, now_s: float, stage: int, replicas: Sequence[int]) -> list[ev.Action]:
        matched = [(f, matcher.on_left(now_s, *replicas)) for f, matcher in enumerate(self._matchers[stage])]
        return [action for fragment, one in matched for action in self._form(stage, fragment, one)]

    def _came(self, now_s: float, stage: int, peer: int, donor: int) -> list[ev.Action]:
        matched = [(f, matcher.on_joined(now_s, peer, donor)) for f, matcher in enumerate(self._matchers[stage])]
        return [action for fragment, one in matched for action in self._form(stage, fragment, one)]

    def on_woke(self, now_s: float, tag: str) -> list[ev.Action]:
        stage, fragment, matcher_tag = map(int, tag.removeprefix(TIMER).split())
        return self._form(stage, fragment, self._matchers[stage][fragment].timer(now_s, matcher_tag))

    def _form(self, stage: int, fragment: int, matched: Matched) -> list[ev.Action]:
        """The groups that the matcher of a fragment has formed, and its timer."""
        actions = [action for group in matched.groups for action in self._on_formed(stage, fragment, group)]
        if matched.timer:
            at_s, tag = matched.timer
            actions.append(ev.WakeAt(at_s, f"{TIMER}{stage} {fragment} {tag}"))
        return actions

    def _form_again(self, actions: list[ev.Action]) -> list[ev.Action]:
        """Groups average with other members than first said."""
        for action in actions:
            if isinstance(action, GroupReport):
                number = action.k - self._n_groups_before[action.stage][action.fragment]
                self._matchers[action.stage][action.fragment].on_failed(number, tuple(action.members))
        return actions

    def restore(self, view: ev.View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        times = [row.step_s for row in rows.new if math.isfinite(row.step_s)] if rows else []
        for matcher in (matcher for of_stage in self._matchers for matcher in of_stage):
            matcher.on_restarted(times[-1] if times else self._config.deadline_floor_s)
        super().restore(view, steps, rows)
