"""The scheduler of averaging groups: the coordinator's part where replicas may differ.

It hears which replicas want a group, asks the matcher of their stage, and tells the members of each group that forms.
It counts the pipelines' steps: as many of them as there are pipelines make one row of the metrics, and the run has
enough of them when it has train.steps rows. A pipeline that has done its share goes on while others are slower. After
the last step it has the replicas of each stage average their whole state.

The groups, with the local steps of their members, are reported: from this log one process can do the run again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdt.membership.agreement import TIMER, CommittedStep, Decision, EndRun, Results
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol.events import (
    Action,
    Continue,
    EndOfSteps,
    Finished,
    GroupClosed,
    GroupFormed,
    Message,
    NotFinite,
    Record,
    ResultHeld,
    Round,
    Send,
    ShareDone,
    StepDone,
    View,
    WakeAt,
    WantsGroup,
)
from jaxdt.protocol.reports import GroupReport, PipelineEndReport, StateMeanReport
from jaxdt.spec.config import RunConfig
from jaxdt.spec.plan import Plan
from jaxdt.spec.sizes import group_name, state_name
from jaxdt.sync.matching.base import AveragingGroup, Matched, Matcher, matcher_entry
from jaxdt.sync.matching.token import EnforcementToken
from jaxdt.sync.rows import Rows

NOT_YET = "with sync.kind groups a run cannot go on without one of its peers yet"


@dataclass
class OpenGroup:
    """A group whose members have not all told that they hold its result."""

    members: tuple[int, ...]
    held: dict[int, ResultHeld] = field(default_factory=dict[int, ResultHeld])  # by member


class GroupScheduler:
    """The agreement of `sync.kind = "groups"`. `n_committed`: rows of the metrics."""

    READS = frozenset({StepDone, NotFinite, WantsGroup, ResultHeld, ShareDone, Finished})

    def __init__(self, config: CoordinatorConfig, run: RunConfig, plan: Plan):
        self.n_committed = config.start_version
        self._config = config
        self._plan = plan
        self._checkpoint_every_steps = run.train.checkpoint_every_steps
        self._has_outer = run.sync.groups.outer != "none"
        self._view: View | None = None
        token = EnforcementToken()
        build = matcher_entry(run.sync.groups.match).build
        self._matchers: list[Matcher] = [
            build(run.sync.groups, stage, row, token) for stage, row in enumerate(plan.placement)
        ]
        self._wanted: dict[int, int] = {}  # replica that waits for a group -> local steps that it has done
        self._open: dict[Round, OpenGroup] = {}
        self._n_groups = [0] * plan.n_stages
        self._rows = Rows(plan.n_pipelines, config.tokens_per_sample)
        self._n_missing = plan.n_pipelines * (config.n_steps - config.start_version)  # steps of pipelines
        self._ended: set[int] = set()  # pipelines that begin no further step
        self._finished: dict[int, int] = {}  # replica -> its local steps
        self._end: EndRun | None = None

    # --------------------------------------------------------------------------------------------------- what it hears

    def hear(self, now_s: float, src: int, message: Message, admissions: Mapping[int, int]) -> list[Action]:
        stage, pipeline = self._plan.seat(src)
        match message:
            case StepDone():
                return self._step_done(now_s, message)
            case NotFinite(step):
                return self._not_finite(pipeline, step)
            case WantsGroup(step):
                self._wanted[src] = step
                return self._form(stage, self._matchers[stage].ready(now_s, src, step))
            case ResultHeld():
                return self._held(src, message)
            case ShareDone(step):
                return self._share_done(src, pipeline, step)
            case Finished(n_steps):
                return self._on_finished(now_s, src, n_steps)
            case _:
                raise AssertionError(f"{type(message).__name__} is not among READS")

    def woke(self, now_s: float, tag: str) -> list[Action]:
        stage, matcher_tag = map(int, tag.removeprefix(TIMER).split())
        return self._form(stage, self._matchers[stage].timer(now_s, matcher_tag))

    def _form(self, stage: int, matched: Matched) -> list[Action]:
        """The groups that a matcher has formed, and its timer."""
        actions = [action for group in matched.groups for action in self._formed(stage, group)]
        if matched.timer:
            at_s, tag = matched.timer
            actions.append(WakeAt(at_s, f"{TIMER}{stage} {tag}"))
        return actions

    def _formed(self, stage: int, group: AveragingGroup) -> list[Action]:
        k = self._n_groups[stage]
        self._n_groups[stage] += 1
        self._rows.formed(group)
        steps = [self._wanted.pop(member) for member in group.members]
        members = list(group.members)
        report = GroupReport(stage, k, members, steps, group.cause, group.enforced, group.suspended)
        round = Round(k, group_name(stage), self._view_number)
        if len(members) == 1 and not self._has_outer:  # it goes on at once
            return [report, Send(members[0], GroupFormed(round, group.members))]
        return [report, *self._open_round(round, group.members)]

    @property
    def _view_number(self) -> int:
        assert self._view is not None  # members speak in a view
        return self._view.number

    def _open_round(self, round: Round, members: tuple[int, ...]) -> list[Action]:
        self._open[round] = OpenGroup(members)
        return [Send(member, GroupFormed(round, members)) for member in members]

    def _held(self, src: int, held: ResultHeld) -> list[Action]:
        round = held.round
        group = self._open.get(round)
        if group is None or src not in group.members:
            return []
        group.held[src] = held
        if len({one.digest for one in group.held.values()}) > 1:
            self._end = EndRun(3, f"{round.group}, group {round.step}: peer {src} holds another result than the others")
        if len(group.held) < len(group.members):
            return []
        del self._open[round]
        stage, _ = self._plan.seat(src)
        reports: list[Action] = []
        if round.group == state_name(stage):
            steps = [group.held[member].step for member in group.members]
            reports.append(StateMeanReport(stage, round.step, list(group.members), steps))
        return [*reports, *(Send(member, GroupClosed(round)) for member in group.members)]

    # ------------------------------------------------------------------------------------------------ steps of the run

    def _not_finite(self, pipeline: int, step: int) -> list[Action]:
        self._rows.has_skipped = True
        if self._config.on_nonfinite == "stop":
            self._end = EndRun(4, f"pipeline {pipeline}, local step {step}: the gradient is not finite")
        return []

    def _step_done(self, now_s: float, done: StepDone) -> list[Action]:
        self._n_missing -= 1
        report = None
        if self.n_committed < self._config.n_steps:
            report = self._rows.add(now_s, self.n_committed, done)
        if report:
            self.n_committed += 1
        actions: list[Action] = [report, *self._snapshot(self.n_committed)] if report else []
        return actions if self._n_missing > 0 else [*actions, *self._end_of_steps()]

    def _snapshot(self, version: int) -> list[Action]:
        """After so many rows there may be a checkpoint of the mean over the replicas."""
        every = self._checkpoint_every_steps
        return (
            self._average_states(version) if every and version % every == 0 and version < self._config.n_steps else []
        )

    def _average_states(self, version: int) -> list[Action]:
        """The replicas of each stage average their states, for a checkpoint of `version`."""
        actions: list[Action] = []
        for stage, row in enumerate(self._plan.placement):
            round = Round(version, state_name(stage), self._view_number)
            actions += self._open_round(round, tuple(sorted(row)))
        return actions

    def _share_done(self, src: int, pipeline: int, step: int) -> list[Action]:
        """A pipeline has done its share. It goes on if others are slower by more than a step each: what they have not
        done by then is done by it."""
        if pipeline not in self._ended and self._n_missing > self._plan.n_pipelines:
            return [Send(src, Continue(step + self._n_missing))]
        return self._end_pipeline(pipeline)

    def _end_of_steps(self) -> list[Action]:
        """The run has done enough steps."""
        return [action for pipeline in range(self._plan.n_pipelines) for action in self._end_pipeline(pipeline)]

    def _end_pipeline(self, pipeline: int) -> list[Action]:
        if pipeline in self._ended:
            return []
        self._ended.add(pipeline)
        return [Send(self._plan.placement[0][pipeline], EndOfSteps())]

    def _on_finished(self, now_s: float, src: int, n_steps: int) -> list[Action]:
        """A replica has done its last local step, so others do not wait for it. After the last of all, the state is
        averaged over the replicas of each stage."""
        self._finished[src] = n_steps
        stage, pipeline = self._plan.seat(src)
        actions: list[Action] = [PipelineEndReport(pipeline, n_steps)] if stage == 0 else []
        actions += self._form(stage, self._matchers[stage].left(now_s, src))
        if len(self._finished) == len(self._plan.peers):
            actions += self._average_states(self._config.n_steps)
        return actions

    # ---------------------------------------------------------------------------------------- the rest of an Agreement

    def start(self, now_s: float) -> list[Action]:
        return []

    def restore(self, steps: Sequence[CommittedStep], n_committed: int) -> None:
        """What an earlier coordinator knew of open groups is lost with it."""
        self._end = EndRun(3, "coordinator: started anew, and with sync.kind groups it cannot take a run over yet")

    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        return self._end

    def cannot_lose(self, peer: int) -> str:
        return NOT_YET

    def refusal(self, command: str) -> str:
        if command == "status":
            return ""
        return f"{command}: with sync.kind groups a run cannot do this yet"

    def durable_form(self, record: Record) -> Any:
        raise AssertionError("no step of the run is recorded")

    def committed(self, now_s: float, record: Record) -> tuple[Message, list[Action]]:
        raise AssertionError("no step of the run is recorded")

    @property
    def records(self) -> tuple[Record, ...]:
        return ()

    def missed(self) -> list[Message]:
        return []

    def leave_view(self, members: Collection[int]) -> Results:
        return ()

    def adopt_view(self, now_s: float, view: View) -> None:
        self._view = view
        self._rows.begin(now_s)

    def roll_back(self) -> None:
        """Not reached: a run that would have to go back ends (`cannot_lose`)."""

    def checkpoint_complete(self) -> None:
        """Nothing depends on it."""
