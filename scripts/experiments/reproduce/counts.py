"""A run as numbers of peers per stage, for node-count traces of days (SWARM Sec. 4.4): who comes and goes, who moves.

All peers and stages are alike. Throughput is that of the smallest stage, and the best that so many peers could do is
their number over the stages, rounded down. Queues are those of a balanced pipeline: every peer of the smallest stages
computes all the time and what is on its way waits there; the other stages only hold what they compute.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.protocol.events import Load
from jaxdt.spec.errors import BadInput
from jaxdt.wiring.rebalance import Table, decide

ON_THEIR_WAY = 4  # microbatches per peer, over all stages
RANDOM, SMALLEST = "random", "smallest"
HOUR_S = 3600.0


def queues(counts: Sequence[int]) -> Table:
    """What the peers of stages of such sizes would report; they are numbered through."""
    rate, slowest = min(counts), sum(n == min(counts) for n in counts)
    waiting = (ON_THEIR_WAY * sum(counts) - rate * (len(counts) - slowest)) / slowest if rate else 0.0
    table, first = [], 0
    for n in counts:
        queue = waiting if n == rate else float(rate)
        table.append({peer: Load(queue / n, rate / n) for peer in range(first, first + n)})
        first += n
    return table


def rebalanced(counts: Sequence[int], n_moves: int = 1) -> list[int]:
    """The numbers of peers after one period."""
    after = list(counts)
    for move in decide(queues(after), n_moves):
        after[move.src] -= 1
        after[move.dst] += 1
    return after


@dataclass(frozen=True)
class Rules:
    """`period_s`: 0 if nobody moves. `join`: the stage of who comes, RANDOM or SMALLEST. A run begins when there are
    `least` peers a stage."""

    n_stages: int
    period_s: float
    join: str
    n_moves: int = 1
    least: int = 4


@dataclass(frozen=True)
class Lived:
    """From `began_s` to `end_s`: the throughput from each moment on, and what it could have been at best."""

    began_s: float
    end_s: float
    t_s: tuple[float, ...]
    throughput: tuple[int, ...]
    best: tuple[int, ...]

    def share(self, lo_s: float = 0.0, hi_s: float = float("inf")) -> float:
        """Of what could have been done at best between two moments, what was done."""
        ends = (*self.t_s[1:], self.end_s)
        spans = [max(0.0, min(end, hi_s) - max(t_s, lo_s)) for t_s, end in zip(self.t_s, ends, strict=True)]
        done, best = (sum(s * x for s, x in zip(spans, xs, strict=True)) for xs in (self.throughput, self.best))
        return done / best if best else 1.0

    @property
    def shares(self) -> tuple[float, float, float]:
        """Overall, in the first hour, in the last."""
        return self.share(), self.share(hi_s=self.began_s + HOUR_S), self.share(lo_s=self.end_s - HOUR_S)


def live(trace: Sequence[tuple[float, int]], end_s: float, times: int, rules: Rules, seed: int) -> Lived:
    """A trace of (second, nodes from then on), with `times` as many nodes, from the first moment that has
    `rules.least` nodes a stage. Who leaves is one of a random stage. BadInput if the trace never has so many."""
    n_stages, rng = rules.n_stages, random.Random(f"counts {seed}")
    least = rules.least * n_stages
    first = next((i for i, (_, n) in enumerate(trace) if n * times >= least), None)
    if first is None:
        raise BadInput(f"trace: never has the {least} nodes that {n_stages} stages begin with")
    began_s, nodes = trace[first][0], trace[first][1] * times
    counts = [nodes // n_stages + (s < nodes % n_stages) for s in range(n_stages)]
    changes = [(t_s, n * times) for t_s, n in trace[first + 1 :]] + [(end_s, None)]
    now_s, at, throughput, best = began_s, [began_s], [min(counts)], [sum(counts) // n_stages]

    def note(t_s: float) -> None:
        at.append(t_s)
        throughput.append(min(counts))
        best.append(sum(counts) // n_stages)

    for t_s, n in changes:
        for tick_s in _ticks(began_s, now_s, t_s, rules.period_s):
            after = rebalanced(counts, rules.n_moves)
            if after == counts:
                break  # and nothing will move before the next change
            counts = after
            note(tick_s)
        now_s = t_s
        if n is not None:
            _change(counts, n - sum(counts), rules.join, rng)
            note(t_s)
    return Lived(began_s, end_s, tuple(at), tuple(throughput), tuple(best))


def _ticks(began_s: float, lo_s: float, hi_s: float, period_s: float) -> list[float]:
    """Multiples of the period since the beginning, after lo_s and not after hi_s."""
    if not period_s:
        return []
    first, last = (int((t_s - began_s) // period_s) for t_s in (lo_s, hi_s))
    return [began_s + k * period_s for k in range(first + 1, last + 1)]


def _change(counts: list[int], by: int, join: str, rng: random.Random) -> None:
    """So many peers come, or leave."""
    for _ in range(by):
        counts[rng.randrange(len(counts)) if join == RANDOM else counts.index(min(counts))] += 1
    for _ in range(-by):
        counts[rng.choice([stage for stage, n in enumerate(counts) if n])] -= 1
