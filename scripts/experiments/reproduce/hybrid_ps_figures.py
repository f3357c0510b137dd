"""The hybrid parameter-server paper's Figures 2, 4 and 5: more losses, more machines, other numbers of stages."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from experiments.page import bars
from experiments.reproduce.hybrid_ps_parts.cases import (
    BATCH,
    BY_POWER,
    FP32_BYTES,
    HYBRID_OURS,
    LLAMA,
    NAMES,
    SHAPES,
    SWARM_OURS,
    TASK,
    Batch,
    compute_s,
    fill,
    met,
    runs_of,
    time_s,
)
from experiments.reproduce.hybrid_ps_parts.chains import Static
from experiments.reproduce.hybrid_ps_parts.fleets import ALONE, SLOWDOWN, Fleet, Losses, Network, Site
from experiments.reproduce.hybrid_ps_parts.instances import DISCONNECT_PROB, Cluster
from experiments.reproduce.hybrid_ps_parts.planned import Planned
from experiments.reproduce.hybrid_ps_parts.simulated import DEPTH, System
from experiments.reproduce.results import Results
from matplotlib.figure import Figure

from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval, paired_ratio

SYSTEMS = (HYBRID_OURS, SWARM_OURS, BY_POWER)
Drawn = tuple[Fleet | Planned, Losses | None]

# ------------------------------------------------------------------------------------------------------------- Figure 2

RATES = (0.1, 0.5, 0.9)
RATIOS = {0.2: 3, 0.3: 5, 0.6: 10}  # share of 16 machines -> machines that may fail
GRID_SITES = (Site("A", 0, 3), Site("B", 1, 3), Site(ALONE, 0, 5, SLOWDOWN), Site(ALONE, 1, 5, SLOWDOWN))


def grid(n: int, rate: float, seed: int) -> Drawn:
    return llama(GRID_SITES, seed, Network()), Losses(n, rate, seed)


def llama(sites: tuple[Site, ...], seed: int, network: Network) -> Fleet:
    tokens, width = SHAPES[LLAMA]
    n_bytes = TASK * tokens * width * FP32_BYTES
    return Fleet(sites, compute_s(LLAMA), n_bytes, seed, BATCH // TASK, network)


# ------------------------------------------------------------------------------------------------------------- Figure 4

SIZES = (16, 32, 48)
FAR = Network(((50.0, 150.0), (0.1, 0.3)), ((50.0, 150.0), (0.1, 0.3)))
PROBS = (0.5, 0.9)


def scaled(n: int, seed: int) -> Drawn:
    """n machines: half of them fast and reliable, each far from all others; half of the others may fail, with a
    probability that grows over the networks."""
    fast = tuple(Site(f"V{i}", i % 2, 1) for i in range(n // 2))
    slow = tuple(Site(ALONE, stage, n // 4, SLOWDOWN) for stage in range(2))
    low, high = PROBS
    prob = low + (high - low) * seed / (len(SEEDS) - 1)
    return llama((*fast, *slow), seed, FAR), Losses(n // 4, prob, seed)


# ------------------------------------------------------------------------------------------------------------ the depth

DEPTHS = (2, DEPTH)


def deep(depth: int) -> System:
    return replace(HYBRID_OURS, depth=depth)


# ------------------------------------------------------------------------------------------------------------- Figure 5

STAGES, PAPERS_STAGES = (2, 3, 4), 3
N_UNRELIABLE = 4


def placed(n_stages: int, seed: int) -> Drawn:
    return Planned(Cluster("fp32"), n_stages), Losses(N_UNRELIABLE, DISCONNECT_PROB, seed)


# ----------------------------------------------------------------------------------------------------------- the values


def seconds(system: System | Static, drawn: Sequence[Drawn], results: Results) -> list[float]:
    return [time_s(system, machines, losses, results) for machines, losses in drawn]


def of_grid(system: System | Static, n: int, rate: float, results: Results) -> list[float]:
    return seconds(system, [grid(n, rate, seed) for seed in SEEDS], results)


def of_size(system: System | Static, n: int, results: Results) -> list[float]:
    return seconds(system, [scaled(n, seed) for seed in SEEDS], results)


def of_stages(n_stages: int, results: Results) -> list[float]:
    return seconds(HYBRID_OURS, [placed(n_stages, seed) for seed in SEEDS], results)


def gain(other: System | Static, n: int, rate: float, results: Results) -> Interval:
    """Time of another system over that of the hybrid one."""
    return paired_ratio(of_grid(other, n, rate, results), of_grid(HYBRID_OURS, n, rate, results))


def speedup(system: System | Static, n: int, results: Results) -> Interval:
    """How many times as fast as with the fewest machines."""
    return paired_ratio(of_size(system, SIZES[0], results), of_size(system, n, results))


def simulate(results: Results) -> None:
    """All of it, on all cores."""
    drawn = [grid(n, rate, seed) for n in RATIOS.values() for rate in RATES for seed in SEEDS]
    drawn += [scaled(n, seed) for n in SIZES for seed in SEEDS]
    runs = [(system, *one) for system in SYSTEMS for one in drawn]
    runs += [(HYBRID_OURS, *placed(n, seed)) for n in STAGES for seed in SEEDS]
    systems = [*map(deep, DEPTHS), SWARM_OURS]
    fill(runs + runs_of([Batch(LLAMA, case, system) for case in (1, 3) for system in systems]), results)


# ------------------------------------------------------------------------------------------------------------- the page


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    simulate(results)
    pictures = {"hybrid_ps_figures.png": draw(results)}
    return dict(pictures=pictures, BATCH=BATCH, DEPTH=DEPTH, DISCONNECT_PROB=DISCONNECT_PROB, LLAMA=LLAMA, SEEDS=SEEDS)


def target_rows(results: Results) -> list[list[str]]:
    rows = []
    for n in RATIOS.values():
        by_rate = [gain(SWARM_OURS, n, rate, results).mean for rate in RATES]
        rows.append([f"gain over swarm grows with the rate, {n} may fail", *growth(by_rate)])
    for rate in RATES:
        by_n = [gain(SWARM_OURS, n, rate, results).mean for n in RATIOS.values()]
        rows.append([f"gain over swarm grows with the share that may fail, rate {rate:.0%}", *growth(by_n)])
    most = max(gain(SWARM_OURS, n, rate, results).mean for n in RATIOS.values() for rate in RATES)
    rows.append(["Figure 2, text: up to 1.3 times as fast as swarm", f"{most:.3f}", met(most >= 1.3)])
    last, ideal = speedup(HYBRID_OURS, SIZES[-1], results), SIZES[-1] / SIZES[0]
    near = f"Figure 4: near-linear, read as 80 % of {ideal:g} times with {SIZES[-1]} machines"
    rows.append([near, str(last), met(last.mean >= 0.8 * ideal)])
    for other in SYSTEMS[1:]:
        ratios = [paired_ratio(of_size(other, n, results), of_size(HYBRID_OURS, n, results)).mean for n in SIZES]
        told = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        rows.append([f"Figure 4: faster than {NAMES[other]}, at every size", told, met(min(ratios) > 1)])
    for n in STAGES:
        if n != PAPERS_STAGES:
            ratio = paired_ratio(of_stages(n, results), of_stages(PAPERS_STAGES, results))
            rows.append([f"Figure 5: {PAPERS_STAGES} stages faster than {n}", str(ratio), met(ratio.mean > 1)])
    return rows


def growth(values: Sequence[float]) -> tuple[str, str]:
    return ", ".join(f"{value:.3f}" for value in values), met(all(a < b for a, b in pairwise(values)))


def grid_table(results: Results) -> list[list]:
    rows = []
    for ratio, n in RATIOS.items():
        for rate in RATES:
            minutes = [interval(s / 60 for s in of_grid(system, n, rate, results)) for system in SYSTEMS]
            gains = [gain(other, n, rate, results) for other in SYSTEMS[1:]]
            rows.append([f"{ratio:.0%}: {n}", f"{rate:.0%}", *map(str, minutes), *map(str, gains)])

    return rows


def size_table(results: Results) -> list[list]:
    rows = []
    for n in SIZES:
        found = [speedup(system, n, results) for system in SYSTEMS]
        tasks_per_h = statistics.fmean(3600 * BATCH / s for s in of_size(HYBRID_OURS, n, results))
        rows.append([n, f"{n / SIZES[0]:g}", *map(str, found), f"{tasks_per_h:.0f}"])

    return rows


def stage_table(results: Results) -> list[list]:
    rows = []
    for n in STAGES:
        machines = Planned(Cluster("fp32"), n)
        clean = time_s(HYBRID_OURS, machines, None, results)
        lossy = of_stages(n, results)
        over = paired_ratio(lossy, of_stages(PAPERS_STAGES, results))
        counts = ", ".join(str(len(machines.stage(stage))) for stage in range(n))
        rows.append([n, counts, clean / 60, str(interval(s / 60 for s in lossy)), str(over)])

    return rows


def depth_table(results: Results) -> list[list]:
    rows = []
    for depth in DEPTHS:
        cells = []
        for case in (1, 3):
            minutes, swarm = (Batch(LLAMA, case, one).minutes(results) for one in (deep(depth), SWARM_OURS))
            cells += [str(interval(minutes)), str(paired_ratio(swarm, minutes))]
        rows.append([depth, *cells])

    return rows


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for ratio, n in RATIOS.items():
        found = [gain(SWARM_OURS, n, rate, results) for rate in RATES]
        left.errorbar(RATES, *bars(found), fmt="o-", capsize=3, label=f"{ratio:.0%}")
    left.axhline(1.0, color="k", lw=0.6)
    left.set(xlabel="disconnection rate", ylabel="swarm's time over hybrid's", title="Figure 2, share that may fail")
    left.legend(fontsize=8)
    for system in SYSTEMS:
        found = [speedup(system, n, results) for n in SIZES]
        middle.errorbar(SIZES, *bars(found), fmt="o-", capsize=3, label=NAMES[system])
    middle.plot(SIZES, [n / SIZES[0] for n in SIZES], "k--", lw=0.8, label="linear")
    middle.set(xlabel="machines", ylabel=f"speed over that of {SIZES[0]}", title="Figure 4")
    middle.legend(fontsize=7)
    means, halves = bars([interval(s / 60 for s in of_stages(n, results)) for n in STAGES])
    right.bar(range(len(STAGES)), means, yerr=halves, capsize=4)
    right.set_xticks(range(len(STAGES)), list(map(str, STAGES)))
    right.set(xlabel="stages", ylabel="minutes of a batch", title="Figure 5, planner's stages simulated")
    return figure
