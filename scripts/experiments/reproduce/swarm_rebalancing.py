"""SWARM's Table 5 and Figures 5 and 6: rebalancing on recorded numbers of spot machines."""

import hashlib
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.page import bars
from experiments.reproduce.counts import HOUR_S, RANDOM, SMALLEST, Replay, Rules, replay
from experiments.reproduce.results import Job, Results, described
from matplotlib.figure import Figure

from jaxdt.run.errors import BadInput
from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval
from jaxdt.sim.availability import Counts, load

TRACES = Path(__file__).resolve().parents[3] / "configs/reproduce/traces"
OWN = ("bamboo_gcp_v100_us-east1-c_2021-12-10", "bamboo_gcp_a100_us-east1-b_2021-12-10", "bamboo_aws_p3_v100")
PERIODS = {"none": 0.0, "T = 300 s": 300.0, "T = 60 s": 60.0}
PAPER = {"none": (82.7, 99.0, 45.4), "T = 300 s": (95.8, 99.4, 88.9), "T = 60 s": (97.6, 99.8, 91.7)}
STAGES = 4
MANY_STAGES = (4, 8, 16, 32)
MANY_MOVES = (1, 2, 4)
PARTS = ("overall", "first hour", "last hour")


@dataclass(frozen=True)
class Recorded:
    """A node-count trace."""

    name: str
    counts: tuple[tuple[float, int], ...]
    end_s: float

    @property
    def label(self) -> str:
        """The name, with a digest of what is recorded."""
        digest = hashlib.sha256(repr((self.counts, self.end_s)).encode()).hexdigest()
        return f"trace={self.name} sha256={digest[:12]}"


def read(path: Path) -> Recorded:
    """A trace from its file. BadInput for a trace without its duration."""
    counts: Counts = load(path)
    end_s = json.loads(path.read_text()).get("duration_s")
    if type(end_s) not in (int, float) or end_s < counts[-1][0]:
        raise BadInput(f"{path}: duration_s: got {end_s!r}, expected at least the last t_s, {counts[-1][0]}")
    return Recorded(path.stem, tuple(counts), end_s)


@dataclass(frozen=True)
class Replays:
    """Replays of a trace with `times` as many nodes, one per seed."""

    trace: Recorded
    rules: Rules
    times: int = 1

    def shares(self, results: Results) -> list[list[float]]:
        """Throughput in percent of the optimum, one value per seed: overall, first hour, last hour."""
        values = results.get(self.job())
        return [values[i :: len(PARTS)] for i in range(len(PARTS))]

    def overall(self, results: Results) -> Interval:
        """Throughput in percent of the optimum."""
        return interval(self.shares(results)[0])

    def job(self) -> Job:
        """Its values: the parts of a seed, then those of the next."""
        n_changes = len(self.trace.counts) * self.times * len(SEEDS)
        inputs = f"{self.trace.label} {described(self.rules)} times={self.times}"
        return Job(inputs, n_changes, self._shares)

    def _shares(self) -> list[float]:
        return [100 * share for seed in SEEDS for share in self.replay(seed).shares]

    def replay(self, seed: int) -> Replay:
        return replay(self.trace.counts, self.trace.end_s, self.times, self.rules, seed)


def ahead(trace: Recorded, results: Results) -> float:
    """The part of the time in which the run without rebalancing is faster than that with T = 300 s and the same seed,
    both with random joins."""
    job = Job(f"{trace.label} ahead", 2 * len(trace.counts) * len(SEEDS), partial(_ahead, trace))
    return statistics.fmean(results.get(job))


def _ahead(trace: Recorded) -> list[float]:
    fractions = []
    without, rebalanced = (Replays(trace, Rules(STAGES, period_s, RANDOM)) for period_s in (0.0, 300.0))
    for seed in SEEDS:
        one, other = without.replay(seed), rebalanced.replay(seed)
        at = sorted({*one.t_s, *other.t_s, one.end_s})
        better_s = sum(b - a for a, b in itertools.pairwise(at) if _throughput(one, a) > _throughput(other, a))
        fractions.append(better_s / (one.end_s - one.began_s))
    return fractions


def _throughput(run: Replay, t_s: float) -> int:
    """The throughput of a run at a moment."""
    return next(x for x, from_s in zip(reversed(run.throughput), reversed(run.t_s), strict=True) if from_s <= t_s)


