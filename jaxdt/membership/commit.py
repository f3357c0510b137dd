"""Two-phase commit of steps, for replicas that stay equal (step protocol, Sec. 5).

Phase 1: every member says `Prepared` when it holds the whole result of each of its groups. Phase 2: the coordinator
makes the step's record durable and announces it, and every member applies it. So no step is half applied.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxdt.membership.agreement import (
    Agreement,
    CommittedStep,
    CountedRows,
    Decision,
    EndRun,
    RepairReplicas,
    Results,
    RollBack,
)
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.membership.held_out_rows import HeldOutRows
from jaxdt.membership.state_check import UnequalBits, deviations
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StepReport
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.seq_lengths import SeqLengths

KEPT_STEPS = 2  # with a delay of one step a member may have missed two
ROLLBACKS_MAX = 3  # without a complete checkpoint in between


class Disagreement(Exception):
    """One line: which member holds another result than the others."""


class TwoPhaseCommit(Agreement):
    """The agreement of `sync.kind = "allreduce"`: all members commit each step, in order."""

    READS = frozenset({ev.Prepared, ev.HeldOutMeasured})

    def __init__(self, config: CoordinatorConfig, rows: HeldOutRows | None = None):
        self.n_committed = config.start_version
        self._config = config
        self._rows = rows or HeldOutRows()
        self._votes = Votes()
        self._unequal_bits = UnequalBits()
        self._steps: tuple[CommittedStep, ...] = ()  # the last ones
        self._n_rollbacks = 0
        self._last_commit_s = math.nan

    def start(self, now_s: float) -> list[ev.Action]:
        """The last steps were durable, but the process may have ended before it said so. Their times are not known, nor
        is that of the next one, which began under an earlier coordinator."""
        return [row for step in self._steps for row in self._row(step, math.nan)]

    def _row(self, step: CommittedStep, step_s: float) -> list[StepReport]:
        """The rows that can be told, once this one is there, too."""
        return self._rows.add(step_report(step, step_s, self._config.tokens_per_sample), self.n_committed)

    def restore(self, view: ev.View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        self._steps = tuple(steps)
        self.n_committed = max([view.n_committed, *(record.step + 1 for record in self.records)])

    def hear(self, now_s: float, src: int, message: ev.Message, admissions: Mapping[int, int]) -> list[ev.Action]:
        """A vote on the first step that is not committed, or with a delay on one of the next; or a held-out loss."""
        if isinstance(message, ev.HeldOutMeasured):
            return [*self._rows.on_measured(message, self.n_committed)]
        assert isinstance(message, ev.Prepared)
        if self.n_committed <= message.step <= self.n_committed + self._config.delay_steps:
            self._votes.add(src, message, admissions)
        return []

    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        """The record of the next step once every member is prepared for it."""
        step = self.n_committed
        votes = self._votes.of_all(step, admissions)
        if votes is None:
            return None
        try:
            record = agreed_record(step, votes, generation)
        except Disagreement as problem:
            return EndRun(ExitCode.LOST, f"step {step}: {problem}")
        if record.verdict == "skip" and self._config.on_nonfinite != "skip":
            return self._not_finite(step)
        return self._repairs(step, votes) or record

    def _repairs(self, step: int, votes: Mapping[int, ev.Prepared]) -> RepairReplicas | None:
        """The members whose states have to be replaced before the step, and those that give them theirs. Their votes do
        not count any more: they vote again."""
        found = [deviation for deviation in deviations(votes) if not deviation.is_tolerated]
        if not found:
            return None
        repairs: dict[int, ev.Repair] = {}
        for deviation in found:
            repairs |= deviation.repairs
        self._votes.forget(step, repairs)
        return RepairReplicas(repairs, [deviation.repair_report for deviation in found])

    def _not_finite(self, step: int) -> Decision:
        self._n_rollbacks += 1
        if self._config.on_nonfinite == "stop" or self._n_rollbacks > ROLLBACKS_MAX:
            return EndRun(ExitCode.DIVERGED, f"step {step}: the gradient is not finite")
        return RollBack()

    def durable_form(self, record: ev.Record) -> tuple[CommittedStep, ...]:
        step = CommittedStep(record, self._votes.tally(record.step))
        return (*self._steps, step)[-KEPT_STEPS:]

    def on_durable(self, now_s: float, value: ev.Record) -> tuple[ev.Message, list[ev.Action]]:
        self._steps = self.durable_form(value)
        votes = self._votes.pop(value.step)
        self.n_committed = value.step + 1
        step_s = now_s - self._last_commit_s
        self._last_commit_s = now_s
        return ev.Committed(value), [*self._unequal_bits.reports(votes), *self._row(self._steps[-1], step_s)]

    def has_unreported_rows(self, n_rows: int) -> bool:
        return self._rows.has_unreported(n_rows)

    @property
    def records(self) -> tuple[ev.Record, ...]:
        return tuple(step.record for step in self._steps)

    def missed_messages(self) -> list[ev.Message]:
        return [ev.Committed(record) for record in self.records]

    def results_held(self, members: Collection[int]) -> Results:
        """Results that members hold stay good; who is prepared says so again in the new view."""
        held = self._votes.held(members)
        self._votes.clear()
        return held

    def on_view(self, now_s: float, view: ev.View) -> list[ev.Action]:
        if view.number == 1 or view.rolled_back:
            self._last_commit_s = now_s
        if view.rolled_back:
            self._rows.roll_back(view.n_committed)
        self.n_committed = view.n_committed
        return []

    def roll_back(self) -> None:
        self._votes.clear()
        self._steps = ()

    def on_checkpoint(self, version: int) -> list[ev.Action]:
        self._n_rollbacks = 0
        return []


class Votes:
    """The votes of the present view: the members that are prepared for a step, and their results."""

    def __init__(self):
        self._by_step: dict[int, dict[int, ev.Prepared]] = {}

    def add(self, src: int, prepared: ev.Prepared, admissions: Mapping[int, int]) -> None:
        """A member's vote; one under an earlier admission of it does not count."""
        if prepared.admission == admissions.get(src):
            self._by_step.setdefault(prepared.step, {})[src] = prepared

    def of_all(self, step: int, admissions: Mapping[int, int]) -> Mapping[int, ev.Prepared] | None:
        """All votes on a step, once every member of the view has given its own."""
        votes = self._by_step.get(step, {})
        return votes if len(votes) == len(admissions) and set(votes) == set(admissions) else None

    def held(self, members: Collection[int]) -> Results:
        """Rounds of all steps, and the members that hold their whole result."""
        holders: dict[RoundId, list[int]] = {}
        for votes in self._by_step.values():
            for peer, prepared in sorted(votes.items()):
                for result in prepared.results if peer in members else ():
                    holders.setdefault(result.round, []).append(peer)
        return tuple((round, tuple(peers)) for round, peers in sorted(holders.items()))

    def tally(self, step: int) -> ev.Tally:
        """The losses that the members have measured in a step for which all are prepared."""
        votes = self._by_step[step].values()
        results = {result.round.stage: result for vote in votes for result in vote.results}
        return sum((result.tally for result in results.values()), ev.Tally())

    def pop(self, step: int) -> Mapping[int, ev.Prepared]:
        return self._by_step.pop(step)

    def forget(self, step: int, peers: Iterable[int]) -> None:
        """The votes of these members on a step do not count."""
        for peer in peers:
            del self._by_step[step][peer]

    def clear(self) -> None:
        self._by_step.clear()


