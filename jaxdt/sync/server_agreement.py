"""The coordinator's part where servers hold the parameters: rows of the metrics, and the end of the run.

Workers and servers agree among themselves on what is pushed and pulled (jaxdt.sync.server).
"""

from collections.abc import Collection, Mapping, Sequence

from jaxdt.membership.agreement import CommittedStep, CountedRows, Decision, Results
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol.events import (
    Action,
    Finished,
    Message,
    ReplicaState,
    StepDone,
    View,
)
from jaxdt.protocol.reports import PipelineEndReport, StepReport
from jaxdt.spec.plan import Plan
from jaxdt.sync.scheduling.counted_steps import CountedSteps
from jaxdt.sync.scheduling.pipelines import NO_NEWCOMERS, Pipelines
from jaxdt.sync.scheduling.replica_states import ReplicaStates
from jaxdt.sync.scheduling.step_budget import StepBudget

NO_SERVER = "it is the server that holds its stage's parameters"


class ServerAgreement(CountedSteps):
    """The agreement of `sync.kind = "server"`. `n_committed`: rows of the metrics."""

    READS = StepBudget.READS | {Finished, ReplicaState}
    HEARS_ACROSS_VIEWS: bool = True
    NO_NEWCOMERS: str = NO_NEWCOMERS

    def __init__(self, config: CoordinatorConfig, plan: Plan):
        self.n_committed = config.start_version
        self._config = config
        self._plan = plan
        self._pipelines = Pipelines(plan)
        self._budget = StepBudget(config, plan, self._pipelines)
        self._states = ReplicaStates()
        self._finished: set[int] = set()  # pipelines

    # --------------------------------------------------------------------------------------------------- what it hears

    def hear(self, now_s: float, src: int, message: Message, admissions: Mapping[int, int]) -> list[Action]:
        if not self._pipelines.has(src) and not isinstance(message, StepDone):
            return []
        if self._states.is_asking:
            self._states.hear(src, message)
            return self._go_on(now_s)
        if isinstance(message, Finished):
            stage, pipeline = self._plan.seat(src)
            self._finished |= {pipeline} if stage == 0 else set()
            return [PipelineEndReport(pipeline, message.n_steps)] if stage == 0 else []
        actions: list[Action] = []
        if isinstance(message, StepDone):
            actions += self._pipelines.did([src], [message.step + 1])
        if type(message) in StepBudget.READS:
            actions += self._budget.hear(now_s, src, message)
        self._budget.tell(action for action in actions if isinstance(action, StepReport))
        self.n_committed = self._budget.n_rows
        return [action for action in actions if not isinstance(action, StepReport)]

    def woke(self, now_s: float, tag: str) -> list[Action]:
        raise AssertionError("it sets no timer")

    # ---------------------------------------------------------------------------------------- the rest of an Agreement

    def start(self, now_s: float) -> list[Action]:
        return [*self._budget.start(now_s), *self._pipelines.ends_of_broken()]

    def restore(self, view: View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        if rows:
            self._budget.restore(rows)
            self.n_committed = rows.n_rows
        self._pipelines.restore(view.by_peer, self._budget.n_steps)
        self._states.ask(peer for pipeline in self._pipelines.whole for peer in self._pipelines.peers(pipeline))

    def _go_on(self, now_s: float) -> list[Action]:
        """After a restart, once all members have answered."""
        if self._states.is_asking:
            return []
        for peer, answer in self._states.answers.items():
            stage, pipeline = self._plan.seat(peer)
            if stage == 0 and answer.n_steps is not None:
                self._budget.ended(pipeline)
        said = [action for src, message in self._states.said for action in self.hear(now_s, src, message, {})]
        return [*said, *self._budget.end_if_enough()]

    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        return self._budget.end or self._budget.untold()

    def cannot_lose(self, peer: int, present: Collection[int]) -> str:
        is_server = any(peer in row for row in self._plan.roles.servers)
        return NO_SERVER if is_server else self._pipelines.cannot_lose(peer, present)

    def leave_with(self, peer: int) -> Collection[int]:
        return self._pipelines.beside(peer)

    def refusal(self, command: str) -> str:
        if command == "status":
            return ""
        return f"{command}: with sync.kind server a run cannot do this yet"

    def promise_checkpoint(self) -> int | None:
        return None

    def mean_of(self, version: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        return ()

    def missed(self) -> list[Message]:
        return self._states.missed()

    def leave_view(self, members: Collection[int]) -> Results:
        return ()

    def adopt_view(self, now_s: float, view: View) -> list[Action]:
        if view.number == 1:
            self._budget.rows.begin(now_s)
        broken = self._pipelines.keep(view.by_peer)
        ends = self._pipelines.ends(pipeline for pipeline in broken if pipeline not in self._finished)
        if not self._states.is_asking:
            return [*ends]
        self._states.lose({peer for pipeline in broken for peer in self._pipelines.peers(pipeline)})
        return [*ends, *self._go_on(now_s)]

    def roll_back(self) -> None:
        """Not reached: a run that would have to go back ends (`cannot_lose`)."""

    def checkpoint_complete(self) -> None:
        """Nothing depends on it."""
