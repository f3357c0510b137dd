"""DT-FM's Figure 4: what its gain is worth against Kernighan-Lin's, at equal numbers of plans scored.

Each study swaps the gain and nothing else: crossover, repair, population, seeds, and annealing for both or for neither.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from experiments.reproduce.dtfm_parts.cost import C_DP_BYTES, C_PP_BYTES, PIPELINES, STAGES
from experiments.reproduce.dtfm_parts.systems import FOLDER
from experiments.reproduce.results import Job, Results
from matplotlib.figure import Figure

from jaxdt.run import network as networks
from planner.model.problem import Problem, problem_of
from planner.search.baselines.dtfm import search_as_published
from planner.search.crossover import DTFM_GAIN, KERNIGHAN_LIN_GAIN
from planner.search.evolve import EVOLVE, KERNIGHAN_LIN, Genetic, solve_by
from planner.search.incumbent import Budget, Incumbent

NETWORKS = (
    "dtfm_case1_datacenter",
    "dtfm_case2_spot",
    "dtfm_case3_multi_dc",
    "dtfm_case4_regional",
    "dtfm_case5_worldwide",
    "derived/derived_case5_jitter_seed2022",
    "derived/derived_random10_seed2022",
    "derived/derived_random10_seed2023",
    "derived/derived_random10_seed2024",
)
SEEDS = tuple(range(10))
T_975 = {10: 2.262}  # Student's t at 97.5 % for so many seeds
PLAIN = {"annealed": False, "population": 64, "stale_limit": 400}
DPI = 60  # of the picture, which is large
SAME_S = 5e-4  # means that differ by less are called equal: a table has three decimals


def as_published(gain_rule: int) -> Callable[[Problem, Incumbent, int], None]:
    return lambda problem, incumbent, seed: search_as_published(problem, incumbent, seed, gain_rule)


def variant(genetic: Genetic) -> Callable[[Problem, Incumbent, int], None]:
    return partial(solve_by, genetic)


@dataclass(frozen=True)
class Study:
    """Two searches that differ in the gain alone: DT-FM's and Kernighan-Lin's. Each gets `evaluations`."""

    title: str
    evaluations: int
    searches: tuple[Callable, Callable]
    networks: tuple[str, ...] = NETWORKS


STUDIES = {
    "published": Study(
        "The published search: population of 100, five labels copied, no annealing",
        5_000,
        (as_published(DTFM_GAIN), as_published(KERNIGHAN_LIN_GAIN)),
    ),
    "plain": Study(
        "Ours without annealing: `evolve` and `kl` with a population of 64",
        5_000,
        (variant(replace(EVOLVE, **PLAIN)), variant(replace(KERNIGHAN_LIN, **PLAIN))),
    ),
    "annealed": Study(
        "Ours with annealing: `evolve` and `kl`",
        6_000_000,
        (variant(EVOLVE), variant(KERNIGHAN_LIN)),
        ("dtfm_case2_spot", *NETWORKS[5:]),  # on the others the first members of the population end at the optimum
    ),
}
GAINS = ("DT-FM's gain", "Kernighan-Lin's gain")
LOWER, NEITHER = ("DT-FM's", "Kernighan-Lin's"), "neither"
Curve = list[tuple[int, float]]  # (plans scored, best cost in seconds) at each improvement
N_SHOWN = 60  # points of a curve in the picture
PLAN_WORKS = 4  # simulated computations that take about as long as one plan's score


@dataclass(frozen=True)
class Run:
    """The best cost at the end of a run, and after each number of plans of `shown_at`, in seconds."""

    end_s: float
    shown_s: tuple[float, ...]


Runs = dict[tuple[str, str, int], list[Run]]  # by study, network and gain: one for each seed


@dataclass(eq=False)
class CountedIncumbent(Incumbent):
    """An incumbent that remembers after how many plans each improvement came."""

    curve: Curve = field(default_factory=list)

    def offer(self, groups: np.ndarray, cost_s: float, source: int = 0, by: str = ""):
        if cost_s < self.best_s:
            self.curve.append((self.evaluations, cost_s))
        super().offer(groups, cost_s, source, by)


def curve_of(study: str, network: str, gain: int, seed: int) -> Curve:
    """One run."""
    problem = problem_of(networks.load(FOLDER / f"{network}.json"), STAGES, PIPELINES, C_DP_BYTES, C_PP_BYTES)
    incumbent = CountedIncumbent(Budget(None, STUDIES[study].evaluations))
    STUDIES[study].searches[gain](problem, incumbent, seed)
    return incumbent.curve


def shown_at(study: str) -> np.ndarray:
    """The numbers of plans scored at which the picture shows a run."""
    evaluations = STUDIES[study].evaluations
    return np.unique(np.geomspace(evaluations / 100, evaluations, N_SHOWN).astype(int))


def values_of(study: str, network: str, gain: int, seed: int) -> list[float]:
    """The values of a run: its end, and what is shown of it."""
    curve = curve_of(study, network, gain, seed)
    return [curve[-1][1], *map(float, best_at(curve, shown_at(study)))]


def job(study: str, network: str, gain: int, seed: int) -> Job:
    """One run."""
    n_plans = STUDIES[study].evaluations
    inputs = f"study={study} network={network} gain={GAINS[gain]!r} seed={seed} evaluations={n_plans}"
    return Job(inputs, PLAN_WORKS * n_plans, partial(values_of, study, network, gain, seed))


def all_runs(results: Results) -> Runs:
    """All runs, on all cores; no value depends on which ends first."""
    gains = range(len(GAINS))
    keys = [(name, network, gain) for name, study in STUDIES.items() for network in study.networks for gain in gains]
    results.fill(job(*key, seed) for key in keys for seed in SEEDS)
    found = {}
    for key in keys:
        values = [results.get(job(*key, seed)) for seed in SEEDS]
        found[key] = [Run(end_s, tuple(shown_s)) for end_s, *shown_s in values]
    return found


@dataclass(frozen=True)
class Difference:
    """Mean costs in seconds under both gains, and the mean over seeds of ours less Kernighan-Lin's with the half width
    of its 95 % interval."""

    ours_s: float
    other_s: float
    mean_s: float
    half_s: float

    @property
    def verdict(self) -> str:
        if self.mean_s + self.half_s < -SAME_S:
            return LOWER[0]
        return LOWER[1] if self.mean_s - self.half_s > SAME_S else NEITHER


def difference(ours: Sequence[Run], other: Sequence[Run]) -> Difference:
    """The difference between the ends of two lists of runs, paired by seed."""
    ends = [[one.end_s for one in runs] for runs in (ours, other)]
    gaps = [a - b for a, b in zip(*ends, strict=True)]
    half_s = T_975[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return Difference(statistics.fmean(ends[0]), statistics.fmean(ends[1]), statistics.fmean(gaps), half_s)


def rows_of(study: str, runs: Runs) -> list[list]:
    """Rows of a study's table."""
    rows = []
    for network in STUDIES[study].networks:
        found = difference(runs[study, network, 0], runs[study, network, 1])
        interval = f"{found.mean_s:+.3f} ± {found.half_s:.3f}"
        rows.append([Path(network).name, f"{found.ours_s:.3f}", f"{found.other_s:.3f}", interval, found.verdict])
    return rows