def run(results: Results, traces: Sequence[str] = ()) -> dict[str, Any]:
    """What the page shows. `traces`: files of node counts; by default the committed ones."""
    recorded = [read(Path(path)) for path in traces or [TRACES / f"{name}.json" for name in OWN]]
    groups = [(trace, join, times) for trace in recorded for join in (RANDOM, SMALLEST) for times in (1, 5)]
    results.fill(
        Replays(trace, Rules(STAGES, period_s, join), times).job()
        for trace, join, times in groups
        for period_s in PERIODS.values()
    )
    stages = [
        [trace.name, join, n, *(Replays(trace, Rules(n, period_s, join), n // STAGES) for period_s in (0.0, 300.0))]
        for trace in recorded
        for join in (RANDOM, SMALLEST)
        for n in MANY_STAGES
    ]
    stages = [[*row[:3], *(runs.overall(results) for runs in row[3:])] for row in stages]
    moves = [
        [trace.name, *(Replays(trace, Rules(32, 300.0, RANDOM, n), 8).overall(results) for n in MANY_MOVES)]
        for trace in recorded
    ]
    pictures = {"figure5.png": draw_fig5(recorded[0]), "figure6.png": draw_fig6(stages)}
    rows = [row for group in groups for row in table5_rows(*group, results)]
    told = last_hours(groups, results), without_ahead(recorded, results)
    found = dict(moves=moves, recorded=recorded, rows=rows, stages=stages, told=told)
    return found | dict(pictures=pictures, **orders_kept(groups, results), SEEDS=SEEDS)


def table5_rows(trace: Recorded, join: str, times: int, results: Results) -> list[list]:
    """The rows of Table 5 for one trace, way to join and number of nodes."""
    rows = []
    for rule, period_s in PERIODS.items():
        shares = Replays(trace, Rules(STAGES, period_s, join), times).shares(results)
        parts = (str(interval(values)) for values in shares)
        rows.append([trace.name, join, times, rule, *parts, " / ".join(map(str, PAPER[rule]))])
    return rows


def orders_kept(groups: Sequence[tuple[Recorded, str, int]], results: Results) -> dict[str, Any]:
    """The number of cases in which the order of the rules is the paper's."""
    by_mean = by_interval = 0
    fastest = []
    for trace, join, times in groups:
        runs = [Replays(trace, Rules(STAGES, period_s, join), times) for period_s in PERIODS.values()]
        none, slow, fast = ([*run.shares(results)[0]] for run in runs)
        gains = [interval(b - a for a, b in zip(*pair, strict=True)) for pair in ((none, slow), (slow, fast))]
        by_mean += all(gain.mean >= 0 for gain in gains)
        by_interval += all(gain.low > 0 for gain in gains)
        fastest.append(statistics.fmean(fast))
    return dict(by_interval=by_interval, by_mean=by_mean, fastest=fastest, groups=groups)


def last_hours(groups: Sequence[tuple[Recorded, str, int]], results: Results) -> str:
    """One line about the last hour with T = 300 s."""
    rules = [Replays(trace, Rules(STAGES, 300.0, join), times) for trace, join, times in groups]
    least = min(statistics.fmean(runs.shares(results)[-1]) for runs in rules)
    return (
        f"The paper's last hour reaches {PAPER['T = 300 s'][-1]} % with T = 300 s; ours reaches at least {least:.1f} % "
        "in all cases. The paper's trace must have had more coming and going then."
    )


def without_ahead(recorded: list[Recorded], results: Results) -> str:
    """One line about the times at which the run without rebalancing is ahead."""
    shares = ", ".join(f"{100 * ahead(trace, results):.1f} % ({trace.name})" for trace in recorded)
    return (
        f"The run without rebalancing is ahead of T = 300 s for {shares} of the time (the paper: about 4.5 %): both "
        "draw who leaves from the same seed, but not the same peers."
    )


def draw_fig5(trace: Recorded) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ax = figure.subplots()
    for rule, period_s in PERIODS.items():
        run = Replays(trace, Rules(STAGES, period_s, RANDOM)).replay(SEEDS.start)
        ax.step([(t - run.began_s) / HOUR_S for t in run.t_s], run.throughput, where="post", label=rule, lw=1)
    ax.step([(t - run.began_s) / HOUR_S for t in run.t_s], run.best, "k:", where="post", label="optimum", lw=1)
    ax.set(xlabel="hours", ylabel="peers in the smallest stage", ylim=(0, None))
    ax.legend(fontsize=8)
    return figure


def draw_fig6(rows: list[list]) -> Figure:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, join in zip(axes, (RANDOM, SMALLEST), strict=True):
        for index, name in enumerate(dict.fromkeys(row[0] for row in rows)):
            lines = [row for row in rows if row[:2] == [name, join]]
            for column, style in ((3, "--"), (4, "-")):
                label = f"{name}, {'none' if column == 3 else 'T = 300 s'}"
                stages, found = [row[2] for row in lines], bars([row[column] for row in lines])
                ax.errorbar(stages, *found, fmt=f"C{index}o{style}", label=label, ms=3)
        ax.set(xscale="log", xlabel="stages", title=f"who joins: {join} stage", ylim=(0, 102))
        ax.set_xticks(MANY_STAGES, [str(n) for n in MANY_STAGES])
        ax.minorticks_off()
    axes[0].set(ylabel="% of the optimum")
    axes[1].legend(fontsize=7, handlelength=4)
    return figure