def agreed_record(step: int, votes: Mapping[int, ev.Prepared], generation: int) -> ev.Record:
    """The record of a step that every member is prepared for: the groups' rounds, and the squared norm over all groups.
    Its verdict is "skip" if that norm is not finite. Disagreement if two members of a group hold different results."""
    results: dict[int, ev.GroupResult] = {}
    for peer, prepared in sorted(votes.items()):
        for result in prepared.results:
            first = results.setdefault(result.round.stage, result)
            if (first.round, first.digest) != (result.round, result.digest):  # norms may be NaN, unequal to itself
                raise Disagreement(f"peer {peer} holds another result of {result.round}")
    counts = {result.n_samples for result in results.values()}
    if len(counts) != 1:
        raise Disagreement(f"the groups counted different numbers of samples {counts}")
    rounds = tuple(result.round for _, result in sorted(results.items()))
    sq_norm = math.fsum(result.sq_norm for result in results.values())
    return ev.Record(step, rounds, sq_norm, counts.pop(), "apply" if math.isfinite(sq_norm) else "skip", generation)


def step_report(step: CommittedStep, step_s: float, tokens_per_sample: SeqLengths) -> StepReport:
    """A committed step as its members have measured it."""
    record = step.record
    tally = step.tally
    n_tokens = record.n_samples * tokens_per_sample.at(record.step)
    return StepReport(
        step=record.step,
        loss=tally.loss_sum / tally.n_losses if tally.n_losses else math.nan,
        step_s=step_s,
        tokens_per_s=n_tokens / step_s if step_s else math.nan,
        gradient_norm=math.sqrt(record.sq_norm) / record.n_samples,
        verdict=record.verdict,
    )
