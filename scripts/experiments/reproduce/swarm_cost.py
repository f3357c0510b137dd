"""SWARM's Table 9: hours and price of reliable data-parallel GPUs and of preemptible ones, in simulation."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.page import bars, span
from experiments.reproduce import swarm_scaling
from experiments.reproduce.counts import HOUR_S, SMALLEST, Rules, replay
from experiments.reproduce.results import Job, Results
from experiments.reproduce.square_cube import BASE_FLOPS, FLOPS
from experiments.reproduce.swarm_fleet import Fleet, step_at_s
from experiments.reproduce.swarm_rebalancing import OWN, TRACES, Recorded, read
from matplotlib.figure import Figure

from jaxdt.run.config import NetConfig
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval
from jaxdt.sim.faults import CRASH, Fault

STAGES = 4
LAYERS, WIDTH, SEQ_LEN, BATCH = 24, 1024, 512, 4096  # ALBERT-Large
FLOP = 6.0  # per parameter and token, as the rates below are counted; their seconds contain recomputation
GBPS, LATENCY_S = 0.5, 0.005
V100, T4 = "V100", "T4"
N_PEERS = {V100: 8, T4: 32}
RELIABLE_HOURS, PAPER_HOURS = 175.4, {V100: 192.6, T4: 140.8}  # Table 9
RELIABLE_USD, PAPER_USD = 1374.0, {V100: 1037.0, T4: 497.8}  # of a whole run
PRICES = (7.834, 5.383, 3.536)  # an hour: 8 reliable V100, 8 preemptible V100, 32 preemptible T4
SHORT, LONG = 56, 224  # microbatches a pipeline that are simulated; a step is linear in them from there on
CRASHES = (0.1, 0.3, 0.5, 0.7, 0.9)  # parts of a step after which a peer is lost
PERIOD_S = 300.0
SECOND_STEP = 1


def t4_flops() -> float:
    """FLOP/s of a T4 by the best case of Table 3, at FLOP per parameter and token."""
    wide = GPTConfig(1, swarm_scaling.WIDTH, 1, 4 * swarm_scaling.WIDTH, swarm_scaling.SEQ_LEN, 1, activation="geglu")
    return FLOP * wide.facts.layers[0].n_params * wide.max_len / swarm_scaling.layer_s()


@dataclass(frozen=True)
class Rate:
    """FLOP/s of both GPUs, with the name of their origin. `factor` of the rates at width 4096."""

    name: str
    factor: float

    def flops(self, gpu: str) -> float:
        return self.factor * (FLOPS if gpu == V100 else t4_flops())

    def sample_s(self, gpu: str) -> float:
        """Seconds of a sequence on one GPU: forward, recomputation and backward."""
        block = GPTConfig(1, WIDTH, 1, 4 * WIDTH, SEQ_LEN, 1).facts.layers[0].n_params
        return LAYERS * FLOP * block * SEQ_LEN / self.flops(gpu)


RATES = (Rate("the rate at width 4096", 1.0), Rate("the rate at width 768", BASE_FLOPS / FLOPS))


def fleet(rate: Rate, gpu: str, n_stages: int, n_pipelines: int, wiring: str = "swarm") -> Fleet:
    return Fleet(
        n_stages=n_stages,
        n_pipelines=n_pipelines,
        d_model=WIDTH,
        n_sequences=1,
        codec="none",
        compute_s=rate.sample_s(gpu) / n_stages,
        latency_s=LATENCY_S,
        gbps=GBPS,
        wiring=wiring,
        synced=True,
        seq_len=SEQ_LEN,
        n_layers=STAGES,
    )


def step_s(machines: Fleet, results: Results) -> float:
    """Seconds of a step of BATCH sequences."""
    return step_at_s(machines, BATCH / machines.n_pipelines, SHORT, LONG, results)


def loss_s(rate: Rate, gpu: str, share: int, results: Results) -> float:
    """Additional seconds of a step in which one peer is lost, compared with a step that has all peers before the moment
    of the loss and lacks that one after it."""
    whole = fleet(rate, gpu, STAGES, N_PEERS[gpu] // STAGES)
    net = NetConfig()

    def second_s(*faults: Fault) -> float:
        return results.get(whole.job(share, faults, net))[SECOND_STEP]

    calm_s = results.get(whole.job(share, net=net))
    less_s = second_s(Fault(calm_s[0] / 2, CRASH, 1))
    extra = []
    for part in CRASHES:
        stormy_s = second_s(Fault(calm_s[0] + part * calm_s[SECOND_STEP], CRASH, 1))
        extra.append(stormy_s - part * calm_s[SECOND_STEP] - (1 - part) * less_s)
    return statistics.fmean(extra)


@dataclass(frozen=True)
class Steps:
    """Seconds of a whole step.

    smallest_s: with stages, by the peers of the smallest one, from 1 on.
    loss_s: additional seconds when a peer is lost, mean over the moments of the loss.
    """

    smallest_s: tuple[float, ...]
    loss_s: float


def simulated(rate: Rate, gpu: str, results: Results) -> Steps:
    n = N_PEERS[gpu] // STAGES
    smallest_s = tuple(step_s(fleet(rate, gpu, STAGES, k), results) for k in range(1, n + 1))
    return Steps(smallest_s, loss_s(rate, gpu, BATCH // n, results))


def parallel_s(rate: Rate, averaged: bool, results: Results) -> float:
    """Seconds of a step on the reliable GPUs, data parallel, with or without the seconds of averaging and commit."""
    return step_s(replace(fleet(rate, V100, 1, N_PEERS[V100], "fixed"), synced=averaged), results)


@dataclass(frozen=True)
class Market:
    """Machines with the availability of a trace. `present`: the mean number of machines that are there. `shares`: by
    seed, the parts of the time in which the smallest stage has 0, 1, 2 and so on peers."""

    name: str
    present: float
    losses_an_hour: float
    shares: tuple[tuple[float, ...], ...]

    def speeds(self, steps: Steps) -> list[float]:
        """Steps per second, by seed."""
        slowdown = 1.0 + self.losses_an_hour / HOUR_S * steps.loss_s
        return [
            sum(part / seconds for part, seconds in zip(share[1:], steps.smallest_s, strict=True)) / slowdown
            for share in self.shares
        ]

    def mean_shares(self) -> list[float]:
        return [statistics.fmean(column) for column in zip(*self.shares, strict=True)]


def market(trace: Recorded, n_peers: int, results: Results) -> Market:
    """The market of a trace. Its largest number of machines stands for `n_peers`; the losses per machine and hour are
    those of the trace."""
    job = Job(f"{trace.label} n_peers={n_peers} period_s={PERIOD_S:g}", 0, partial(_market, trace, n_peers))
    present, losses_an_hour, *values = results.get(job)
    n_shares = n_peers // STAGES + 1
    shares = tuple(tuple(values[i : i + n_shares]) for i in range(0, len(values), n_shares))
    return Market(trace.name, present, losses_an_hour, shares)


def _market(trace: Recorded, n_peers: int) -> list[float]:
    """The numbers of a market: present, losses_an_hour, then the shares of each seed."""
    most = max(n for _, n in trace.counts)
    scaled = replace(trace, counts=tuple((t_s, round(n_peers * n / most)) for t_s, n in trace.counts))
    ends = [t_s for t_s, _ in trace.counts[1:]] + [trace.end_s]
    spans = [end - t_s for (t_s, _), end in zip(trace.counts, ends, strict=True)]
    node_hours = sum(s * n for s, (_, n) in zip(spans, trace.counts, strict=True)) / HOUR_S
    leaves = sum(max(0, a - b) for (_, a), (_, b) in zip(trace.counts, trace.counts[1:], strict=False))
    rules = Rules(STAGES, PERIOD_S, SMALLEST, least=n_peers // STAGES)
    shares: list[float] = []
    began_s = 0.0
    for seed in SEEDS:
        run = replay(scaled.counts, scaled.end_s, 1, rules, seed)
        seconds = [0.0] * (n_peers // STAGES + 1)
        for n, t_s, end in zip(run.throughput, run.t_s, (*run.t_s[1:], run.end_s), strict=True):
            seconds[n] += end - t_s
        shares += [s / sum(seconds) for s in seconds]
        began_s = run.began_s  # the same for all seeds
    present_s = sum(s * n for s, (t_s, n) in zip(spans, scaled.counts, strict=True) if t_s >= began_s)
    present = present_s / (trace.end_s - began_s)
    return [present, present * leaves / node_hours, *shares]


@dataclass(frozen=True)
class Line:
    """A row of the table of hours. `over`: of the reliable GPUs' hours, where those average over the same lines, and
    where their averaging takes no time. `usd`: an hour."""

    machines: str
    paper_hours: float | None
    over: tuple[Interval, Interval]
    usd: float
    paper_usd: float | None

    @property
    def hours(self) -> Interval:
        """Hours of the run, where the reliable GPUs average over the same lines."""
        return Interval(self.over[0].mean * RELIABLE_HOURS, self.over[0].half * RELIABLE_HOURS)

    def cells(self) -> list:
        paper = ["", ""] if self.paper_hours is None else [self.paper_hours, self.paper_hours / RELIABLE_HOURS]
        price = "" if self.paper_usd is None else self.paper_usd
        return [
            self.machines,
            *paper,
            str(self.hours),
            *map(str, self.over),
            self.usd,
            self.hours.mean * self.usd,
            price,
        ]


def lines(rate: Rate, traces: Sequence[Recorded], prices: Sequence[float], results: Results) -> list[Line]:
    """The rows of the table of hours."""
    reliable = [parallel_s(rate, averaged, results) for averaged in (True, False)]

    def over(step_times: Sequence[float]) -> tuple[Interval, Interval]:
        same, free = (interval(seconds / parallel for seconds in step_times) for parallel in reliable)
        return same, free

    found = [Line("8 reliable V100, data parallel", RELIABLE_HOURS, over([reliable[0]] * 10), prices[0], RELIABLE_USD)]
    for gpu, usd in zip(N_PEERS, prices[1:], strict=True):
        n = N_PEERS[gpu]
        steps = simulated(rate, gpu, results)
        found.append(Line(f"{n} preemptible {gpu} that all stay", None, over([steps.smallest_s[-1]] * 10), usd, None))
        for trace in traces:
            place = market(trace, n, results)
            times = over([1 / speed for speed in place.speeds(steps)])
            paid = usd * place.present / n
            found.append(Line(f"{n} preemptible {gpu}, {place.name}", PAPER_HOURS[gpu], times, paid, PAPER_USD[gpu]))
    return found


def run(results: Results, traces: Sequence[str] = (), prices: Sequence[float] = PRICES) -> dict[str, Any]:
    """What the page shows. `prices` are those of an hour, as in PRICES."""
    recorded = [read(Path(path)) for path in traces or [TRACES / f"{name}.json" for name in OWN]]
    rows = {rate: lines(rate, recorded, prices, results) for rate in RATES}
    return dict(pictures={"swarm_cost.png": draw(rows)}, recorded=recorded, rows=rows, SEEDS=SEEDS)


def market_rows(traces: Sequence[Recorded], results: Results) -> list[list]:
    rows = []
    for gpu, n in N_PEERS.items():
        for place in (market(trace, n, results) for trace in traces):
            shares = place.mean_shares()
            mean_smallest = sum(n_smallest * share for n_smallest, share in enumerate(shares))
            parts = 100 * shares[0], 100 * shares[-1], mean_smallest
            rows.append([f"{n} {gpu}", place.name, place.present, place.losses_an_hour, *parts])
    return rows


def step_rows(results: Results) -> list[list]:
    rows = []
    for rate in RATES:
        for gpu, n in N_PEERS.items():
            steps = simulated(rate, gpu, results)
            parallel = [parallel_s(rate, averaged, results) for averaged in (True, False)] if gpu == V100 else ["", ""]
            rows.append(
                [f"{n} {gpu}, {rate.name}", *parallel, steps.smallest_s[-1], steps.smallest_s[-2], steps.loss_s]
            )
    return rows


def draw(rows: dict[Rate, list[Line]]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for ax, (rate, found) in zip(figure.subplots(1, len(rows), sharey=True), rows.items(), strict=True):
        names = [line.machines for line in found]
        means, halves = bars([line.hours for line in found])
        ax.barh(names, means, xerr=halves, color="C0", label="ours")
        known = [(line.machines, line.paper_hours) for line in found if line.paper_hours is not None]
        ax.plot([value for _, value in known], [name for name, _ in known], "ko", label="paper")
        ax.set(title=f"hours, {rate.name}")
        ax.tick_params(axis="y", labelsize=7)
        ax.legend(fontsize=8)
    ax.invert_yaxis()
    return figure


def why(rows: dict[Rate, list[Line]]) -> list[str]:
    """Sentences that say where our numbers differ."""
    told = [
        f"The reliable run's {RELIABLE_HOURS} hours are the paper's: how many steps ALBERT needs is not stated, so "
        "only ratios are ours. The paper's curves agree by step (Fig. 8), so all runs have as many steps here."
    ]
    for gpu, paper in PAPER_HOURS.items():
        ranges = []
        for rate, found in rows.items():
            of_traces = [
                line for line in found if line.machines.startswith(f"{N_PEERS[gpu]} preemptible") and line.paper_hours
            ]
            hours = [line.over[0].mean for line in of_traces]
            usd = [line.hours.mean * line.usd / RELIABLE_USD for line in of_traces]
            ranges.append(f"with {rate.name} {span(hours, '.3f')} of the hours and {span(usd, '.3f')} of the price")
        told.append(
            f"{N_PEERS[gpu]} preemptible {gpu}: the paper has {paper / RELIABLE_HOURS:.3f} of the reliable GPUs' hours "
            f"and {PAPER_USD[gpu] / RELIABLE_USD:.3f} of their price, with machines whose availability it does not "
            f"print. Ours on these traces: {'; '.join(ranges)}."
        )
    calm = {rate: next(line for line in found if line.paper_hours is None).over[0].mean for rate, found in rows.items()}
    told.append(
        "Before any loss, stages on 8 V100 take "
        + ", ".join(f"{ratio:.3f} times the reliable hours with {rate.name}" for rate, ratio in calm.items())
        + ". Width 1024 lies between the two widths whose rates are known, so the two tables are the ends of a range."
    )
    told.append("The paper pays for all machines all the time; here only those are paid that are there.")
    return told


def told_rates() -> str:
    return "; ".join(
        f"with {rate.name} {rate.flops(V100) / 1e12:.3g} TFLOP/s for a V100 and {rate.flops(T4) / 1e12:.3g} for a T4, "
        f"so {rate.sample_s(V100):.4f} and {rate.sample_s(T4):.4f} s for a sequence"
        for rate in RATES
    )
