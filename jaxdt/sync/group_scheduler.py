"""The scheduler of averaging groups: the coordinator's part where replicas may differ.

It hears which replicas want a group, asks the matcher of their stage, and tells the members of each group that forms.
It counts the pipelines' steps: as many of them as there are pipelines make one row of the metrics, and the run has
enough of them when it has train.steps rows. A pipeline that has done its share goes on while others are slower. After
the last step it has the replicas of each stage average their whole state. When a pipeline is lost, the others go on
and do its share too. When all its peers are candidates again it comes back, with the states of another one
(jaxdt.sync.returning), and is like any other from the view on in which all of them have these.

The groups, with the local steps of their members, are reported: from this log one process can do the run again.

One that is started again asks the members what they know (jaxdt.sync.scheduling.replica_states), and forms no group
before all have answered. It counts groups on behind the last that is known, and goes on with those that are open.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from jaxdt.membership.agreement import (
    NO_INTAKE,
    TIMER,
    CommittedStep,
    CountedRows,
    Decision,
    EndRun,
    Intake,
    Results,
)
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport, PipelineEndReport, PipelineJoinReport, StateMeanReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import STASH, Plan
from jaxdt.sync.held_out import HeldOutLosses
from jaxdt.sync.matching.base import AveragingGroup, Matched, Matcher, matcher_entry
from jaxdt.sync.matching.token import EnforcementToken
from jaxdt.sync.returning.donors import donor_pipeline, joining_pipeline
from jaxdt.sync.scheduling.counted_steps import CountedSteps
from jaxdt.sync.scheduling.open_groups import Disagreement, OpenGroup, OpenGroups
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.scheduling.replica_states import ReplicaStates, restored_report
from jaxdt.sync.scheduling.snapshots import Keepers, Snapshots
from jaxdt.sync.scheduling.step_budget import StepBudget


def no_return(run: RunConfig, plan: Plan) -> str:
    """One line that says why a lost pipeline does not come back; '' if it may."""
    if plan.schedule == STASH:
        return f"plan.schedule {STASH}: a donor's stages are at unlike steps, and cannot wait at one yet"
    return ""


def _join_report(join: ev.PipelineJoin) -> PipelineJoinReport:
    return PipelineJoinReport(join.pipeline, join.donor, join.step, join.admission)


class GroupScheduler(CountedSteps):
    """The agreement of `sync.kind = "groups"`. `n_committed`: rows of the metrics."""

    READS = StepBudget.READS | HeldOutLosses.READS | {ev.WantsGroup, ev.ResultHeld, ev.Finished, ev.ReplicaState}
    HEARS_ACROSS_VIEWS: bool = True
    COUNTS_ROWS: bool = True
    HAS_FIXED_PLACES: bool = True

    def __init__(self, config: CoordinatorConfig, run: RunConfig, plan: Plan):
        self.n_committed = config.start_version
        self._config = config
        self._plan = plan
        self._has_outer = run.sync.groups.outer != "none"
        self._view: ev.View | None = None
        token, groups = EnforcementToken(), run.sync.groups
        build = matcher_entry(groups.match).build
        self._n_fragments = groups.fragments
        self._matchers: list[list[Matcher]] = [  # of each stage, one for each fragment
            [build(groups, stage, row, token) for _ in range(groups.fragments)]
            for stage, row in enumerate(plan.placement)
        ]
        self._wanted: dict[int, int] = {}  # replica that wants a group -> local steps that it had done
        self._open = OpenGroups()
        self._n_groups = [[0] * groups.fragments for _ in plan.stages]
        self._n_groups_before = [[0] * groups.fragments for _ in plan.stages]  # of earlier coordinators
        self._states = ReplicaStates()
        self._pipelines = Pipelines(plan)
        self._budget = StepBudget(config, plan, self._pipelines, matcher_entry(run.sync.groups.match).keeps_step)
        keepers = Keepers(lambda stage: tuple(sorted(self._pipelines.replicas(stage))), RoundKind.STATE)
        self._snapshots = Snapshots(config, run, plan, self._pipelines, self._budget, self._open, keepers)
        self._finished: set[int] = set()  # replicas that have done their last local step
        self._is_ending = False  # and all that are left have
        self.NO_RETURN = no_return(run, plan)
        self._end: EndRun | None = None

    # --------------------------------------------------------------------------------------------------- what it hears

    def hear(self, now_s: float, src: int, message: ev.Message, admissions: Mapping[int, int]) -> list[ev.Action]:
        if not self._pipelines.has(src) and not isinstance(message, ev.StepDone):
            return []
        if self._states.is_asking:
            self._states.hear(src, message)
            return self._go_on(now_s)
        stage, _ = self._plan.seat(src)
        match message:
            case ev.WantsGroup(step, fragment) if fragment < self._n_fragments:
                self._wanted[src] = step
                self._pipelines.did([src], [step])
                return self._form(stage, fragment, self._matchers[stage][fragment].ready(now_s, src, step))
            case ev.ResultHeld():
                return self._held(src, message)
            case ev.Finished(n_steps):
                return self._on_finished(now_s, src, n_steps)
            case ev.MeanEvaluated():
                return self._snapshots.evaluated(message)
            case ev.StepDone(step):
                return [*self._pipelines.did([src], [step + 1]), *self._count(now_s, src, message)]
            case _:
                return self._count(now_s, src, message) if type(message) in StepBudget.READS else []

    def woke(self, now_s: float, tag: str) -> list[ev.Action]:
        stage, fragment, matcher_tag = map(int, tag.removeprefix(TIMER).split())
        return self._form(stage, fragment, self._matchers[stage][fragment].timer(now_s, matcher_tag))

    def _form(self, stage: int, fragment: int, matched: Matched) -> list[ev.Action]:
        """The groups that the matcher of a fragment has formed, and its timer."""
        actions = [action for group in matched.groups for action in self._formed(stage, fragment, group)]
        if matched.timer:
            at_s, tag = matched.timer
            actions.append(ev.WakeAt(at_s, f"{TIMER}{stage} {fragment} {tag}"))
        return actions

    def _formed(self, stage: int, fragment: int, group: AveragingGroup) -> list[ev.Action]:
        k = self._n_groups[stage][fragment]
        self._n_groups[stage][fragment] += 1
        self._budget.rows.formed(group)
        steps = [self._wanted.pop(member) for member in group.members]
        members = list(group.members)
        view = self._view_number
        report = GroupReport(stage, k, members, steps, group.cause, group.enforced, group.suspended, fragment, view)
        round = RoundId(RoundKind.MEAN, stage, k, fragment, view=view)
        if len(members) == 1 and not self._has_outer:  # it goes on at once
            return [report, ev.Send(members[0], ev.GroupFormed(round, group.members, steps=tuple(steps)))]
        return self._open.open(round, group.members, report)

    @property
    def _view_number(self) -> int:
        assert self._view is not None  # members speak in a view
        return self._view.number

    def _held(self, src: int, held: ev.ResultHeld) -> list[ev.Action]:
        try:
            told, group = self._open.hear(src, held)
        except Disagreement as disagreement:
            self._end = EndRun(ExitCode.LOST, str(disagreement))
            return []
        return [*self._formed_again(told), *(self._whole(group) if group else [])]

    def _formed_again(self, actions: list[ev.Action]) -> list[ev.Action]:
        """Groups average with other members than first said."""
        for action in actions:
            if isinstance(action, GroupReport):
                number = action.k - self._n_groups_before[action.stage][action.fragment]
                self._matchers[action.stage][action.fragment].failed(number, tuple(action.members))
        return actions

    def _whole(self, group: OpenGroup) -> list[ev.Action]:
        """All members that are left hold the result."""
        round, members, steps = group.round, group.members, group.member_steps
        stage, _ = self._plan.seat(members[0])
        reports: list[ev.Action] = [*self._pipelines.did(members, steps)]
        if round.kind == RoundKind.HELD_OUT:
            contributions = tuple(zip(members, steps, strict=True))
            return [*reports, *self._snapshots.held_out.whole(stage, round, members, contributions)]
        if round.kind == RoundKind.STATE:
            self._snapshots.holds(round.number, stage, tuple(zip(members, steps, strict=True)))
            reports.append(StateMeanReport(stage, round.number, list(members), list(steps), round.view))
        return [*reports, *group.closed()]

    # --------------------------------------------------------------------------------------------- pipelines that leave

    def _lose(self, now_s: float, pipelines: Sequence[int]) -> list[ev.Action]:
        """Pipelines are not whole any more. Nobody waits for them, and what they have left undone others do."""
        lost = {peer for pipeline in pipelines for peer in self._pipelines.peers(pipeline)}
        for peer in lost:
            self._wanted.pop(peer, None)
        actions: list[ev.Action] = [*self._pipelines.ends(p for p in pipelines if not self._has_finished(p))]
        if self._states.is_asking:
            self._states.lose(lost)
            for stage in range(self._plan.n_stages):
                actions += self._leave(now_s, stage, sorted(lost.intersection(self._plan.placement[stage])))
            return [*actions, *self._go_on(now_s)]
        told, whole, deserted = self._open.lose(lost)
        actions += [*self._formed_again(told), *self._snapshots.begin_again(deserted)]
        for stage in range(self._plan.n_stages):
            actions += self._leave(now_s, stage, sorted(lost.intersection(self._plan.placement[stage])))
        for group in whole:
            actions += self._whole(group)
        return [*actions, *self._snapshots.held_out.lose(), *self._end_steps()]

    def _has_finished(self, pipeline: int) -> bool:
        """Whether the last step of a pipeline is reported."""
        return self._plan.placement[0][pipeline] in self._finished

    # ------------------------------------------------------------------------------------------------ steps of the run

    def _count(self, now_s: float, src: int, message: ev.Message) -> list[ev.Action]:
        """A step is done, or cannot begin yet. A row of steps may be the last one before a checkpoint."""
        actions = self._budget.hear(now_s, src, message)
        self.n_committed = self._budget.n_rows
        return self._snapshots.after_rows(actions)

    def _on_finished(self, now_s: float, src: int, n_steps: int) -> list[ev.Action]:
        """A replica has done its last local step, so others do not wait for it. After the last of all, the state is
        averaged over the replicas of each stage."""
        self._finished.add(src)
        self._pipelines.did([src], [n_steps])
        stage, pipeline = self._plan.seat(src)
        actions: list[ev.Action] = [PipelineEndReport(pipeline, n_steps)] if stage == 0 else []
        return [*actions, *self._leave(now_s, stage, [src]), *self._end_steps()]

    def _leave(self, now_s: float, stage: int, replicas: Sequence[int]) -> list[ev.Action]:
        """Nobody waits for these replicas of a stage any more."""
        actions: list[ev.Action] = []
        for fragment, matcher in enumerate(self._matchers[stage]):
            actions += self._form(stage, fragment, matcher.left(now_s, *replicas))
        return actions

    def _end_steps(self) -> list[ev.Action]:
        """After the last step of all that are left comes the mean that is the run's result."""
        left = {peer for pipeline in self._pipelines.whole for peer in self._pipelines.peers(pipeline)}
        if self._is_ending or self._pipelines.joining is not None or not left <= self._finished:
            return []
        self._is_ending = True
        return self._snapshots.end(has_result=False)

    # ------------------------------------------------------------------------------------------- pipelines that return

    def intake(self, candidates: Collection[int], states: Mapping[int, ev.StateName]) -> Intake:
        """A pipeline whose peers are all candidates joins, and is whole once all of them hold the states of one moment
        of the present donor. The run does not end meanwhile."""
        view, pipelines = self._view, self._pipelines
        if view is None or self._states.is_asking or self.NO_RETURN:
            return NO_INTAKE
        if pipelines.joining is not None:
            return self._joined(view, pipelines.joining, states)
        returning = pipelines.returning(candidates)
        if returning is None or self._is_ending or self._budget.n_missing <= 0:
            return NO_INTAKE
        pipelines.joining = returning
        return Intake(joining=frozenset(pipelines.peers(returning)), first_step=self._config.n_steps + 1)

    def _joined(self, view: ev.View, pipeline: int, states: Mapping[int, ev.StateName]) -> Intake:
        """The intake of a joining pipeline with the next view, if its states are there."""
        peers, donor = self._pipelines.peers(pipeline), donor_pipeline(self._plan, view)
        if donor is None:
            return NO_INTAKE
        donors = self._pipelines.peers(donor)
        held = [states.get(peer) for peer in peers]
        steps = {state.version for state, peer in zip(held, donors, strict=True) if state and state.donor == peer}
        if len(steps) != 1 or any(not state or state.donor != peer for state, peer in zip(held, donors, strict=True)):
            return NO_INTAKE
        self._snapshots.is_held = True  # none is begun without it from now on
        join = ev.PipelineJoin(pipeline, donor, steps.pop(), view.by_peer[peers[0]].admission, self._budget.n_rows)
        joins = (*(other for other in view.joins if other.pipeline != pipeline), join)
        return Intake(joined=frozenset(peers), joins=joins)

    def _take_in(self, now_s: float, join: ev.PipelineJoin) -> list[ev.Action]:
        """A pipeline is whole again: it averages and counts like the others."""
        peers, donors = self._pipelines.peers(join.pipeline), self._pipelines.peers(join.donor)
        self._pipelines.joined(join)
        self._finished.difference_update(peers)
        actions: list[ev.Action] = [_join_report(join)]
        for stage, (peer, donor) in enumerate(zip(peers, donors, strict=True)):
            for fragment, matcher in enumerate(self._matchers[stage]):
                actions += self._form(stage, fragment, matcher.joined(now_s, peer, donor))
        return [*actions, *self._budget.joined(join)]

    # ----------------------------------------------------------------------------------------- a coordinator's restart

    def restore(self, view: ev.View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        self._view = view
        self._snapshots.view_number = view.number
        self._budget.restore(rows, view.joins)
        self.n_committed = self._budget.n_rows
        if rows:
            self._n_groups = [list(of_stage) for of_stage in rows.n_groups]
        times = [row.step_s for row in rows.new if math.isfinite(row.step_s)] if rows else []
        for matcher in (matcher for of_stage in self._matchers for matcher in of_stage):
            matcher.restarted(times[-1] if times else self._config.deadline_floor_s)
        for pipeline in self._pipelines.restore(view, self._budget.n_steps):
            for stage, peer in enumerate(self._pipelines.peers(pipeline)):
                self._leave(0.0, stage, [peer])  # nobody waits for a group yet
        self._states.ask(peer for pipeline in self._pipelines.whole for peer in self._pipelines.peers(pipeline))

    def restore_rounds(self) -> list[ev.Action]:
        """Groups that are open go on, and so do snapshots."""
        states = self._states
        for stage, of_stage in enumerate(self._n_groups):
            for fragment, n_groups in enumerate(of_stage):
                last = states.last.get(RoundId(RoundKind.MEAN, stage, 0, fragment).series, -1)
                of_stage[fragment] = max(n_groups, last + 1)
        self._n_groups_before = [list(of_stage) for of_stage in self._n_groups]
        return [*self._restore_groups(), *self._restore_snapshots()]

    def _restore_groups(self) -> list[ev.Action]:
        """The groups that are open. Their members that are lost meanwhile are left out, as at other times."""
        states, actions = self._states, list[ev.Action]()
        measured = self._snapshots.restore_held_out(states)
        for group in states.open_groups():
            stage, _ = self._plan.seat(group.members[0])
            if self._snapshots.is_over(group.round, measured):
                group.waited_for.intersection_update(states.answers)
                actions += group.closed()
                continue
            if group.round.kind == RoundKind.MEAN:
                group.report = restored_report(group, stage, group.round.fragment)
                states.take_wanted(group, group.report.fragment)
                actions.append(group.report)
            self._open.restore(group)
        for src, held in states.take(ev.ResultHeld):
            actions += self._held(src, held)
        admissions = {member.peer: member.admission for member in self._view.members} if self._view else {}
        told, whole, deserted = self._open.lose(set(self._plan.peers) - states.answers.keys(), admissions)
        actions += [*told, *self._snapshots.begin_again(deserted)]
        for group in whole:
            actions += self._whole(group)
        return [*actions, *self._open.tell_again()]

    def _restore_snapshots(self) -> list[ev.Action]:
        for round, known in self._states.over.items():
            stage, _ = self._plan.seat(known.members[0])
            if round.kind == RoundKind.STATE:
                self._snapshots.holds(round.number, stage, tuple(zip(known.members, known.steps, strict=True)))
        return self._snapshots.restore()

    # ---------------------------------------------------------------------------------------- the rest of an Agreement

    def start(self, now_s: float) -> list[ev.Action]:
        joins = self._view.joins if self._view else ()
        returns = map(_join_report, joins)
        return [*self._budget.start(now_s), *returns, *self._pipelines.ends_of_broken()]

    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        return self._end or self._budget.end or self._budget.untold(tuple(map(tuple, self._n_groups)))

    def paused(self, until_s: float) -> None:
        self._budget.rows.paused(until_s)

    def cannot_lose(self, peer: int, present: Collection[int]) -> str:
        return self._pipelines.cannot_lose(peer, present)

    def leave_with(self, peer: int) -> Collection[int]:
        return self._pipelines.beside(peer)

    def refusal(self, command: str) -> str:
        if command in ("status", "checkpoint", "stop"):
            return ""
        return f"{command}: with sync.kind groups a run cannot do this yet"

    def promise_checkpoint(self, promised: int = 0) -> int | None:
        return self._snapshots.promise_checkpoint(promised)

    def mean_of(self, version: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return self._snapshots.mean_of(version)

    def missed(self) -> list[ev.Message]:
        return self._states.missed()

    def leave_view(self, members: Collection[int]) -> Results:
        return ()

    def adopt_view(self, now_s: float, view: ev.View) -> list[ev.Action]:
        """Pipelines that are lost leave, and one that has come back is whole. If the one that joins is lost, the run
        may end without it."""
        before, self._view = self._view, view
        self._snapshots.view_number = view.number
        if before is None:
            self._budget.rows.begin(now_s)
        self._snapshots.is_held = False
        self._pipelines.joining = joining_pipeline(self._plan, view)
        new = [join for join in view.joins if before and join not in before.joins]
        actions = [action for join in new for action in self._take_in(now_s, join)]
        broken = self._pipelines.keep(view.by_peer.keys() - set(view.joining))
        actions += self._lose(now_s, broken) if broken else []
        if self._states.is_asking:
            return actions
        return [*actions, *self._snapshots.go_on(), *self._end_steps()]

    def roll_back(self) -> None:
        """Not reached: a run that would have to go back ends (`cannot_lose`)."""

    def checkpoint_complete(self, version: int) -> list[ev.Action]:
        return []  # nothing depends on it
