"""The part of an Agreement that is alike wherever replicas may differ: no step of the run is recorded, the steps of
pipelines are counted, in rows."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxdt.membership.agreement import NOBODY, CountedRows, Intake
from jaxdt.protocol.events import Action, Message, Record, StateName, StepsCounted
from jaxdt.sync.scheduling.replica_states import ReplicaStates
from jaxdt.sync.scheduling.step_budget import StepBudget


class CountedSteps:
    """The steps of pipelines are counted by `_budget`; after a restart `_states` asks the members what they know."""

    _budget: StepBudget
    _states: ReplicaStates

    def intake(self, candidates: Collection[int], states: Mapping[int, StateName]) -> Intake:
        return NOBODY

    def durable_form(self, record: Record) -> Any:
        raise AssertionError("no step of the run is recorded")

    def committed(self, now_s: float, record: Record) -> tuple[Message, list[Action]]:
        raise AssertionError("no step of the run is recorded")

    def counted(self, rows: CountedRows) -> tuple[Message, list[Action]]:
        return StepsCounted(rows.n_steps), [*self._budget.told(rows)]

    @property
    def is_asking(self) -> bool:
        return self._states.is_asking

    @property
    def has_untold_rows(self) -> bool:
        return self._budget.n_told < self._budget.n_rows

    @property
    def records(self) -> tuple[Record, ...]:
        return ()
