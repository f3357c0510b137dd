"""The book where replicas average among themselves: groups, snapshots of states, and pipelines that come back.

A replica says that it wants a group, and waits. Which groups form says a scheduler, the subclass. The groups, with the
local steps of their members, are reported: from this log one process can do the run again. After the last step the
replicas of each stage average their whole state: that is the result of the run.

When a pipeline is lost, the others continue and do its share too. When all its peers are candidates again it comes
back, with the states of another one (jaxdt.sync.donor_transfer), and is like any other from the view on in which all of
them have these.

A coordinator that is started again forms no group before all members have answered. It counts groups on behind the last
one that is known.
"""

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence

from jaxdt.membership.agreement import (
    NO_RETURNING_MEMBERS,
    CommittedStep,
    CountedRows,
    ReturningMembers,
)
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import GroupReport, PipelineJoinReport, StateMeanReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan
from jaxdt.sync.donor_transfer import donor_pipeline
from jaxdt.sync.matching.base import AveragingGroup
from jaxdt.sync.scheduling.book import ReplicaBook
from jaxdt.sync.scheduling.open_groups import OpenGroup
from jaxdt.sync.scheduling.replica_states import restored_report
from jaxdt.sync.scheduling.snapshots import Keepers


def _join_report(join: ev.PipelineJoin) -> PipelineJoinReport:
    return PipelineJoinReport(join.pipeline, join.donor, join.step, join.admission)


