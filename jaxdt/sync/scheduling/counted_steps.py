"""The part of an Agreement that is alike wherever replicas may differ: no step of the run is recorded, the steps of
pipelines are counted, in rows."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from jaxdt.membership.agreement import NO_INTAKE, CountedRows, Intake
from jaxdt.protocol import events as ev
from jaxdt.run.plan import Plan
from jaxdt.sync.scheduling.replica_states import ReplicaStates
from jaxdt.sync.scheduling.step_budget import StepBudget


class CountedSteps(ABC):
    """The steps of pipelines are counted by `_budget`; after a restart `_states` asks the members what they know."""

    _plan: Plan
    _budget: StepBudget
    _states: ReplicaStates

    @abstractmethod
    def hear(self, now_s: float, src: int, message: ev.Message, admissions: Mapping[int, int]) -> list[ev.Action]:
        """As an Agreement does."""

    @abstractmethod
    def restore_rounds(self) -> list[ev.Action]:
        """All members have answered: the rounds that are not over go on."""

    def _go_on(self, now_s: float) -> list[ev.Action]:
        """After a restart, once all members have answered: then counts what they say again."""
        states = self._states
        if states.is_asking:
            return []
        for peer, answer in states.answers.items():
            stage, pipeline = self._plan.seat(peer)
            if stage == 0 and answer.n_steps is not None:
                self._budget.ended(pipeline)
        actions = self.restore_rounds()
        for src, message in states.said:
            actions += self.hear(now_s, src, message, {})
        self._states = ReplicaStates()
        return [*actions, *self._budget.end_if_enough()]

    def intake(self, candidates: Collection[int], states: Mapping[int, ev.StateName]) -> Intake:
        return NO_INTAKE

    def durable_form(self, record: ev.Record) -> Any:
        raise AssertionError("no step of the run is recorded")

    def committed(self, now_s: float, record: ev.Record) -> tuple[ev.Message, list[ev.Action]]:
        raise AssertionError("no step of the run is recorded")

    def counted(self, rows: CountedRows) -> tuple[ev.Message, list[ev.Action]]:
        return ev.StepsCounted(rows.n_steps), [*self._budget.told(rows)]

    @property
    def is_asking(self) -> bool:
        return self._states.is_asking

    def has_untold_rows(self, n_rows: int) -> bool:
        return self._budget.n_told < min(n_rows, self._budget.n_rows)

    @property
    def records(self) -> tuple[ev.Record, ...]:
        return ()
