"""Rows of the metrics that wait for their held-out losses, where replicas are equal.

The row of step n has the loss of the parameters after that step. Members measure it at the start of the first step that
computes with those parameters, so the row waits, and the rows after it, but not longer than until that step is
committed. The loss of the last row comes without a further step.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run.config import TrainConfig, is_evaluated
from jaxdt.run.delay import NO_DELAY, Delay


class HeldOutRows:
    """See the module text. A microbatch that was measured again, since a member was lost, counts once."""

    def __init__(self, train: TrainConfig | None = None, delay: Delay = NO_DELAY):
        self._train = train or TrainConfig()
        self._delay = delay
        self._rows: deque[StepReport] = deque()
        self._losses: dict[int, dict[int, tuple[int, float]]] = {}  # version -> microbatch -> samples, sum of losses

    def add(self, row: StepReport, n_committed: int) -> list[StepReport]:
        """A step is committed; the rows that can be told."""
        self._rows.append(row)
        version = row.step + 1
        if is_evaluated(version, self._train.eval_every_steps, self._train.steps):
            self._losses[version] = {}
        return self._released(n_committed)

    def on_measured(self, said: ev.HeldOutMeasured, n_committed: int) -> list[StepReport]:
        """A member has measured losses; the rows that can be told."""
        if said.version in self._losses:
            self._losses[said.version] |= {m: (n_samples, loss_sum) for m, n_samples, loss_sum in said.losses}
        return self._released(n_committed)

    def has_unreported(self, n_rows: int) -> bool:
        return any(row.step < n_rows for row in self._rows)

    def roll_back(self, n_committed: int) -> None:
        """Rows from here on are void; a row before them gets the loss that is measured again."""
        self._rows = deque(row for row in self._rows if row.step < n_committed)
        self._losses = {row.step + 1: {} for row in self._rows if row.step + 1 in self._losses}

    def _released(self, n_committed: int) -> list[StepReport]:
        told: list[StepReport] = []
        while self._rows and not self._waits(self._rows[0].step + 1, n_committed):
            row = self._rows.popleft()
            losses = self._losses.pop(row.step + 1, {})
            told.append(with_held_out(row, [(m, *sums) for m, sums in losses.items()]))
        return told

    def _waits(self, version: int, n_committed: int) -> bool:
        losses = self._losses.get(version)
        is_open = n_committed <= self._delay.computed_with(version)
        return losses is not None and len(losses) < self._train.eval_microbatches and is_open


def with_held_out(row: StepReport, losses: Sequence[tuple[int, int, float]]) -> StepReport:
    """The row with these held-out losses: microbatch, samples and sum of losses of each."""
    measured = sorted(one for one in losses if one[1])
    if not measured:
        return row
    loss = sum(loss_sum for *_, loss_sum in measured) / sum(n_samples for _, n_samples, _ in measured)
    means = tuple((m, loss_sum / n_samples) for m, n_samples, loss_sum in measured)
    return replace(row, eval_loss=loss, eval_losses=means)
