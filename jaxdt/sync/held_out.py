"""The held-out loss where replicas may differ: that of the mean over the replicas' parameters.

When a number of rows is done, the replicas of each stage add up their parameters, each at its next step boundary, and
continue. No replica adopts the mean. Once every stage has the sum, the members of one pipeline run the held-out
microbatches with it, each between two of its local steps, and the last stage tells the loss. Then the sums are dropped.
With a token table that two stages share the first gives that of the mean to the last (jaxdt.sync.shared_table).

The coordinator measures one loss at a time, and holds back the rows from the one to which the loss belongs on, so that
a row is told with its held-out loss. A loss that is due while another one waits to be measured is left out. So is one
that was measured, if the coordinator died before it could tell it and no peer is left that knows it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdt.membership.held_out_rows import with_held_out
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import HeldOutMeanReport, StepReport
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.config import TrainConfig, is_evaluated
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import boundary_bytes_of_pipelines
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.scheduling.pipelines import Pipelines
from jaxdt.sync.shared_table import SharedTable

HELD_OUT = "eval"  # the kind of the keys of its boundary tensors


@dataclass(frozen=True)
class HeldOutPlace:
    """One replica's place. `next_peer`: of its pipeline, None at the last stage; `sent_bytes[m % len]`: payload of
    what it sends there for held-out microbatch m of `n_microbatches`."""

    peer: int
    stage: int
    next_peer: int | None
    n_microbatches: int
    sent_bytes: Sequence[int]


def held_out_place(setup: PeerSetup) -> HeldOutPlace:
    config, plan, stage = setup.config, setup.plan, setup.stage
    _, pipeline = plan.seat(setup.peer)
    has_next = stage + 1 < plan.n_stages
    return HeldOutPlace(
        peer=setup.peer,
        stage=stage,
        next_peer=plan.placement[stage + 1][pipeline] if has_next else None,
        n_microbatches=config.train.eval_microbatches,
        sent_bytes=boundary_bytes_of_pipelines(config, plan, stage, forward=True) if has_next else (),
    )


class HeldOutWork:
    """A peer's side: the Work with a mean. A part of a sync's machine, which says when the peer is between two local
    steps. `table`: the shared table, at either end of a pipeline that has one."""

    READS = frozenset({ev.EvaluateMean, ev.Boundary, ev.Ran})

    def __init__(self, place: HeldOutPlace):
        self.table: SharedTable | None = None
        self._place = place
        self._mean: ev.EvaluateMean | None = None
        self._inputs: dict[int, list[int]] = {}  # version -> microbatches that have come from the stage before
        self._losses: list[tuple[int, int, float]] = []  # microbatch, samples, sum of losses; those that are done
        self._last_loss: ev.MeanEvaluated | None = None  # the last one

    def say_again(self) -> ev.Actions:
        """The loss that was measured last: a coordinator may have died before it could tell it."""
        return [ev.Send(ev.COORDINATOR, self._last_loss)] if self._last_loss else []

    def handle(self, event: ev.Event) -> ev.Actions:
        """Actions, but for the Work itself. A coordinator that was started again asks again for what is under way."""
        match event:
            case ev.Received(_, ev.EvaluateMean() as mean) if mean != self._mean:
                self._mean, self._losses = mean, []
                if self._place.stage == 0:
                    self._inputs[mean.round.number] = list(range(self._place.n_microbatches))
            case ev.Received(_, ev.Boundary(ev.Key(kind, version, _, microbatch))) if kind == HELD_OUT:
                self._inputs.setdefault(version, []).append(microbatch)
            case ev.Ran(Work(kind=kind) as work, values=values) if kind == WorkKind.EVALUATE:
                return self._on_evaluated(work, values)
            case _:
                pass
        return []

    def between_steps(self) -> ev.Actions:
        """The Work whose input is here. It is done before the next local step, if that is asked for later."""
        mean = self._mean
        if mean is None or mean.round.number not in self._inputs:
            return []
        place, version, scale = self._place, mean.round.number, 1.0 / mean.n_members
        rounds, given = (mean.round,), list[ev.Action | ev.InternalEvent]()
        if self.table and place.stage == 0:
            given = list(self.table.give_mean(mean.round, scale))
        elif self.table:
            table = self.table.table_of_mean(version)
            if table is None:
                return []
            rounds = (mean.round, table)
        works = [Work(place.stage, WorkKind.EVALUATE, m, place.peer, version) for m in self._inputs.pop(version)]
        return [*given, *(ev.Run(work, scale, rounds) for work in works)]

    def _on_evaluated(self, work: Work, values: Mapping[str, float]) -> ev.Actions:
        place, (version, m) = self._place, work.place
        if place.next_peer is not None:
            n_bytes = place.sent_bytes[m % len(place.sent_bytes)]
            return [ev.Send(place.next_peer, ev.Boundary(ev.Key(HELD_OUT, version, place.stage + 1, m)), n_bytes)]
        self._losses.append((m, int(values.get("n_samples", 0)), values.get("loss_sum", 0.0)))
        if len(self._losses) < place.n_microbatches:
            return []
        self._last_loss = ev.MeanEvaluated(version, tuple(self._losses))
        return [ev.Send(ev.COORDINATOR, self._last_loss)]


class HeldOutLosses:
    """The coordinator's side: which loss is measured, and the rows that wait for it. `version`: of the mean that is
    under way, None if there is none."""

    READS = frozenset({ev.MeanEvaluated})

    def __init__(self, train: TrainConfig, plan: Plan, pipelines: Pipelines):
        self.version: int | None = None
        self._train = train
        self._plan = plan
        self._pipelines = pipelines
        self._measuring: int | None = None  # the pipeline that was asked to
        self._awaited_versions: set[int] = set()
        # Of rows that are not done yet: microbatch, samples, sum of losses; none where they are left out.
        self._losses: dict[int, Sequence[tuple[int, int, float]]] = {}
        self._last = 0  # version of the last mean that was begun
        self._rows: deque[StepReport] = deque()
        self._whole: dict[int, tuple[RoundId, tuple[int, ...]]] = {}  # stage -> its sum, and whose

    def is_due(self, version: int) -> bool:
        """Whether the loss after so many rows is still to be measured."""
        return is_evaluated(version, self._train.eval_every_steps, self._train.steps) and version > self._last

    def want(self, version: int) -> bool:
        """The loss after so many rows will be measured: False if it is not due, or left out."""
        is_wanted = self.is_due(version) and (version == self._train.steps or len(self._awaited_versions) < 2)
        if is_wanted:
            self._awaited_versions.add(version)
        return is_wanted

    def begin(self, version: int) -> None:
        """The replicas are about to be told to add their parameters up."""
        self.version = self._last = version

    def restore(self, version: int, is_over: bool, told: ev.MeanEvaluated | None) -> None:
        """A mean that an earlier coordinator has begun, and whose row is not done yet here. If it `is_over` its loss is
        the one that was told, or not known any more."""
        self._last = version
        if told or is_over:
            self._losses[version] = told.losses if told else ()
        else:
            self.version = version
            self._awaited_versions.add(version)

    def row(self, report: StepReport) -> list[StepReport]:
        """A row is done; the rows that can be told."""
        self._rows.append(report)
        return self._pop_measured_rows()

    def _pop_measured_rows(self) -> list[StepReport]:
        """Rows before the first one whose loss is not measured yet."""
        first = min(self._awaited_versions, default=None)
        told: list[StepReport] = []
        while self._rows and (first is None or self._rows[0].step + 1 < first):
            row = self._rows.popleft()
            told.append(with_held_out(row, self._losses.pop(row.step + 1, ())))
        return told

    def whole(
        self, stage: int, round: RoundId, members: Sequence[int], contributions: Sequence[tuple[int, int]]
    ) -> list[ev.Action]:
        """A stage has its sum over these members. Once all have, one pipeline measures the loss. `contributions`:
        replicas whose local steps are in it, and how many."""
        self._whole[stage] = round, tuple(members)
        replicas, steps = zip(*contributions, strict=True)
        report = HeldOutMeanReport(stage, round.number, list(replicas), list(steps), round.view)
        return [report, *(self._measure() if len(self._whole) == self._plan.n_stages else [])]

    def _measure(self) -> list[ev.Action]:
        """The least pipeline that is whole measures the loss. One that has come back since the mean was begun does not
        have it; without any other the loss is left out."""
        assert self.version is not None  # one is under way
        able = [pipeline for pipeline in self._pipelines.whole if self._pipelines.was_whole(pipeline, self.version)]
        if not able:
            return self._end((), [members for _, members in self._whole.values()])
        self._measuring = able[0]
        peers = self._pipelines.peers(self._measuring)
        return [ev.Send(peer, self._evaluate(stage)) for stage, peer in enumerate(peers)]

    def _evaluate(self, stage: int) -> ev.EvaluateMean:
        round, members = self._whole[stage]
        return ev.EvaluateMean(round, len(members))

    def lose(self) -> list[ev.Action]:
        """Pipelines are lost. If one of them was to measure the loss, another one does."""
        is_lost = self._measuring is not None and self._measuring not in self._pipelines.whole
        return self._measure() if is_lost else []

    def hear(self, message: ev.MeanEvaluated) -> list[ev.Action]:
        """The loss is known: rows, and what the members are told."""
        if message.version != self.version:
            return []
        measuring = self._pipelines.peers(self._pipelines.whole[0] if self._measuring is None else self._measuring)
        return self._end(message.losses, [(measuring[stage], *members) for stage, (_, members) in self._whole.items()])

    def _end(self, losses: Sequence[tuple[int, int, float]], holders: Sequence[Sequence[int]]) -> list[ev.Action]:
        """The loss is known, or left out: rows, and what those who may hold each stage's sum are told."""
        version, self.version, self._measuring = self.version, None, None
        assert version is not None  # one is under way
        told = [
            ev.Send(holder, ev.GroupClosed(round))
            for (round, _), of_stage in zip(self._whole.values(), holders, strict=True)
            for holder in sorted(set(of_stage))
            if not self._pipelines.has_lost(holder)
        ]
        self._awaited_versions.discard(version)
        self._whole.clear()
        self._losses[version] = losses
        return [*self._pop_measured_rows(), *told]
