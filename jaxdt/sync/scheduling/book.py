"""The coordinator's book where replicas may differ: rows of the metrics, pipelines, open rounds, the end of the run.

No step of the run is recorded. The steps of pipelines are counted, in rows. Rounds are open until all of their members
that are left hold the result (jaxdt.sync.scheduling.open_groups). Snapshots, for held-out losses and checkpoints, are
rounds too (jaxdt.sync.scheduling.snapshots). When all replicas that are left have done their last step, the run has its
result, or makes it.

A coordinator that is started again asks the members what they know (jaxdt.sync.scheduling.replica_states), and
continues with the rounds that are open once all have answered.

A scheduler says what else begins and ends rounds: it is a subclass.
"""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxdt.membership.agreement import Agreement, CommittedStep, CountedRows, Decision, EndRun
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import PipelineEndReport
from jaxdt.run.config import RunConfig
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import Plan
from jaxdt.sync.donor_transfer import joining_pipeline
from jaxdt.sync.held_out import HeldOutLosses
from jaxdt.sync.scheduling.open_groups import Disagreement, OpenGroup, OpenGroups
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.scheduling.replica_states import ReplicaStates
from jaxdt.sync.scheduling.snapshots import Keepers, Snapshots
from jaxdt.sync.scheduling.step_budget import StepBudget


