"""The parts of a step's time, the share of time in which each peer computes, and the bytes that cross each link.

A part of a step is the time that the step would lose if that part were free. Starting from the full simulation, the
commit, then the exchange of gradients, then the boundary tensors are made free, and each part is the difference to the
simulation before:

  commit_s    coordinator round trip and durable record
  sync_s      exchange of gradient shards, where it is not hidden behind other stages' work
  transfer_s  boundary tensors on their links, where they are not hidden behind computation
  bubble_s    what is left idle without any network, in the mean over peers: fill and drain, uneven stages and devices
  compute_s   Work of every kind, in the mean over peers

The parts add up to step_s, and none is negative where a faster link never makes a step slower. Time that two causes
hide together is charged to the one that is made free last: the order is part of the definition.

Steps are timed from the end of the first one to that of the last, and what peers compute is counted in this time. They
are whole periods: the local steps up to an average, a wave, a period of rebalancing, or what a scheduler's rule takes
to repeat. With delayed updates a step's Work is done before the step before it has ended. So as many steps more are
simulated as are under way beside one, and the last ones that are timed have others behind them, like those in the
middle of a run.
"""

import math
import statistics
from collections import defaultdict
from dataclasses import asdict, dataclass

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import Report, StepReport
from jaxdt.protocol.trace import step_of
from jaxdt.run.work import Work
from jaxdt.sim.predict import WARM_UP_STEPS, TimedSpan, simulate
from jaxdt.sim.scenario import Scenario, without


class Totals:
    """A Recorder (jaxdt.sim.sim_peer) that keeps sums only, over all steps from `first_step` on, or `n_steps` of them:
    seconds of Work, and payload bytes per directed pair."""

    def __init__(self, first_step: int = WARM_UP_STEPS, n_steps: float = math.inf):
        self._first_step = first_step
        self._end = first_step + n_steps
        self.busy_s: dict[int, float] = defaultdict(float)
        self.n_bytes: dict[tuple[int, int], int] = defaultdict(int)

    def run(self, peer: int, start_s: float, seconds: float, work: Work) -> None:
        assert work.step is not None  # all Work that runs belongs to a step
        if self._first_step <= work.step < self._end:
            self.busy_s[peer] += seconds

    def send(self, peer: int, now_s: float, dst: int, key: ev.Key | ev.SliceKey | ev.StateKey, n_bytes: int) -> None:
        if self._first_step <= step_of(key) < self._end:
            self.n_bytes[peer, dst] += n_bytes

    def recv(self, peer: int, now_s: float, src: int, key: ev.Key | ev.SliceKey | ev.StateKey) -> None:
        """Bytes are counted by `send`."""

    def report(self, peer: int, now_s: float, report: Report) -> None:
        """Reports are read from the outcome."""


class TimedSteps(Totals):
    """The totals of the steps of a span, and the times when peers compute from its beginning to its end. The bytes of
    replicas that may differ are those between these two instants, since a group belongs to no step."""

    def __init__(self, span: TimedSpan):
        super().__init__(span.n_before, span.n_steps)
        self._by_row = span.by_row
        self._spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._ends_s: dict[int, float] = {}  # step -> when it ended

    def run(self, peer: int, start_s: float, seconds: float, work: Work) -> None:
        super().run(peer, start_s, seconds, work)
        if self._first_step - 1 in self._ends_s:
            self._spans[peer].append((start_s, start_s + seconds))

    def send(self, peer: int, now_s: float, dst: int, key: ev.Key | ev.SliceKey | ev.StateKey, n_bytes: int) -> None:
        if not self._by_row:
            super().send(peer, now_s, dst, key, n_bytes)
        elif self._first_step - 1 in self._ends_s and self._end - 1 not in self._ends_s:
            self.n_bytes[peer, dst] += n_bytes

    def report(self, peer: int, now_s: float, report: Report) -> None:
        if isinstance(report, StepReport):
            self._ends_s.setdefault(report.step, now_s)

    @property
    def _limits_s(self) -> tuple[float, float]:
        return self._ends_s[self._first_step - 1], self._ends_s[int(self._end) - 1]

    @property
    def seconds(self) -> float:
        """The seconds of all timed steps together."""
        first_s, last_s = self._limits_s
        return last_s - first_s

    def computes_s(self, peer: int) -> float:
        """The seconds for which a peer computes. Work at the same time counts once: a device does one after the
        other."""
        busy_s, (free_s, last_s) = 0.0, self._limits_s
        for start_s, end_s in sorted(self._spans[peer]):
            until_s = min(end_s, last_s)
            busy_s += max(0.0, until_s - max(start_s, free_s))
            free_s = max(free_s, until_s)
        return busy_s


@dataclass(frozen=True)
class Parts:
    """The parts of a step in seconds; the module text defines them."""

    compute_s: float
    bubble_s: float
    transfer_s: float
    sync_s: float
    commit_s: float

    @property
    def step_s(self) -> float:
        return sum(asdict(self).values())


@dataclass(frozen=True)
class TimeBreakdown:
    """Means over `n_steps`, periods of `n_period`: the parts of a step, the busy share of each peer, payload bytes per
    directed pair."""

    parts: Parts
    utilisation: dict[int, float]
    n_bytes: dict[tuple[int, int], float]
    n_steps: int
    n_period: int

    @property
    def step_s(self) -> float:
        return self.parts.step_s

    @property
    def utilisation_mean(self) -> float:
        return statistics.fmean(self.utilisation.values())


def break_down_step(scenario: Scenario, n_steps: int) -> TimeBreakdown:
    """Simulate a first step and n_steps more, or more than these if they are no whole periods, and those under way
    beside them, four times, and return the means over those steps."""
    span = scenario.span(n_steps)
    config, conditions = scenario.quiet(span.n_in_all), scenario.conditions()
    totals = TimedSteps(span)
    undelayed = TimedSteps(span)
    n_steps = span.n_steps

    def step_s(trace: TimedSteps | None, free: tuple[str, ...] = ()) -> float:
        return span.step_s(simulate(config, scenario.plan, without(conditions, free), trace))

    full_s = step_s(totals)
    no_commit_s = step_s(None, ("commit",))
    no_sync_s = step_s(None, ("commit", "sync"))
    no_network_s = step_s(undelayed, ("commit", "sync", "transfer"))
    compute_s = statistics.fmean(undelayed.computes_s(peer) for peer in scenario.peers) / n_steps
    parts = Parts(
        compute_s=compute_s,
        bubble_s=no_network_s - compute_s,
        transfer_s=no_sync_s - no_network_s,
        sync_s=no_commit_s - no_sync_s,
        commit_s=full_s - no_commit_s,
    )
    utilisation = {peer: totals.computes_s(peer) / totals.seconds for peer in sorted(scenario.peers)}
    n_bytes = {pair: n / n_steps for pair, n in sorted(totals.n_bytes.items())}
    return TimeBreakdown(parts, utilisation, n_bytes, n_steps, span.n_period)
