"""Rows of the metrics where replicas may differ."""

import math

from jaxdt.protocol.events import StepDone, Tally
from jaxdt.protocol.reports import StepReport
from jaxdt.spec.seq_lengths import SeqLengths
from jaxdt.sync.matching.base import AveragingGroup


class Rows:
    """Rows of the metrics: each of as many steps of pipelines as there are pipelines, in the order in which they are
    done."""

    def __init__(self, n_pipelines: int, tokens_per_sample: SeqLengths):
        self._n_pipelines = n_pipelines
        self._tokens_per_sample = tokens_per_sample
        self._done: list[StepDone] = []
        self._last_s = 0.0
        self._known_from_s = -math.inf
        self._sizes: list[int] = []
        self._n_suspended = 0
        self.has_skipped = False  # an update since the last row, since a gradient was not finite

    def begin(self, now_s: float) -> None:
        """The first step begins."""
        self._last_s = now_s

    def paused(self, until_s: float) -> None:
        """The coordinator did not run, and hears until then of steps that were done meanwhile: when is not known."""
        self._known_from_s = until_s

    def formed(self, group: AveragingGroup) -> None:
        """A group has formed since the last row."""
        self._sizes.append(len(group.members))
        self._n_suspended += group.suspended

    def add(self, now_s: float, row: int, step: StepDone) -> StepReport | None:
        """A pipeline's step is done; the row that it completes."""
        self._done.append(step)
        if len(self._done) < self._n_pipelines:
            return None
        done, self._done = self._done, []
        tally = sum((one.tally for one in done), Tally())
        n_tokens = sum(one.n_samples * self._tokens_per_sample.at(one.step) for one in done)
        took_s, self._last_s = now_s - self._last_s, now_s
        # Several in one moment were done while there was no coordinator.
        step_s = took_s if took_s and now_s >= self._known_from_s else math.nan
        norms = [math.sqrt(one.sq_norm) / one.n_samples for one in done if one.sq_norm is not None]
        sizes, self._sizes = self._sizes, []
        n_suspended, self._n_suspended = self._n_suspended, 0
        has_skipped, self.has_skipped = self.has_skipped, False
        return StepReport(
            step=row,
            loss=tally.loss_sum / tally.n_losses if tally.n_losses else math.nan,
            step_s=step_s,
            tokens_per_s=n_tokens / step_s,
            gradient_norm=sum(norms) / len(norms) if norms else math.nan,
            verdict="skip" if has_skipped else "apply",
            group_size=sum(sizes) / len(sizes) if sizes else None,
            suspended_frac=n_suspended / len(sizes) if sizes else None,
        )