class ReplicaBook(Agreement):
    """An agreement, but for what a scheduler adds. `n_committed`: rows of the metrics. `rows_by_step`: a row is one
    step of all pipelines."""

    READS = StepBudget.READS | HeldOutLosses.READS | {ev.ResultHeld, ev.Finished, ev.ReplicaState}
    REPLICAS_MAY_DIFFER: bool = True

    def __init__(
        self, config: CoordinatorConfig, run: RunConfig, plan: Plan, keepers: Keepers, rows_by_step: bool = False
    ):
        self.n_committed = config.start_version
        self._config = config
        self._run = run
        self._plan = plan
        self._view: ev.View | None = None
        self._open = OpenGroups()
        self._states = ReplicaStates()
        self._pipelines = Pipelines(plan)
        self._budget = StepBudget(config, plan, self._pipelines, rows_by_step)
        self._snapshots = Snapshots(config, run, plan, self._pipelines, self._budget, self._open, keepers)
        self._finished: dict[int, int] = {}  # replica -> its local steps in all, when it has done the last one
        self._is_ending = False  # and all that are left have
        self._end: EndRun | None = None

    # ------------------------------------------------------------------------------------------------ of a scheduler

    def _hears(self, src: int) -> bool:
        """Whether what this peer says counts."""
        return self._pipelines.has(src)

    def _hear_more(self, now_s: float, src: int, message: ev.Message) -> list[ev.Action]:
        """Hear a message of the scheduler's own."""
        return []

    @abstractmethod
    def _whole(self, group: OpenGroup) -> list[ev.Action]:
        """All members of a round that are left hold the result."""

    def _form_again(self, actions: list[ev.Action]) -> list[ev.Action]:
        """Rounds continue with other members than first said."""
        return actions

    def _on_gone(self, now_s: float, replicas: Collection[int]) -> list[ev.Action]:
        """These replicas want no more rounds: they are lost, or have done their last step."""
        return []

    def _on_adopted(self, now_s: float, view: ev.View, joins: Sequence[ev.PipelineJoin]) -> list[ev.Action]:
        """A view is durable. With it these pipelines are whole again."""
        return []

    @abstractmethod
    def _end_run(self) -> list[ev.Action]:
        """All replicas that are left have done their last step."""

    def _on_restored(self, group: OpenGroup) -> list[ev.Action]:
        """An earlier coordinator has opened this round."""
        return []

    # --------------------------------------------------------------------------------------------------- what it hears

    def hear(self, now_s: float, src: int, message: ev.Message, admissions: Mapping[int, int]) -> list[ev.Action]:
        if not self._hears(src) and not isinstance(message, ev.StepDone):
            return []
        if self._states.is_asking:
            self._states.hear(src, message)
            return self._go_on(now_s)
        match message:
            case ev.ResultHeld():
                return self._on_held(src, message)
            case ev.Finished(n_steps):
                return self._on_finished(now_s, src, n_steps)
            case ev.MeanEvaluated():
                return self._snapshots.on_evaluated(message)
            case ev.StepDone(step):
                return [*self._pipelines.did([src], [step + 1]), *self._count(now_s, src, message)]
            case _ if type(message) in StepBudget.READS:
                return self._count(now_s, src, message)
            case _:
                return self._hear_more(now_s, src, message)

    def _on_held(self, src: int, held: ev.ResultHeld) -> list[ev.Action]:
        try:
            told, group = self._open.hear(src, held)
        except Disagreement as disagreement:
            self._end = EndRun(ExitCode.LOST, str(disagreement))
            return []
        return [*self._form_again(told), *(self._whole(group) if group else [])]

    def _count(self, now_s: float, src: int, message: ev.Message) -> list[ev.Action]:
        """A step is done, or cannot begin yet. After a row of steps a snapshot may be due."""
        actions = self._budget.hear(now_s, src, message)
        self.n_committed = self._budget.n_rows
        return self._snapshots.after_rows(actions)

    def _on_finished(self, now_s: float, src: int, n_steps: int) -> list[ev.Action]:
        self._finished[src] = n_steps
        self._pipelines.did([src], [n_steps])
        stage, pipeline = self._plan.seat(src)
        reports: list[ev.Action] = [PipelineEndReport(pipeline, n_steps)] if stage == 0 else []
        return [*reports, *self._on_gone(now_s, [src]), *self._end_steps()]

    def _end_steps(self) -> list[ev.Action]:
        left = {peer for pipeline in self._pipelines.whole for peer in self._pipelines.peers(pipeline)}
        if self._is_ending or self._pipelines.joining is not None or not left <= self._finished.keys():
            return []
        self._is_ending = True
        return self._end_run()

    # --------------------------------------------------------------------------------------------- pipelines that leave

    def _lose(self, now_s: float, pipelines: Iterable[int]) -> list[ev.Action]:
        """Pipelines are broken. The run no longer waits for them, and others do what they left undone."""
        lost_pipelines = list(pipelines)
        first = self._plan.placement[0]
        lost = {peer for pipeline in lost_pipelines for peer in self._pipelines.peers(pipeline)}
        actions: list[ev.Action] = [
            *self._pipelines.ends(pipeline for pipeline in lost_pipelines if first[pipeline] not in self._finished)
        ]
        if self._states.is_asking:
            self._states.lose(lost)
            return [*actions, *self._on_gone(now_s, lost), *self._go_on(now_s)]
        told, whole, deserted = self._open.lose(lost)
        actions += [*self._form_again(told), *self._snapshots.begin_again(deserted), *self._on_gone(now_s, lost)]
        for group in whole:
            actions += self._whole(group)
        return [*actions, *self._snapshots.on_lost(), *self._end_steps()]

    # ----------------------------------------------------------------------------------------- a coordinator's restart

    def restore(self, view: ev.View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        self._view = view
        self._budget.restore(rows, view.joins)
        self.n_committed = self._budget.n_rows
        broken = self._pipelines.restore(view, self._budget.n_steps)
        self._on_gone(0.0, [peer for pipeline in broken for peer in self._pipelines.peers(pipeline)])
        self._states.ask(filter(self._hears, self._plan.peers))

    def _go_on(self, now_s: float) -> list[ev.Action]:
        """After a restart, once all members have answered: then counts what they say again."""
        states = self._states
        if states.is_asking:
            return []
        for peer, answer in states.answers.items():
            stage, pipeline = self._plan.seat(peer)
            if stage == 0 and answer.n_steps is not None:
                self._budget.on_ended(pipeline)
        actions = [*self._restore_rounds(), *self._snapshots.restore()]
        for src, message in states.said:
            actions += self.hear(now_s, src, message, {})
        self._states = ReplicaStates()
        return [*actions, *self._budget.end_if_enough()]

    def _restore_rounds(self) -> list[ev.Action]:
        """Rounds that are open continue. Their members that are lost meanwhile are left out, as at other times."""
        states, actions = self._states, list[ev.Action]()
        measured = self._snapshots.restore_held_out(states)
        for group in states.open_groups():
            if self._snapshots.is_over(group.round, measured):
                group.waited_for.intersection_update(states.answers)
                actions += group.closed_messages()
                continue
            actions += self._on_restored(group)
            self._open.restore(group)
        for src, held in states.take(ev.ResultHeld):
            actions += self._on_held(src, held)
        told, whole, deserted = self._open.lose(set(self._plan.peers) - states.answers.keys(), self._admissions)
        actions += [*told, *self._snapshots.begin_again(deserted)]
        for group in whole:
            actions += self._whole(group)
        return [*actions, *self._open.tell_again()]

    @property
    def _admissions(self) -> Mapping[int, int]:
        """Of the members, where a round's view says which admission of them is meant."""
        return {member.peer: member.admission for member in self._view.members} if self._view else {}

    # ---------------------------------------------------------------------------------------- the rest of an Agreement

    def start(self, now_s: float) -> list[ev.Action]:
        return [*self._budget.start(now_s), *self._pipelines.ends_of_broken()]

    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        return self._end or self._budget.end or self._budget.untold(self._n_groups_formed)

    @property
    def _n_groups_formed(self) -> tuple[tuple[int, ...], ...]:
        return ()

    def on_durable(self, now_s: float, value: CountedRows) -> tuple[ev.Message, list[ev.Action]]:
        return ev.StepsCounted(value.n_steps), [*self._budget.on_told(value)]

    @property
    def is_asking(self) -> bool:
        return self._states.is_asking

    def has_unreported_rows(self, n_rows: int) -> bool:
        return self._budget.n_told < min(n_rows, self._budget.n_rows)

    def on_pause(self, until_s: float) -> None:
        self._budget.rows.on_paused(until_s)

    def cannot_lose(self, peer: int, present: Collection[int]) -> str:
        return self._pipelines.cannot_lose(peer, present)

    def leave_with(self, peer: int) -> Collection[int]:
        return self._pipelines.beside(peer)

    def refusal(self, command: str) -> str:
        if command in ("status", "checkpoint", "stop"):
            return ""
        return f"{command}: with sync.kind {self._run.sync.kind} a run cannot do this yet"

    def promise_checkpoint(self, promised: int = 0) -> int | None:
        return self._snapshots.promise_checkpoint(promised)

    def mean_of(self, version: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return self._snapshots.mean_of(version)

    def missed_messages(self) -> list[ev.Message]:
        return self._states.missed()

    def on_view(self, now_s: float, view: ev.View) -> list[ev.Action]:
        """Pipelines that are lost leave, and one that has come back is whole. If the one that joins is lost, the run
        may end without it."""
        before, self._view = self._view, view
        if before is None:
            self._budget.rows.begin(now_s)
        self._pipelines.joining = joining_pipeline(self._plan, view)
        actions = self._on_adopted(now_s, view, [join for join in view.joins if before and join not in before.joins])
        broken = self._pipelines.keep(view.by_peer.keys() - set(view.joining))
        actions += self._lose(now_s, broken) if broken else []
        if self._states.is_asking:
            return actions
        return [*actions, *self._snapshots.go_on(), *self._end_steps()]
