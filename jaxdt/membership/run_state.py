"""What the parts of the coordinator share: the roster, what members agree on, and what is being written."""

from typing import Any

from jaxdt.membership.agreement import Agreement
from jaxdt.membership.checkpoint_progress import CheckpointProgress
from jaxdt.membership.coordinator_config import CoordinatorConfig, DurableState, OperatorState
from jaxdt.membership.operations import Operations
from jaxdt.membership.rebalance_api import ByNumber
from jaxdt.membership.roster import Roster
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import EndedReport
from jaxdt.run import serialize

# Names under which state is made durable.
TERM, VIEW, STEPS, ROWS, CHECKPOINT = "coordinator_term", "view", "steps", "rows", "checkpoint"
OPERATOR = "operator"


class RunState:
    """`being_persisted`: by name, the values that are not durable yet."""

    def __init__(
        self,
        config: CoordinatorConfig,
        agreement: Agreement,
        durable_state: DurableState | None,
        balance: ByNumber | None,
    ):
        self.config = config
        self.coordinator_term = 1 + max(config.last_term, durable_state.coordinator_term if durable_state else 0)
        self.roster = Roster(
            config.stage_of,
            config.n_stages,
            self.coordinator_term,
            delay_steps=config.delay_steps,
            balance=balance,
            grace_s=config.stage_grace_s,
            workers=config.workers,
            lease_floor_s=config.deadline_floor_s,
        )
        self.agreement = agreement
        self.checkpoints = CheckpointProgress(config.n_stages, config.n_steps, config.start, config.n_copies)
        revoked = OperatorState(revoked=config.revoked)
        self.operations = Operations(durable_state.operator if durable_state else revoked)
        self.being_persisted: dict[str, Any] = {}
        self.has_ended = False

    @property
    def next_view(self) -> ev.View | None:
        """The view that is being made durable."""
        return self.being_persisted.get(VIEW)

    @property
    def n_committed(self) -> int:
        return self.agreement.n_committed

    def persist(self, name: str, value: Any) -> ev.Persist:
        """Make a value durable, under one of the names above."""
        self.being_persisted[name] = value
        if isinstance(value, int):
            return ev.Persist(name, value)
        form: Any = self.agreement.durable_form(value) if isinstance(value, ev.Record) else value
        return ev.Persist(name, serialize.write(form))

    def end(self, code: int, reason: str) -> list[ev.Action]:
        if self.has_ended:
            return []
        self.has_ended = True
        sends = [ev.Send(peer, ev.Ended(code, reason)) for peer, _ in self.roster.leases]
        return [EndedReport(code, reason), *sends, ev.Stop(code, reason)]

    def to_all(self, body: ev.Message) -> list[ev.Action]:
        return [ev.Send(member.peer, body) for member in self.roster.current_view.members]