class GroupBook(ReplicaBook):
    """An agreement, but for what a scheduler says. `n_fragments`: of each stage, each with groups of its own.
    `averages_alone`: the mean of one replica is more than this replica's parameters."""

    READS = ReplicaBook.READS | {ev.WantsGroup}

    def __init__(
        self,
        config: CoordinatorConfig,
        run: RunConfig,
        plan: Plan,
        *,
        n_fragments: int = 1,
        averages_alone: bool = False,
        rows_by_step: bool = False,
    ):
        keepers = Keepers(lambda stage: tuple(sorted(self._pipelines.replicas(stage))), RoundKind.STATE)
        super().__init__(config, run, plan, keepers, rows_by_step)
        self._n_fragments = n_fragments
        self._averages_alone = averages_alone
        self._waiting: dict[int, int] = {}  # replica that wants a group -> local steps that it had done
        self._n_groups = [[0] * n_fragments for _ in plan.stages]
        self._n_groups_before = [[0] * n_fragments for _ in plan.stages]  # of earlier coordinators

    # ------------------------------------------------------------------------------------------------ of a scheduler

    @abstractmethod
    def _ready(self, now_s: float, src: int, stage: int, fragment: int) -> list[ev.Action]:
        """A replica wants a group, and waits."""

    def _on_left(self, now_s: float, stage: int, replicas: Sequence[int]) -> list[ev.Action]:
        """These replicas of a stage want no more groups."""
        return []

    def _came(self, now_s: float, stage: int, peer: int, donor: int) -> list[ev.Action]:
        """A replica is here, with the parameters of another one."""
        return []

    # --------------------------------------------------------------------------------------------------------- groups

    def _hear_more(self, now_s: float, src: int, message: ev.Message) -> list[ev.Action]:
        match message:
            case ev.WantsGroup(step, fragment) if fragment < self._n_fragments:
                stage, _ = self._plan.seat(src)
                self._waiting[src] = step
                self._pipelines.did([src], [step])
                return self._ready(now_s, src, stage, fragment)
            case _:
                return []

    def _on_formed(self, stage: int, fragment: int, group: AveragingGroup) -> list[ev.Action]:
        """Members that want a group average with one another."""
        k = self._n_groups[stage][fragment]
        self._n_groups[stage][fragment] += 1
        self._budget.rows.on_formed(group)
        steps = [self._waiting.pop(member) for member in group.members]
        members = list(group.members)
        view = self._view_number
        report = GroupReport(stage, k, members, steps, group.cause, group.enforced, group.suspended, fragment, view)
        round = RoundId(RoundKind.MEAN, stage, k, fragment, view=view)
        if len(members) == 1 and not self._averages_alone:  # it continues at once
            return [report, ev.Send(members[0], ev.GroupFormed(round, group.members, steps=tuple(steps)))]
        return self._open.open(round, group.members, report)

    @property
    def _view_number(self) -> int:
        assert self._view is not None  # members speak in a view
        return self._view.number

    def _whole(self, group: OpenGroup) -> list[ev.Action]:
        """All members that are left hold the result."""
        round, members, steps = group.round, group.members, group.member_steps
        stage, _ = self._plan.seat(members[0])
        reports: list[ev.Action] = [*self._pipelines.did(members, steps)]
        if round.kind == RoundKind.HELD_OUT:
            contributions = tuple(zip(members, steps, strict=True))
            return [*reports, *self._snapshots.on_mean(stage, round, members, contributions)]
        if round.kind == RoundKind.STATE:
            self._snapshots.holds(round.number, stage, tuple(zip(members, steps, strict=True)))
            reports.append(StateMeanReport(stage, round.number, list(members), list(steps), round.view))
        return [*reports, *group.closed_messages()]

    def _on_gone(self, now_s: float, replicas: Collection[int]) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for peer in replicas:
            self._waiting.pop(peer, None)
        for stage, row in enumerate(self._plan.placement):
            if gone := sorted(set(replicas).intersection(row)):
                actions += self._on_left(now_s, stage, gone)
        return actions

    def _end_run(self) -> list[ev.Action]:
        """The mean of all states is the run's result."""
        return self._snapshots.end(has_result=False)

    # ------------------------------------------------------------------------------------------- pipelines that return

    def returning_members(self, candidates: Collection[int], states: Mapping[int, ev.StateName]) -> ReturningMembers:
        """A pipeline whose peers are all candidates joins, and is whole once all of them hold the states of one moment
        of the present donor. The run does not end meanwhile."""
        view, pipelines = self._view, self._pipelines
        if view is None or self._states.is_asking or self.NO_RETURN:
            return NO_RETURNING_MEMBERS
        if pipelines.joining is not None:
            return self._members_with_state(view, pipelines.joining, states)
        returning = pipelines.returning(candidates)
        if returning is None or self._is_ending or self._budget.n_missing <= 0:
            return NO_RETURNING_MEMBERS
        pipelines.joining = returning
        return ReturningMembers(joining=frozenset(pipelines.peers(returning)), first_step=self._config.n_steps + 1)

    def _members_with_state(self, view: ev.View, pipeline: int, states: Mapping[int, ev.StateName]) -> ReturningMembers:
        """The members of a joining pipeline that the next view admits, if their states are there."""
        peers, donor = self._pipelines.peers(pipeline), donor_pipeline(self._plan, view)
        if donor is None:
            return NO_RETURNING_MEMBERS
        donors = self._pipelines.peers(donor)
        held = [states.get(peer) for peer in peers]
        steps = {state.version for state, peer in zip(held, donors, strict=True) if state and state.donor == peer}
        if len(steps) != 1 or any(not state or state.donor != peer for state, peer in zip(held, donors, strict=True)):
            return NO_RETURNING_MEMBERS
        self._snapshots.is_held = True  # none is begun without it from now on
        join = ev.PipelineJoin(pipeline, donor, steps.pop(), view.by_peer[peers[0]].admission, self._budget.n_rows)
        joins = (*(other for other in view.joins if other.pipeline != pipeline), join)
        return ReturningMembers(joined=frozenset(peers), joins=joins)

    def _on_adopted(self, now_s: float, view: ev.View, joins: Sequence[ev.PipelineJoin]) -> list[ev.Action]:
        self._snapshots.view_number = view.number
        self._snapshots.is_held = False
        return [action for join in joins for action in self._take_in(now_s, join)]

    def _take_in(self, now_s: float, join: ev.PipelineJoin) -> list[ev.Action]:
        """A pipeline is whole again: it averages and counts like the others."""
        peers, donors = self._pipelines.peers(join.pipeline), self._pipelines.peers(join.donor)
        self._pipelines.on_joined(join)
        for peer in peers:
            self._finished.pop(peer, None)
        actions: list[ev.Action] = [_join_report(join)]
        for stage, (peer, donor) in enumerate(zip(peers, donors, strict=True)):
            actions += self._came(now_s, stage, peer, donor)
        return [*actions, *self._budget.on_joined(join)]

    # ----------------------------------------------------------------------------------------- a coordinator's restart

    def restore(self, view: ev.View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        self._snapshots.view_number = view.number
        if rows:
            self._n_groups = [list(of_stage) for of_stage in rows.n_groups]
        super().restore(view, steps, rows)

    def _restore_rounds(self) -> list[ev.Action]:
        """Groups are counted on behind the last one that is known."""
        states = self._states
        for stage, of_stage in enumerate(self._n_groups):
            for fragment, n_groups in enumerate(of_stage):
                last = states.last.get(RoundId(RoundKind.MEAN, stage, 0, fragment).series, -1)
                of_stage[fragment] = max(n_groups, last + 1)
        self._n_groups_before = [list(of_stage) for of_stage in self._n_groups]
        actions = super()._restore_rounds()
        for round, known in states.over.items():
            if round.kind == RoundKind.STATE:
                self._snapshots.holds(round.number, round.stage, tuple(zip(known.members, known.steps, strict=True)))
        return actions

    def _on_restored(self, group: OpenGroup) -> list[ev.Action]:
        round = group.round
        if round.kind != RoundKind.MEAN:
            return []
        group.report = restored_report(group, round.stage, round.fragment)
        self._states.take_wanted(group, round.fragment)
        return [group.report]

    def start(self, now_s: float) -> list[ev.Action]:
        joins = self._view.joins if self._view else ()
        return [*self._budget.start(now_s), *map(_join_report, joins), *self._pipelines.ends_of_broken()]

    @property
    def _n_groups_formed(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self._n_groups))
