"""The state of one step that is under way at a server: its tasks, its held-out microbatches, the contributions of its
workers as far as they have come, and the tasks that went from server to server."""

from collections import deque
from dataclasses import dataclass, field

from jaxdt.protocol.round_id import RoundId
from jaxdt.wiring.pool.task_table import TaskTable
from jaxdt.wiring.pool.work_stealing import StepSteals


@dataclass(frozen=True)
class AskedContribution:
    """A worker was asked for its contribution to a step, in these rounds, and has until `until_s`."""

    rounds: tuple[RoundId, ...]
    asked_s: float
    until_s: float


@dataclass
class StepUnderWay:
    """A step under way. `losses`: microbatch -> samples and loss of its last backward; `held_out`: held-out
    microbatches whose input is here, `n_held_out` those still to be measured; `asked`: by worker; `steals`: tasks that
    go from server to server."""

    number: int
    table: TaskTable
    n_held_out: int
    held_out: deque[int]
    steals: StepSteals
    losses: dict[int, tuple[int, float | None]] = field(default_factory=dict)
    asked: dict[int, AskedContribution] = field(default_factory=dict)
    is_drained: bool = False

    @property
    def n_more(self) -> int:
        """Tasks that clients of this server could do, and none has; with those that come from another server."""
        return self.table.n_queued + len(self.steals.awaited)

    @property
    def n_left(self) -> int:
        """Microbatches of this server that no client has or has done; with those that come from another server."""
        return self.table.n_left + len(self.steals.awaited)
