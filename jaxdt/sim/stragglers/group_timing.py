"""The speed of pipelines whose replicas average in groups: an event simulation of Work, waits and groups alone.

It drives the matchers of jaxdt.sync.matching as the scheduler of a run would, with constant seconds for Work and for an
exchange, and stalls. Nothing else exists here: no network, no machines of peers, no arithmetic. So it shows what a
matching rule does to throughput and whether it can get stuck, for hundreds of systems a second.

A replica follows its stage's order of Work. After the last backward of a step it is ready, and does nothing until its
group has averaged. With servers in place of groups it does nothing until its pull has come, or continues at once.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdt.run.config import GroupsConfig
from jaxdt.run.work import Work, WorkKind
from jaxdt.sim.stragglers.server_line import ServerGate, ServerLine, ServerTiming, Transfer
from jaxdt.sim.stragglers.stalls import PeerStalls, Stalls
from jaxdt.sync.matching.base import AveragingGroup, Matched, Matcher, matcher_entry
from jaxdt.sync.matching.token import EnforcementToken

FORWARD_FRAC = 1 / 3  # of the seconds of a microbatch
FLUSH, STASH = "1f1b", "stash"
NO_STALLS = Stalls(0.0, 0.0)
LEAVES, ARRIVES, EXPIRES = range(3)  # the order of events at the same time


@dataclass(frozen=True)
class GroupTiming:
    """A system of `n_pipelines` pipelines with `n_stages` stages; `groups` says how replicas average, or that they push
    to servers.

    schedule      "1f1b": a step of `n_microbatches` microbatches is computed to its end before the next one begins;
                  "stash": PipeDream's, where each microbatch is a step and the next ones are already under way
    compute_s     forward and backward of a step at one stage
    exchange_s    averaging of a group of two or more
    answer_s      from the last of a group that is ready until its members know
    slow          pipeline -> factor of its compute seconds
    departures_s  pipeline -> when it leaves, at all its stages
    sends_first   a replica sends the gradient upstream before it averages (SDPipe's Alg. 1), or afterwards
    """

    n_stages: int
    n_pipelines: int
    n_steps: int
    groups: GroupsConfig | ServerTiming
    schedule: str = FLUSH
    n_microbatches: int = 4
    compute_s: float = 0.06
    exchange_s: float = 0.015
    answer_s: float = 0.0
    stalls: Stalls = NO_STALLS
    slow: Mapping[int, float] = field(default_factory=dict[int, float])
    departures_s: Mapping[int, float] = field(default_factory=dict[int, float])
    sends_first: bool = True

    @property
    def step_microbatches(self) -> int:
        return self.n_microbatches if self.schedule == FLUSH else 1


@dataclass
class GroupOutcome:
    """`n_done[pipeline]`: its steps at the first stage. `groups[stage]`: (time, group) in order. `transfers[stage]`:
    pushes and pulls in order, with servers. `is_stuck`: nothing more could happen although a pipeline had not ended."""

    n_done: list[int]
    groups: list[list[tuple[float, AveragingGroup]]]
    transfers: list[list[Transfer]] = field(default_factory=list[list[Transfer]])
    seconds: float = 0.0
    is_stuck: bool = False

    @property
    def steps_per_s(self) -> float:
        """Steps of all pipelines in a second."""
        return sum(self.n_done) / self.seconds

    @property
    def sizes(self) -> list[int]:
        """Sizes of all groups."""
        return [len(group.members) for groups in self.groups for _, group in groups]

    @property
    def suspended_frac(self) -> float:
        """The share of groups that should have connected their stage and did not."""
        return sum(group.suspended for groups in self.groups for _, group in groups) / len(self.sizes)


@dataclass
class Replica:
    """The replica of a stage in a pipeline: what is left of its order of Work, and the inputs that have come."""

    stage: int
    pipeline: int
    peer: int
    order: list[tuple[WorkKind, int]]
    stalls: PeerStalls
    n_begun: int = 0
    is_busy: bool = False
    has_left: bool = False
    arrived: set[tuple[WorkKind, int]] = field(default_factory=set[tuple[WorkKind, int]])


def time_groups(timing: GroupTiming, to_the_end: bool = False, token: EnforcementToken | None = None) -> GroupOutcome:
    """Run until the first pipeline has done its steps, or, `to_the_end`, until all have: a replica that has done its
    last step leaves its stage. `token` is the token that the stages share."""
    return _Run(timing, token or EnforcementToken()).run(to_the_end)


class _Run:
    def __init__(self, timing: GroupTiming, token: EnforcementToken):
        self._timing = timing
        self._now_s = 0.0
        self._n_events = 0
        self._queue: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        n_pipelines = timing.n_pipelines
        self._rows = [[self._replica(s, p) for p in range(n_pipelines)] for s in range(timing.n_stages)]
        peers = [tuple(replica.peer for replica in row) for row in self._rows]
        self._outcome = GroupOutcome([0] * n_pipelines, [[] for _ in self._rows])
        self._matchers: Sequence[Matcher | ServerGate]
        if isinstance(timing.groups, ServerTiming):
            line = ServerLine()
            gates = [ServerGate(timing.groups, line, dict.fromkeys(row, 0)) for row in peers]
            self._matchers = gates
            self._outcome.transfers = [gate.log for gate in gates]
        else:
            build = matcher_entry(timing.groups.match).build
            self._matchers = [build(timing.groups, s, row, token) for s, row in enumerate(peers)]

    def _replica(self, stage: int, pipeline: int) -> Replica:
        peer = stage * self._timing.n_pipelines + pipeline
        return Replica(stage, pipeline, peer, order_of(self._timing, stage), PeerStalls(self._timing.stalls, peer))

    def run(self, to_the_end: bool) -> GroupOutcome:
        timing, outcome = self._timing, self._outcome
        for pipeline, at_s in timing.departures_s.items():
            self._at(at_s, LEAVES, self._leave_pipeline, pipeline)
        for replica in (replica for row in self._rows for replica in row):
            self._begin_work(replica)
        while self._queue and (to_the_end or max(outcome.n_done) < timing.n_steps):
            self._now_s, _, _, callback, arguments = heapq.heappop(self._queue)
            callback(*arguments)
        outcome.seconds = self._now_s
        if to_the_end:
            stay = [p for p in range(timing.n_pipelines) if p not in timing.departures_s]
            outcome.is_stuck = any(outcome.n_done[p] < timing.n_steps for p in stay)
        else:
            outcome.is_stuck = max(outcome.n_done) < timing.n_steps
        return outcome

    def _at(self, at_s: float, order: int, callback: Callable[..., None], *arguments: Any) -> None:
        self._n_events += 1
        heapq.heappush(self._queue, (at_s, order, self._n_events, callback, arguments))

    # ---------------------------------------------------------------------------------------------------------- work

    def _begin_work(self, replica: Replica) -> None:
        """Begin the next Work, if its input is there."""
        if replica.is_busy or replica.has_left or replica.n_begun == len(replica.order):
            return
        kind, n = replica.order[replica.n_begun]
        is_first = replica.stage == (0 if kind == WorkKind.FORWARD else self._timing.n_stages - 1)
        if not is_first and (kind, n) not in replica.arrived:
            return
        replica.arrived.discard((kind, n))
        replica.n_begun += 1
        replica.is_busy = True
        self._at(self._now_s + self._work_s(replica, kind, n), ARRIVES, self._end_work, replica, kind, n)

    def _work_s(self, replica: Replica, kind: WorkKind, n: int) -> float:
        n_microbatches = self._timing.step_microbatches
        seconds = self._timing.compute_s / n_microbatches * self._timing.slow.get(replica.pipeline, 1.0)
        seconds *= FORWARD_FRAC if kind == WorkKind.FORWARD else 1 - FORWARD_FRAC
        work = Work(replica.stage, kind, n % n_microbatches, replica.peer, n // n_microbatches)
        return seconds + replica.stalls.before_s(work)

    def _end_work(self, replica: Replica, kind: WorkKind, n: int) -> None:
        if replica.has_left:
            return
        n_done, n_left = divmod(n + 1, self._timing.step_microbatches)
        ends_step = kind == WorkKind.BACKWARD and not n_left
        if not ends_step or self._timing.sends_first:
            self._send(replica, kind, n)
        if not ends_step:
            replica.is_busy = False
            self._begin_work(replica)
            return
        if replica.stage == 0:
            self._outcome.n_done[replica.pipeline] = n_done
        self._match(replica.stage, self._matchers[replica.stage].ready(self._now_s, replica.peer, n_done))

    def _send(self, replica: Replica, kind: WorkKind, n: int) -> None:
        stage = replica.stage + (1 if kind == WorkKind.FORWARD else -1)
        if 0 <= stage < self._timing.n_stages:
            receiver = self._rows[stage][replica.pipeline]
            receiver.arrived.add((kind, n))
            self._begin_work(receiver)

    # -------------------------------------------------------------------------------------------------------- groups

    def _match(self, stage: int, matched: Matched) -> None:
        """Do as a stage's matcher says."""
        if matched.timer:
            at_s, tag = matched.timer
            self._at(at_s, EXPIRES, self._expire, stage, tag)
        for group in matched.groups:
            self._outcome.groups[stage].append((self._now_s, group))
            seconds = self._timing.answer_s + (self._timing.exchange_s if len(group.members) > 1 else 0.0)
            for peer in group.members:
                replica = self._rows[stage][peer % self._timing.n_pipelines]
                self._at(self._now_s + seconds, ARRIVES, self._go_on, replica)

    def _expire(self, stage: int, tag: int) -> None:
        self._match(stage, self._matchers[stage].timer(self._now_s, tag))

    def _go_on(self, replica: Replica) -> None:
        """The replica's group has averaged."""
        if replica.has_left:
            return
        if not self._timing.sends_first:
            self._send(replica, *replica.order[replica.n_begun - 1])
        replica.is_busy = False
        self._begin_work(replica)
        if replica.n_begun == len(replica.order) and not replica.is_busy:
            self._leave(replica)

    def _leave_pipeline(self, pipeline: int) -> None:
        for row in self._rows:
            self._leave(row[pipeline])

    def _leave(self, replica: Replica) -> None:
        if not replica.has_left:
            replica.has_left = True
            self._match(replica.stage, self._matchers[replica.stage].on_left(self._now_s, replica.peer))


def order_of(timing: GroupTiming, stage: int) -> list[tuple[WorkKind, int]]:
    """(kind, number of the microbatch in its pipeline's run) of a replica, from the first Work to the last."""
    n_ahead = timing.n_stages - stage
    n_per_flush = timing.n_microbatches if timing.schedule == FLUSH else timing.n_steps
    order: list[tuple[WorkKind, int]] = []
    for first in range(0, timing.n_steps * timing.step_microbatches, n_per_flush):
        ends = first + n_per_flush
        order += [(WorkKind.FORWARD, n) for n in range(first, min(first + n_ahead, ends))]
        for n in range(first, ends):
            order.append((WorkKind.BACKWARD, n))
            if n + n_ahead < ends:
                order.append((WorkKind.FORWARD, n + n_ahead))
    return order
