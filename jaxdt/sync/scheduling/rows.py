"""Rows of the metrics where replicas may differ."""

import math

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.run.seq_lengths import SeqLengths
from jaxdt.sync.matching.base import AveragingGroup


class Rows:
    """Rows of the metrics: each of as many steps of pipelines as there are pipelines, in the order in which they are
    done. Rows `by_step` are of one step of all pipelines, while all of them are there: a pipeline that is ahead
    waits."""

    def __init__(self, n_pipelines: int, tokens_per_sample: SeqLengths, by_step: bool = False):
        self.by_step = by_step
        self._n_pipelines = n_pipelines
        self._tokens_per_sample = tokens_per_sample
        self._done: list[
            tuple[int | None, ev.StepDone]
        ] = []  # with its pipeline; None if that has come back since then
        self._last_s = 0.0
        self._known_from_s = -math.inf
        self._sizes: list[int] = []
        self._n_suspended = 0
        self._skipped: set[tuple[int, int]] = set()  # pipeline and step, whose gradient was not finite

    def begin(self, now_s: float) -> None:
        self._last_s = now_s

    def on_paused(self, until_s: float) -> None:
        """The coordinator did not run, and hears until then of steps that were done meanwhile: when is not known."""
        self._known_from_s = until_s

    def on_formed(self, group: AveragingGroup) -> None:
        """A group has formed since the last row."""
        self._sizes.append(len(group.members))
        self._n_suspended += group.suspended

    def on_skipped(self, pipeline: int, step: int) -> None:
        """A pipeline's step is without an update, since its gradient was not finite."""
        self._skipped.add((pipeline, step))

    def add(self, pipeline: int, step: ev.StepDone) -> None:
        self._done.append((pipeline, step))
        if self.by_step:
            self._done.sort(key=lambda one: one[1].step)

    def n_waiting(self, pipeline: int) -> int:
        """Steps of a pipeline that are in no row yet."""
        return sum(one == pipeline for one, _ in self._done)

    def on_returned(self, pipeline: int) -> None:
        """A pipeline has come back. Steps that it did before are not among those that it counts from now on."""
        self._done = [(None if one == pipeline else one, step) for one, step in self._done]

    def next(self, now_s: float, row: int, first_open: float) -> StepReport | None:
        """The next row, if it is complete. All steps before `first_open` are done at all pipelines that are left."""
        n = self._n_pipelines
        if len(self._done) < n or (self.by_step and self._done[n - 1][1].step >= first_open):
            return None
        of_row, self._done = self._done[:n], self._done[n:]
        done = [step for _, step in of_row]
        of_steps = {(pipeline, step.step) for pipeline, step in of_row}
        has_skipped = not of_steps.isdisjoint(self._skipped)
        self._skipped -= of_steps
        tally = sum((one.tally for one in done), ev.Tally())
        n_tokens = sum(one.n_samples * self._tokens_per_sample.at(one.step) for one in done)
        took_s, self._last_s = now_s - self._last_s, now_s
        # Several in one moment were done while there was no coordinator.
        step_s = took_s if took_s and now_s >= self._known_from_s else math.nan
        norms = [math.sqrt(one.sq_norm) / one.n_samples for one in done if one.sq_norm is not None]
        sizes, self._sizes = self._sizes, []
        n_suspended, self._n_suspended = self._n_suspended, 0
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
