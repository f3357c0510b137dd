"""Replays node-count traces of days on a run that is only a number of peers for each stage (SWARM Sec. 4.4).

All peers and stages are alike. Throughput is that of the smallest stage. The best possible throughput is the number of
peers divided by the number of stages, rounded down. Queues are those of a balanced pipeline: every peer of the smallest
stages computes all the time, and the microbatches that nobody computes wait there; a peer of another stage holds only
what it computes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.run.errors import BadInput
from jaxdt.wiring.rebalance import Table, decide

IN_FLIGHT = 4  # microbatches of the run, divided by its peers
RANDOM, SMALLEST = "random", "smallest"
HOUR_S = 3600.0


def queues(counts: Sequence[int]) -> Table:
    """The load reports of the peers of stages with `counts` peers. Peers are numbered from 0, stage by stage."""
    rate = min(counts)
    n_smallest = sum(n == rate for n in counts)
    waiting = (IN_FLIGHT * sum(counts) - rate * (len(counts) - n_smallest)) / n_smallest if rate else 0.0
    table = []
    first = 0
    for n in counts:
        queue = waiting if n == rate else float(rate)
        table.append({peer: ev.Load(queue / n, rate / n) for peer in range(first, first + n)})
        first += n
    return table


def rebalanced(counts: Sequence[int], n_moves: int = 1) -> list[int]:
    """The numbers of peers after the moves of one period."""
    after = list(counts)
    for move in decide(queues(after), n_moves):
        after[move.src] -= 1
        after[move.dst] += 1
    return after


@dataclass(frozen=True)
class Rules:
    """How a run reacts to a trace.

    period_s: seconds between moves; 0 for no moves.
    join: the stage that a newcomer joins, RANDOM or SMALLEST.
    n_moves: moves a period.
    least: the run begins when there are so many peers a stage.
    """

    n_stages: int
    period_s: float
    join: str
    n_moves: int = 1
    least: int = 4


@dataclass(frozen=True)
class Replay:
    """A run from `began_s` to `end_s`: its throughput and the best possible one from each moment `t_s` on."""

    began_s: float
    end_s: float
    t_s: tuple[float, ...]
    throughput: tuple[int, ...]
    best: tuple[int, ...]

    def share(self, lo_s: float = 0.0, hi_s: float = float("inf")) -> float:
        """Throughput between two moments as a fraction of the best possible one."""
        ends = (*self.t_s[1:], self.end_s)
        spans = [max(0.0, min(end, hi_s) - max(t_s, lo_s)) for t_s, end in zip(self.t_s, ends, strict=True)]
        done = sum(seconds * throughput for seconds, throughput in zip(spans, self.throughput, strict=True))
        possible = sum(seconds * best for seconds, best in zip(spans, self.best, strict=True))
        return done / possible if possible else 1.0

    @property
    def shares(self) -> tuple[float, float, float]:
        """The fraction overall, in the first hour, and in the last hour."""
        return self.share(), self.share(hi_s=self.began_s + HOUR_S), self.share(lo_s=self.end_s - HOUR_S)


def replay(trace: Sequence[tuple[float, int]], end_s: float, times: int, rules: Rules, seed: int) -> Replay:
    """Replay a trace of (second, nodes from then on) with `times` as many nodes, from the first moment that has
    `rules.least` nodes a stage. A leaving peer is of a random stage. BadInput if the trace never has so many nodes."""
    n_stages = rules.n_stages
    rng = random.Random(f"counts {seed}")
    least = rules.least * n_stages
    first = next((i for i, (_, n) in enumerate(trace) if n * times >= least), None)
    if first is None:
        raise BadInput(f"trace: never has the {least} nodes that {n_stages} stages begin with")
    began_s = trace[first][0]
    nodes = trace[first][1] * times
    counts = [nodes // n_stages + (s < nodes % n_stages) for s in range(n_stages)]
    changes = [(t_s, n * times) for t_s, n in trace[first + 1 :]] + [(end_s, None)]
    now_s = began_s
    moments: list[tuple[float, int, int]] = []  # (t_s, throughput, best)

    def record(t_s: float) -> None:
        moments.append((t_s, min(counts), sum(counts) // n_stages))

    record(began_s)
    for t_s, n in changes:
        for tick_s in _ticks(began_s, now_s, t_s, rules.period_s):
            after = rebalanced(counts, rules.n_moves)
            if after == counts:
                break  # nothing moves before the next change
            counts = after
            record(tick_s)
        now_s = t_s
        if n is not None:
            _change(counts, n - sum(counts), rules.join, rng)
            record(t_s)
    at_s, throughput, best = zip(*moments, strict=True)
    return Replay(began_s, end_s, at_s, throughput, best)


def _ticks(began_s: float, lo_s: float, hi_s: float, period_s: float) -> list[float]:
    """The ends of the periods after lo_s and up to hi_s."""
    if not period_s:
        return []
    first, last = (int((t_s - began_s) // period_s) for t_s in (lo_s, hi_s))
    return [began_s + k * period_s for k in range(first + 1, last + 1)]


def _change(counts: list[int], by: int, join: str, rng: random.Random) -> None:
    """`by` peers join, or -by peers leave."""
    for _ in range(by):
        counts[rng.randrange(len(counts)) if join == RANDOM else counts.index(min(counts))] += 1
    for _ in range(-by):
        counts[rng.choice([stage for stage, n in enumerate(counts) if n])] -= 1