def sentence(study: str, runs: Runs) -> str:
    """How many networks go to which gain."""
    verdicts = [row[-1] for row in rows_of(study, runs)]
    ours, other, neither = (verdicts.count(verdict) for verdict in (*LOWER, NEITHER))
    return (
        f"Of {len(verdicts)} networks, DT-FM's gain ends lower on {ours}, Kernighan-Lin's on {other}, and on {neither} "
        "the 95 % interval of the difference contains 0."
    )


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    runs = all_runs(results)
    return dict(pictures={"dtfm_gain.png": draw(runs)}, runs=runs)


def draw(runs: Runs) -> Figure:
    """Mean over seeds of the best cost so far, and its least and most, by plans scored."""
    figure = Figure(figsize=(4.2 * len(STUDIES), 2.6 * len(NETWORKS)), layout="constrained")
    panels = figure.subplots(len(NETWORKS), len(STUDIES), squeeze=False)
    for line, network in zip(panels, NETWORKS, strict=True):
        for axes, (study, about) in zip(line, STUDIES.items(), strict=True):
            axes.set_visible(network in about.networks)
            if network not in about.networks:
                continue
            grid = shown_at(study)
            for gain, name in enumerate(GAINS):
                best = np.array([one.shown_s for one in runs[study, network, gain]])
                axes.plot(grid, best.mean(axis=0), color=f"C{gain}", label=name)
                axes.fill_between(grid, best.min(axis=0), best.max(axis=0), color=f"C{gain}", alpha=0.15, linewidth=0)
            axes.set(title=f"{Path(network).name}, {study}", xscale="log", xlabel="plans scored", ylabel="cost, s")
            axes.title.set_fontsize(9)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(GAINS))
    return figure


def best_at(curve: Curve, grid: np.ndarray) -> np.ndarray:
    """The best cost after each number of plans; before the first improvement, that one's cost."""
    counts, costs = zip(*curve, strict=True)
    return np.array(costs)[np.maximum(np.searchsorted(counts, grid, side="right") - 1, 0)]
