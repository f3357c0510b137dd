"""SWARM's Table 2: what latency costs stochastic wiring and pipelines, at equal depths; and what unequal peers cost."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.page import bars, span
from experiments.reproduce.relay import boundary_s
from experiments.reproduce.results import Results
from experiments.reproduce.swarm_fleet import SLOWDOWN, Fleet, each_s
from matplotlib.figure import Figure

from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval, paired_ratio

STAGES = PIPELINES = 4
PEERS = STAGES * PIPELINES
GBPS = 0.5
RACK_S, ADDED_S, JITTER_S = 0.0005, 0.05, 0.1  # one way; 100 +- 50 ms is 50 ms and 0 to 100 ms more
MODELS = {  # width, sequences of a microbatch, codec, compute seconds of a stage and microbatch
    "GPT-3": (12288, 1, "none", 0.469),
    "xxlarge": (4096, 4, "none", 4 * 0.0575),
    "Ours": (4096, 1, "int8-dynamic", 0.702),
}
PRINTED_MIN = {  # minutes of a batch without and with latency
    "GPT-3": {"swarm": (168.3, 186.7), "1F1B": (163.3, 216.1), "GPipe": (164.5, 218.4)},
    "xxlarge": {"swarm": (44.2, 48.2), "1F1B": (40.8, 105.5), "GPipe": (40.1, 108.8)},
    "Ours": {"swarm": (432.2, 452.9), "1F1B": (408.5, 569.2), "GPipe": (420.0, 602.1)},
}
SEQUENCES = 6250  # of a batch, as printed
OURS_LAYERS = 48
SYSTEMS = SWARM, ONE_F_ONE_B, GPIPE = ("swarm", "1F1B", "GPipe")
IN_FLIGHT = (16, 64, 128)  # microbatches of the run between their first forward and their last backward
EQUAL = 64  # swarm's default, four a peer
TRANSFERS = BESIDE, BLOCKING = ("beside", "sender blocks")
SHORT, LONG = 40, 120  # microbatches per pipeline between which a step's time is a straight line
DIVISIBLE = (105, 210)  # the same, where pipelines of unequal speed divide 420 and 840 microbatches without a remainder
SLOW_PROB = 0.25
PLACEMENTS = EVEN, BY_SPEED, SORTED = ("1F1B, equal shares", "1F1B, shares by speed", "1F1B, sorted, shares by speed")


@dataclass(frozen=True)
class Case:
    """A system on a model. in_flight: microbatches of the run under way. far: with the added latency."""

    model: str
    system: str
    in_flight: int
    transfers: str
    far: bool

    def fleet(self, seed: int) -> Fleet:
        """The machines, with a seed where something is random: the router's ties and the jitter."""
        width, n_sequences, codec, compute_s = MODELS[self.model]
        fleet = Fleet(
            n_stages=STAGES,
            n_pipelines=PIPELINES,
            d_model=width,
            n_sequences=n_sequences,
            codec=codec,
            compute_s=compute_s,
            latency_s=RACK_S + ADDED_S if self.far else RACK_S,
            gbps=GBPS,
            jitter_s=JITTER_S if self.far else 0.0,
            blocking=self.transfers == BLOCKING,
        )
        if self.system == SWARM:
            return replace(fleet, wiring="swarm", window=self.in_flight, seed=seed)
        if self.far and self.transfers == BESIDE:
            fleet = replace(fleet, seed=seed)
        if self.system == GPIPE:
            return replace(fleet, schedule="gpipe")
        return replace(fleet, depth=self.in_flight // PEERS)

    @property
    def flush(self) -> int:
        """Microbatches for which GPipe fills and drains a pipeline."""
        return self.in_flight // PIPELINES

    def sizes(self) -> tuple[int, ...]:
        """Microbatches per pipeline of the steps that are simulated."""
        return (self.flush,) if self.system == GPIPE else (SHORT, LONG)

    def microbatch_s(self, seed: int, results: Results) -> float:
        """Seconds of a microbatch in a pipeline, or of as many of the whole run as there are pipelines."""
        fleet = self.fleet(seed)
        if self.system == GPIPE:
            return fleet.step_s(self.flush, results) / self.flush
        return each_s(fleet, SHORT, LONG, results)

    def seconds(self, results: Results) -> list[float]:
        """microbatch_s of each seed."""
        return [self.microbatch_s(seed, results) for seed in SEEDS]


def latency_ratio(case: Case, results: Results) -> Interval:
    """Time with the added latency over time without."""
    return paired_ratio(replace(case, far=True).seconds(results), replace(case, far=False).seconds(results))


def all_cases() -> list[Case]:
    return [
        Case(model, system, in_flight, transfers, far)
        for transfers in TRANSFERS
        for in_flight in IN_FLIGHT
        for model in MODELS
        for system in SYSTEMS
        for far in (False, True)
    ]


# --------------------------------------------------------------------------------------------------- unequal peers


def slow_peers(seed: int) -> tuple[int, ...]:
    """The slow peers: each peer is slow with probability SLOW_PROB."""
    rng = random.Random(f"slow {seed}")
    return tuple(peer for peer in range(PEERS) if rng.random() < SLOW_PROB)


def n_slow(slow: Sequence[int]) -> list[int]:
    """Slow peers of each stage. Peers are numbered pipeline by pipeline."""
    return [sum(peer % STAGES == stage for peer in slow) for stage in range(STAGES)]


def by_speed(slow: Sequence[int]) -> tuple[int, ...]:
    """The same number of slow peers in each stage, in as few pipelines as possible."""
    return tuple(sorted((PIPELINES - 1 - i) * STAGES + stage for stage, n in enumerate(n_slow(slow)) for i in range(n)))


def service_s(model: str, slowdown: float) -> float:
    """Seconds between the microbatches of a pipeline that computes all the time or, if that takes longer, sends: one
    activation and one gradient over the line of each peer in the middle."""
    width, n_sequences, codec, compute_s = MODELS[model]
    return max(slowdown * compute_s, 2 * n_sequences * boundary_s(width, codec))


def weights(model: str, slow: Sequence[int]) -> tuple[int, ...]:
    """Shares of the pipelines by the speed of their slowest peer."""
    fast_s, slow_s = service_s(model, 1.0), service_s(model, SLOWDOWN)
    is_slow = [any(peer // STAGES == pipeline for peer in slow) for pipeline in range(PIPELINES)]
    return tuple(round(1000 * fast_s / slow_s) if late else 1000 for late in is_slow)


def unequal(model: str, system: str, far: bool, seed: int) -> Fleet:
    """A fleet with slow peers. `system`: SWARM or one of PLACEMENTS."""
    name = SWARM if system == SWARM else ONE_F_ONE_B
    slow = by_speed(slow_peers(seed)) if system == SORTED else slow_peers(seed)
    fleet = replace(Case(model, name, EQUAL, BESIDE, far).fleet(seed), slow=slow)
    return replace(fleet, weights=weights(model, slow)) if system in (BY_SPEED, SORTED) else fleet


def bound_s(model: str, seed: int) -> float:
    """Seconds of a microbatch that no system can fall below: the stage with the most slow peers computes, or lines are
    busy, all the time."""
    fast_s, slow_s = service_s(model, 1.0), service_s(model, SLOWDOWN)
    most = max(n_slow(slow_peers(seed)))
    return PIPELINES / ((PIPELINES - most) / fast_s + most / slow_s)


def unequal_seconds(model: str, system: str, far: bool, results: Results) -> list[float]:
    """Seconds of a microbatch in a fleet with slow peers, of each seed."""
    return [each_s(unequal(model, system, far, seed), *DIVISIBLE, results) for seed in SEEDS]


@dataclass(frozen=True)
class Unequal:
    """A row of the table of unequal peers: bounds and seconds of a microbatch by system, one value per seed."""

    model: str
    far: bool
    bounds: list[float]
    seconds: dict[str, list[float]]

    def over(self, system: str) -> Interval:
        """Time of `system` over swarm's."""
        return paired_ratio(self.seconds[system], self.seconds[SWARM])

    def cells(self) -> list:
        times = [str(interval(self.seconds[system])) for system in (*PLACEMENTS, SWARM)]
        ratios = [str(self.over(system)) for system in PLACEMENTS]
        return [self.model, "100 +- 50 ms" if self.far else "none", str(interval(self.bounds)), *times, *ratios]


def unequal_rows(results: Results) -> list[Unequal]:
    rows = []
    for model in MODELS:
        for far in (False, True):
            bounds = [bound_s(model, seed) for seed in SEEDS]
            seconds = {system: unequal_seconds(model, system, far, results) for system in (SWARM, *PLACEMENTS)}
            rows.append(Unequal(model, far, bounds, seconds))
    return rows


# -------------------------------------------------------------------------------------------------------- the page


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    results.fill(case.fleet(seed).job(size) for case in all_cases() for seed in SEEDS for size in case.sizes())
    results.fill(
        unequal(model, system, far, seed).job(size)
        for model in MODELS
        for system in (SWARM, *PLACEMENTS)
        for far in (False, True)
        for seed in SEEDS
        for size in DIVISIBLE
    )
    rows = unequal_rows(results)
    depths = [depth_row(model, n, results) for n in IN_FLIGHT for model in MODELS]
    pictures = {"swarm_table2.png": draw(rows, results)}
    return dict(pictures=pictures, depths=depths, rows=rows, **readings(), **told_delays(results), SEEDS=SEEDS)


def depth_row(model: str, in_flight: int, results: Results) -> list:
    """A row of the table of equal depths."""
    swarm, pipelines = (Case(model, system, in_flight, BESIDE, False) for system in (SWARM, ONE_F_ONE_B))
    over = [faster(model, in_flight, far, results) for far in (False, True)]
    return [in_flight, model, *(str(latency_ratio(case, results)) for case in (swarm, pipelines)), *map(str, over)]


def faster(model: str, in_flight: int, far: bool, results: Results) -> Interval:
    """Time of 1F1B over that of swarm wiring, both with transfers beside computation."""
    times = [Case(model, system, in_flight, BESIDE, far).seconds(results) for system in (ONE_F_ONE_B, SWARM)]
    return paired_ratio(*times)


def ratio_rows(results: Results) -> list[list]:
    """Time with latency over time without, beside the paper's."""
    rows = []
    for model in MODELS:
        for system in SYSTEMS:
            cases = (Case(model, system, n, transfers, False) for transfers in TRANSFERS for n in IN_FLIGHT)
            rows.append([model, system, printed_ratio(model, system), *(str(latency_ratio(c, results)) for c in cases)])
    return rows


def second_rows(results: Results) -> list[list]:
    """Seconds of a microbatch of all systems by all models."""
    rows = []
    for transfers in TRANSFERS:
        for system in SYSTEMS:
            for n in IN_FLIGHT:
                cells = []
                for model in MODELS:
                    times = [Case(model, system, n, transfers, far).seconds(results) for far in (False, True)]
                    cells.append(", ".join(str(interval(seconds)) for seconds in times))
                rows.append([system, transfers, n, *cells])
    return rows


def printed_ratio(model: str, system: str) -> float:
    near, far = PRINTED_MIN[model][system]
    return far / near


def each_printed_s(model: str, minutes: float) -> float:
    """Seconds of a sequence in a stage, if each worker's batch has SEQUENCES."""
    return 60 * minutes / (SEQUENCES * PEERS / PIPELINES)


def table1_s(model: str) -> float:
    """Seconds of a sequence in a stage by Table 1's law."""
    _, n_sequences, _, compute_s = MODELS[model]
    return compute_s / n_sequences


def minute_rows() -> list[list]:
    rows = []
    for model, printed in PRINTED_MIN.items():
        each = each_printed_s(model, printed[SWARM][0])
        rows.append([model, printed[SWARM][0], table1_s(model), each / table1_s(model), PEERS * each / table1_s(model)])
    return rows


def readings() -> dict[str, Any]:
    """What the table of minutes says."""
    impossible = [row[0] for row in minute_rows() if row[3] < 1.0]
    least = min(row[4] for row in minute_rows())
    return dict(impossible=impossible, least=least)


def verdict(ratios: Sequence[Interval], than: str = "") -> str:
    """How many ratios to swarm wiring's time are above 1, below 1, and neither, by their intervals."""
    above = sum(ratio.low > 1.0 for ratio in ratios)
    below = sum(ratio.high < 1.0 for ratio in ratios)
    told = f"faster{than} in {above} of {len(ratios)} cases, slower in {below}"
    return f"swarm wiring is {told}, not told apart in {len(ratios) - above - below}"


def depth_sentences(results: Results) -> list[str]:
    """Sentences about the table of equal depths."""
    lines = []
    for n in IN_FLIGHT:
        ratios = [faster(model, n, far, results) for model in MODELS for far in (False, True)]
        times = span([ratio.mean for ratio in ratios], ".3f")
        lines.append(f"{n} in flight: {verdict(ratios, ' than 1F1B')}; 1F1B takes {times} times as long.")
    cost = {
        system: [latency_ratio(Case(model, system, EQUAL, BESIDE, False), results).mean for model in MODELS]
        for system in SYSTEMS
    }
    told = ", ".join(f"{system} {span(values, '.3f')}" for system, values in cost.items())
    agree = sum(swarm < pipe for swarm, pipe in zip(cost[SWARM], cost[ONE_F_ONE_B], strict=True))
    lines.append(
        f"What latency costs at {EQUAL} in flight, transfers beside computation: {told}. It costs swarm wiring less "
        f"than 1F1B, as in the paper, for {agree} of {len(MODELS)} models."
    )
    return lines


def unequal_sentences(rows: Sequence[Unequal]) -> list[str]:
    """Sentences about the table of unequal peers."""
    lines = []
    for system in PLACEMENTS:
        ratios = [row.over(system) for row in rows]
        times = span([ratio.mean for ratio in ratios], ".3f")
        lines.append(f"{system}: {times} times swarm wiring's time; {verdict(ratios)}.")
    gaps = [paired_ratio(row.seconds[SWARM], row.bounds).mean for row in rows]
    lines.append(f"Swarm wiring takes {span(gaps, '.3f')} times the bound.")
    return lines


def delays(model: str, transfers: str, results: Results) -> float:
    """The cost of latency for 1F1B of the usual depth, in added delays a microbatch."""
    near, far = (Case(model, ONE_F_ONE_B, PEERS, transfers, is_far).seconds(results) for is_far in (False, True))
    return (interval(far).mean - interval(near).mean) / ADDED_MEAN_S


def most(system: str, in_flight: int, results: Results) -> float:
    """The most that latency costs a system with transfers beside computation, over the models."""
    return max(latency_ratio(Case(model, system, in_flight, BESIDE, False), results).mean for model in MODELS)


def printed_delays(model: str) -> float:
    """The same cost by the paper's minutes, if each worker's batch has SEQUENCES."""
    near, far = (each_printed_s(model, minutes) for minutes in PRINTED_MIN[model][ONE_F_ONE_B])
    return (far - near) * MODELS[model][1] / ADDED_MEAN_S


def told_delays(results: Results) -> dict[str, Any]:
    """What latency costs in added delays, printed and ours, and SWARM's time over GPipe's."""
    printed = ", ".join(f"{printed_delays(model):.1f}" for model in MODELS)
    blocking, beside = (
        ", ".join(f"{delays(model, transfers, results):.1f}" for model in MODELS) for transfers in (BLOCKING, BESIDE)
    )
    slower = [PRINTED_MIN[model][SWARM][0] / PRINTED_MIN[model][GPIPE][0] for model in MODELS]
    return dict(beside=beside, blocking=blocking, printed=printed, slower=slower)


def draw(rows: Sequence[Unequal], results: Results) -> Figure:
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    above, below = figure.subplots(2, 3)
    for ax, model in zip(above, MODELS, strict=True):
        for i, row in enumerate(row for row in rows if row.model == model):
            means, halves = bars([interval(row.seconds[system]) for system in (*PLACEMENTS, SWARM)])
            label = "100 +- 50 ms" if row.far else "no latency"
            ax.bar([x + 0.4 * (i - 0.5) for x in range(len(means))], means, yerr=halves, width=0.4, label=label)
            ax.axhline(interval(row.bounds).mean, color="k", lw=0.6)
        ax.set_xticks(range(4), ["1F1B", "1F1B,\nby speed", "1F1B,\nsorted", "swarm"])
        ax.set(title=f"{model}, unequal peers, {EQUAL} in flight")
    above[0].set_ylabel("s of a microbatch; line: bound")
    above[0].legend(fontsize=8)
    for ax, model in zip(below, MODELS, strict=True):
        series = {"paper": [printed_ratio(model, system) for system in SYSTEMS]}
        for n in IN_FLIGHT:
            cases = (Case(model, system, n, BESIDE, False) for system in SYSTEMS)
            series[f"ours, {n} in flight"] = [latency_ratio(case, results).mean for case in cases]
        for i, (label, values) in enumerate(series.items()):
            ax.bar([x + 0.2 * (i - 1.5) for x in range(len(values))], values, width=0.2, label=label)
        ax.axhline(1.0, color="k", lw=0.6)
        ax.set_xticks(range(len(SYSTEMS)), SYSTEMS)
        ax.set(title=f"{model}, equal peers")
    below[0].set_ylabel("time with latency / without")
    figure.legend(*below[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return figure


ADDED_MEAN_S = ADDED_S + JITTER_S / 2
