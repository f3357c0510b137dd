"""The coordinator's account of snapshots: copies of parameters during a run whose replicas may differ.

After some rows of the metrics a held-out loss is measured, or a checkpoint is made, of parameters from which no
replica continues. The keepers of each stage are told to make such a snapshot as soon as they can: the replicas add up
their parameters, a server keeps a copy. Snapshots are made in order, at all stages. Only one held-out loss is measured
at a time, and later snapshots wait for it.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.protocol.round_id import RoundId, RoundKind, Series
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan
from jaxdt.sync.held_out import HeldOutLosses
from jaxdt.sync.scheduling.open_groups import OpenGroups
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.scheduling.replica_states import ReplicaStates
from jaxdt.sync.scheduling.step_budget import StepBudget

Contributions = tuple[tuple[int, int], ...]  # replicas, and the local steps of each


@dataclass(frozen=True)
class Keepers:
    """The peers that make snapshots. `of_stage(stage)`: those of a stage; `checkpoint_kind`: of the rounds of a
    snapshot for a checkpoint."""

    of_stage: Callable[[int], tuple[int, ...]]
    checkpoint_kind: RoundKind


class Snapshots:
    """A part of an agreement, which tells it of rows and of results that are held. `view_number`: of the present view.
    `held_out`: the losses, and the rows that wait for them. `is_held`: no further snapshot is begun."""

    def __init__(
        self,
        config: CoordinatorConfig,
        run: RunConfig,
        plan: Plan,
        pipelines: Pipelines,
        budget: StepBudget,
        groups: OpenGroups,
        keepers: Keepers,
    ):
        self.view_number = 0
        self.is_held = False
        self.held_out = HeldOutLosses(run.train, plan, pipelines)
        self._config = config
        self._checkpoint_every_steps = run.train.checkpoint_every_steps
        self._stages = range(plan.n_stages)
        self._budget = budget
        self._groups = groups
        self._keepers = keepers
        self._promised = 0  # the version of which an operator wants a checkpoint
        self._last: dict[Series, int] = {}  # the last version of which a snapshot was begun
        self._mean_of: dict[tuple[int, int], Contributions] = {}  # version and stage of one for a checkpoint
        self._todo: deque[tuple[RoundKind, int]] = deque()  # and versions: one after the other

    # ------------------------------------------------------------------------------------------------------------ rows

    def after_rows(self, actions: Sequence[ev.Action]) -> list[ev.Action]:
        """The rows among these actions are done, and wait for their held-out losses. Returns the other actions, and the
        next snapshots to begin."""
        rows = [action for action in actions if isinstance(action, StepReport)]
        for row in rows:
            self._after_row(row.step + 1, row)
        others = [action for action in actions if not isinstance(action, StepReport)]
        return [*others, *(self._next() if rows else [])]

    def _after_row(self, version: int, row: StepReport) -> None:
        is_last = version == self._config.n_steps
        if self.held_out.want(version) and not is_last:
            self._todo.append((RoundKind.HELD_OUT, version))
        self._budget.tell(self.held_out.row(row))
        every = self._checkpoint_every_steps
        is_due = version == self._promised or (every and version % every == 0)
        if is_due and not is_last:
            self._todo.append((self._keepers.checkpoint_kind, version))

    def end(self, has_result: bool) -> list[ev.Action]:
        """All replicas that are left have done their last step. Unless the run `has_result` without one, a snapshot of
        all stages is the result."""
        n_steps = self._config.n_steps
        self._todo += [(RoundKind.HELD_OUT, n_steps)] if self.held_out.is_due(n_steps) else []
        self._todo += [] if has_result else [(self._keepers.checkpoint_kind, n_steps)]
        return self._next()

    def on_evaluated(self, message: ev.MeanEvaluated) -> list[ev.Action]:
        return self._after_losses(self.held_out.hear(message))

    def on_mean(
        self, stage: int, round: RoundId, members: Sequence[int], contributions: Contributions
    ) -> list[ev.Action]:
        """A stage has its sum for a held-out loss."""
        return self._after_losses(self.held_out.whole(stage, round, members, contributions))

    def on_lost(self) -> list[ev.Action]:
        return self._after_losses(self.held_out.lose())

    def _after_losses(self, actions: Sequence[ev.Action]) -> list[ev.Action]:
        """A held-out loss may be known, or left out. Rows wait until they are durable."""
        self._budget.tell(action for action in actions if isinstance(action, StepReport))
        return [*(action for action in actions if not isinstance(action, StepReport)), *self._next()]

    def _next(self) -> list[ev.Action]:
        actions: list[ev.Action] = []
        while self._todo and self.held_out.version is None and not self.is_held:
            kind, version = self._todo.popleft()
            if kind == RoundKind.HELD_OUT:
                self.held_out.begin(version)
            actions += self._begin(kind, version)
        return actions

    def _begin(self, kind: RoundKind, version: int) -> list[ev.Action]:
        """Begin a snapshot at all stages, but for those where an earlier coordinator has begun it."""
        actions: list[ev.Action] = []
        for stage in self._stages:
            round = RoundId(kind, stage, version, view=self.view_number)
            if version > self._last.get(round.series, -1):
                self._last[round.series] = version
                actions += self._groups.open(round, self._keepers.of_stage(stage))
        return actions

    def go_on(self) -> list[ev.Action]:
        return self._next()

    def begin_again(self, deserted: Sequence[RoundId]) -> list[ev.Action]:
        """All members of these rounds are lost. The keepers that have come since make the snapshots among them."""
        actions: list[ev.Action] = []
        kinds = (RoundKind.HELD_OUT, self._keepers.checkpoint_kind)
        for round in sorted([round for round in deserted if round.kind in kinds], key=lambda round: round.stage):
            again = RoundId(round.kind, round.stage, round.number, view=self.view_number)
            actions += self._groups.open(again, self._keepers.of_stage(round.stage))
        return actions

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def promise_checkpoint(self, promised: int) -> int:
        """An operator wants a checkpoint. Returns its version: the next row's, or that which an earlier coordinator has
        promised."""
        self._promised = promised or self._budget.n_rows + 1
        return self._promised

    def holds(self, version: int, stage: int, contributions: Contributions) -> None:
        """Note which contributions a stage's snapshot for a checkpoint holds."""
        self._mean_of[version, stage] = contributions

    def mean_of(self, version: int) -> tuple[Contributions, ...]:
        """The contributions of each stage to the checkpoint of `version`. Those to older versions are forgotten, since
        an older checkpoint does not become complete any more."""
        self._mean_of = {place: members for place, members in self._mean_of.items() if place[0] >= version}
        return tuple(self._mean_of.get((version, stage), ()) for stage in self._stages)

    # ----------------------------------------------------------------------------------------- a coordinator's restart

    def restore_held_out(self, states: ReplicaStates) -> set[int]:
        """Restore held-out losses that are not told yet. Returns the versions whose losses were measured before."""
        self._last = states.last
        told = {message.version: message for _, message in states.said if isinstance(message, ev.MeanEvaluated)}
        begun = {round.number for round in states.rounds if round.kind == RoundKind.HELD_OUT}
        over = {round.number for round in states.over if round.kind == RoundKind.HELD_OUT}
        for version in sorted(version for version in begun if version > self._budget.n_told):
            self.held_out.restore(version, version in over, told.get(version))
        states.said = [(src, message) for src, message in states.said if not isinstance(message, ev.MeanEvaluated)]
        return over | told.keys()

    def is_over(self, round: RoundId, measured: set[int]) -> bool:
        """Whether a snapshot of an earlier coordinator is no longer needed: its loss is told, or was `measured`."""
        return round.kind == RoundKind.HELD_OUT and (round.number <= self._budget.n_told or round.number in measured)

    def restore(self) -> list[ev.Action]:
        """Snapshots that were begun at some stages only, and the checkpoints that are due after the rows that were
        told: the last one, and what an operator was promised."""
        kind = self._keepers.checkpoint_kind
        actions: list[ev.Action] = []
        if self.held_out.version is not None:
            actions += self._begin(RoundKind.HELD_OUT, self.held_out.version)
        n_told, every = self._budget.n_told, self._checkpoint_every_steps
        versions = {round.number for round in self._groups.rounds if round.kind == kind}
        if every:
            versions.add(n_told // every * every)
        if self._promised <= n_told:
            versions.add(self._promised)
        limits = range(self._config.start_version + 1, self._config.n_steps)
        self._todo += [(kind, version) for version in sorted(versions) if version in limits]
        return [*actions, *self._next()]
