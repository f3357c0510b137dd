"""The coordinator's part where servers hold the parameters: rows of the metrics, held-out losses and checkpoints, and
the end of the run.

Workers and servers agree among themselves on what is pushed and pulled (jaxdt.sync.server), and on what a snapshot
holds. The coordinator says when a snapshot is made. For a checkpoint it tells the least worker of each stage to keep
it, and another one when that is lost; the servers hold it until the checkpoint, or a later one, is complete."""

from collections.abc import Collection, Mapping, Sequence

from jaxdt.membership.agreement import CommittedStep, CountedRows, Decision, Results
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import PipelineEndReport, StateMeanReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan
from jaxdt.sync.held_out import HeldOutLosses
from jaxdt.sync.scheduling.counted_steps import CountedSteps
from jaxdt.sync.scheduling.open_groups import OpenGroup, OpenGroups
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.scheduling.replica_states import ReplicaStates
from jaxdt.sync.scheduling.snapshots import Keepers, Snapshots
from jaxdt.sync.scheduling.step_budget import StepBudget

NO_SERVER = "it is the server that holds its stage's parameters"


class ServerAgreement(CountedSteps):
    """The agreement of `sync.kind = "server"`. `n_committed`: rows of the metrics."""

    READS = StepBudget.READS | HeldOutLosses.READS | {ev.Finished, ev.ReplicaState, ev.ResultHeld}
    HEARS_ACROSS_VIEWS: bool = True
    COUNTS_ROWS: bool = True
    HAS_FIXED_PLACES: bool = True
    NO_RETURN: str = "sync.kind server: what a virtual worker has pushed is not handed over yet"

    def __init__(self, config: CoordinatorConfig, run: RunConfig, plan: Plan):
        self.n_committed = config.start_version
        self._config = config
        self._plan = plan
        self._pipelines = Pipelines(plan)
        self._budget = StepBudget(config, plan, self._pipelines)
        self._states = ReplicaStates()
        self._servers = [server for (server,) in plan.roles.servers]
        self._open = OpenGroups()
        keepers = Keepers(lambda stage: (self._servers[stage],), RoundKind.CHECKPOINT)
        self._snapshots = Snapshots(config, run, plan, self._pipelines, self._budget, self._open, keepers)
        self._kept: dict[int, dict[int, RoundId]] = {}  # version -> stage -> what its server holds for a checkpoint
        self._told: dict[RoundId, int] = {}  # of these: the worker that was told to keep it
        self._n_complete = 0  # version of the last checkpoint that is complete
        self._finished: dict[int, int] = {}  # replica -> its local steps in all, when it has done the last one
        self._is_ending = False  # and all that are left have

    # --------------------------------------------------------------------------------------------------- what it hears

    def hear(self, now_s: float, src: int, message: ev.Message, admissions: Mapping[int, int]) -> list[ev.Action]:
        is_known = self._pipelines.has(src) or src in self._servers
        if not is_known and not isinstance(message, ev.StepDone):
            return []
        if self._states.is_asking:
            self._states.hear(src, message)
            return self._go_on(now_s)
        match message:
            case ev.Finished(n_steps):
                return self._on_finished(src, n_steps)
            case ev.ResultHeld():
                return self._held(src, message)
            case ev.MeanEvaluated():
                return self._snapshots.evaluated(message)
            case ev.StepDone(step):
                return [*self._pipelines.did([src], [step + 1]), *self._count(now_s, src, message)]
            case _:
                return self._count(now_s, src, message) if type(message) in StepBudget.READS else []

    def _count(self, now_s: float, src: int, message: ev.Message) -> list[ev.Action]:
        """A step is done, or cannot begin yet. After a row of steps a snapshot may be due."""
        actions = self._budget.hear(now_s, src, message)
        self.n_committed = self._budget.n_rows
        return self._snapshots.after_rows(actions)

    def _on_finished(self, src: int, n_steps: int) -> list[ev.Action]:
        """A replica has done its last local step."""
        self._finished[src] = n_steps
        stage, pipeline = self._plan.seat(src)
        reports: list[ev.Action] = [PipelineEndReport(pipeline, n_steps)] if stage == 0 else []
        return [*reports, *self._end_steps()]

    def _end_steps(self) -> list[ev.Action]:
        """After the last step of all that are left the servers' parameters are the result."""
        left = {peer for pipeline in self._pipelines.whole for peer in self._pipelines.peers(pipeline)}
        if self._is_ending or not left <= self._finished.keys():
            return []
        self._is_ending = True
        for stage, row in enumerate(self._plan.placement):
            contributions = [(worker, self._finished[worker]) for worker in row if worker in self._finished]
            self._snapshots.holds(self._config.n_steps, stage, tuple(contributions))
        return self._snapshots.end(has_result=True)

    # ------------------------------------------------------------------------------------------------------- snapshots

    def _held(self, src: int, held: ev.ResultHeld) -> list[ev.Action]:
        told, group = self._open.hear(src, held)
        return [*told, *(self._whole(group) if group else [])]

    def _whole(self, group: OpenGroup) -> list[ev.Action]:
        """A stage's server has a whole snapshot, with so many pushes of each worker."""
        round = group.round
        stage, _ = self._plan.seat(group.members[0])
        contributions = tuple(zip(self._plan.placement[stage], group.member_steps, strict=True))
        if round.kind == RoundKind.HELD_OUT:
            return self._snapshots.held_out.whole(stage, round, group.members, contributions)
        if round.number <= self._n_complete:
            return group.closed()
        self._snapshots.holds(round.number, stage, contributions)
        workers, steps = zip(*contributions, strict=True)
        report = StateMeanReport(stage, round.number, list(workers), list(steps))
        self._kept.setdefault(round.number, {})[stage] = round
        return [report, *self._tell_workers()]

    def _tell_workers(self) -> list[ev.Action]:
        """The least worker of a stage writes its part of a checkpoint, so it has to keep what that holds."""
        actions: list[ev.Action] = []
        for of_stages in self._kept.values():
            for stage, round in of_stages.items():
                worker = min(self._pipelines.replicas(stage), default=None)
                if worker is not None and self._told.get(round) != worker:
                    self._told[round] = worker
                    actions.append(ev.Send(worker, ev.GroupFormed(round, (worker,), (self._servers[stage],))))
        return actions

    def woke(self, now_s: float, tag: str) -> list[ev.Action]:
        raise AssertionError("it sets no timer")

    # ---------------------------------------------------------------------------------------- the rest of an Agreement

    def start(self, now_s: float) -> list[ev.Action]:
        return [*self._budget.start(now_s), *self._pipelines.ends_of_broken()]

    def restore(self, view: ev.View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        self._budget.restore(rows, ())
        self.n_committed = self._budget.n_rows
        self._pipelines.restore(view, self._budget.n_steps)
        replicas = {peer for pipeline in self._pipelines.whole for peer in self._pipelines.peers(pipeline)}
        self._states.ask(replicas.union(self._servers))

    def restore_rounds(self) -> list[ev.Action]:
        """Open again the rounds that servers hold, except those for losses that are told or were measured."""
        states, actions = self._states, list[ev.Action]()
        measured = self._snapshots.restore_held_out(states)
        for group in states.open_groups():
            if self._snapshots.is_over(group.round, measured):
                actions += group.closed()
            else:
                self._open.restore(group)
        for src, held in states.take(ev.ResultHeld):
            actions += self._held(src, held)
        return [*actions, *self._open.tell_again(), *self._snapshots.restore()]

    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        return self._budget.end or self._budget.untold()

    def paused(self, until_s: float) -> None:
        self._budget.rows.paused(until_s)

    def cannot_lose(self, peer: int, present: Collection[int]) -> str:
        is_server = any(peer in row for row in self._plan.roles.servers)
        return NO_SERVER if is_server else self._pipelines.cannot_lose(peer, present)

    def leave_with(self, peer: int) -> Collection[int]:
        return self._pipelines.beside(peer)

    def refusal(self, command: str) -> str:
        if command in ("status", "checkpoint", "stop"):
            return ""
        return f"{command}: with sync.kind server a run cannot do this yet"

    def promise_checkpoint(self, promised: int = 0) -> int | None:
        return self._snapshots.promise_checkpoint(promised)

    def mean_of(self, version: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return self._snapshots.mean_of(version)

    def missed(self) -> list[ev.Message]:
        return self._states.missed()

    def leave_view(self, members: Collection[int]) -> Results:
        return ()

    def adopt_view(self, now_s: float, view: ev.View) -> list[ev.Action]:
        if view.number == 1:
            self._budget.rows.begin(now_s)
        broken = self._pipelines.keep(view.by_peer)
        of_first = self._plan.placement[0]
        ends = self._pipelines.ends(pipeline for pipeline in broken if of_first[pipeline] not in self._finished)
        if self._states.is_asking:
            self._states.lose({peer for pipeline in broken for peer in self._pipelines.peers(pipeline)})
            return [*ends, *self._go_on(now_s)]
        if not broken:
            return [*ends]
        return [*ends, *self._snapshots.held_out.lose(), *self._tell_workers(), *self._end_steps()]

    def roll_back(self) -> None:
        """Not reached: a run that would have to go back ends (`cannot_lose`)."""

    def checkpoint_complete(self, version: int) -> list[ev.Action]:
        """Nobody needs what is kept for this one and older ones any more."""
        self._n_complete = max(version, self._n_complete)
        over = [self._kept.pop(other) for other in sorted(self._kept) if other <= version]
        rounds = [(stage, round) for of_stages in over for stage, round in of_stages.items()]
        for _, round in rounds:
            self._told.pop(round, None)
        return [ev.Send(self._servers[stage], ev.GroupClosed(round)) for stage, round in rounds]
