"""The hybrid parameter-server paper's Figure 5: how many stages its planner chooses, on a cluster of which links and
memory are not printed; and a toy that is worked by hand."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from experiments.page import span
from experiments.reproduce.hybrid_ps_parts import instances
from experiments.reproduce.hybrid_ps_parts.instances import (
    CASE_3,
    INSIDE,
    N_RELIABLE_STANDALONE,
    RATES,
    SITES,
    Cluster,
    toy,
)
from experiments.reproduce.results import Job, Results, described
from matplotlib.figure import Figure

from planner.model.pool import PoolOptions
from planner.search.pool.levels import Level, search

PAPERS_STAGES, COMPARED = 3, (2, 4)
PRINTED, CONSISTENT = PoolOptions("paper"), PoolOptions("consistent")
OPTIONS = {"as printed": PRINTED, "consistent": CONSISTENT}
MEMORIES_GB = range(64, 1041, 16)
HOST_GB = {"bf16": 192, "fp32": 240, "fp64": 480}  # one of those with which the consistent search finds three stages
N_DRAWS = 100
MANY_WORKS = 10_000  # of jobs that are not for the sample that a test computes again
N_RELIABLE = sum(SITES.values()) - (SITES["standalone"] - N_RELIABLE_STANDALONE)


# ----------------------------------------------------------------------------------------------------------- the values


def chosen(cluster: Cluster, options: PoolOptions, results: Results) -> int:
    """The number of stages that the planner chooses; 0 where memory allows none."""
    return round(results.get(_chosen_job(cluster, options))[0])


def _chosen_job(cluster: Cluster, options: PoolOptions) -> Job:
    return Job(f"chosen {described(cluster)} {options.eq3}", 100, partial(_chosen, cluster, options))


def _chosen(cluster: Cluster, options: PoolOptions) -> list[float]:
    level = search(cluster.problem, options, None, 0).chosen
    return [level.n_stages if level.staged else 0]


def step_s(cluster: Cluster, n_stages: int, results: Results) -> float:
    """Seconds of a step by Eq. 1 and 2 in full, in so many stages."""
    name = f"step_s {described(cluster)} stages={n_stages}"
    return results.get(Job(name, 100, partial(_step_s, cluster, n_stages)))[0]


def _step_s(cluster: Cluster, n_stages: int) -> list[float]:
    cost = search(cluster.problem, PRINTED, n_stages, 0).chosen.cost
    assert cost is not None  # without a limit of memory
    return [cost.total_s]


def stage_rows(cluster: Cluster, results: Results) -> list[list[float]]:
    """A row for each stage of the consistent search: the number of its site, lo, hi, servers in front, servers at the
    back, workers, seconds of a mini-batch."""
    values = results.get(Job(f"stages {described(cluster)}", 100, partial(_stages, cluster)))
    return [values[i : i + 7] for i in range(0, len(values), 7)]


def _stages(cluster: Cluster) -> list[float]:
    problem = cluster.problem
    level = search(problem, CONSISTENT, None, 0).chosen
    assert level.staged is not None and level.cost is not None
    values: list[float] = []
    for stage, cost in zip(level.staged.stages, level.cost.stages, strict=True):
        sites = {problem.network.devices[d].region for d in (*stage.servers, *stage.workers)}
        site = list(SITES).index(next(iter(sites))) if len(sites) == 1 else len(SITES)
        counts = (len(row) for row in (stage.front, stage.back, stage.workers))
        values += [site, stage.lo, stage.hi, *counts, cost.total_s]
    return values


def drawn(cluster: Cluster, options: PoolOptions, results: Results) -> list[int]:
    """Counts over N_DRAWS draws of the links: how many gave 1, 2, ... stages, and how many gave the three sites."""
    name = f"drawn {described(cluster)} {options.eq3} draws={N_DRAWS}"
    return [round(n) for n in results.get(Job(name, MANY_WORKS, partial(_drawn, cluster, options)))]


def _drawn(cluster: Cluster, options: PoolOptions) -> list[float]:
    counts = [0.0] * (N_RELIABLE + 1)
    for draw in range(N_DRAWS):
        one = replace(cluster, draw=draw)
        level = search(one.problem, options, None, 0).chosen
        counts[level.n_stages - 1] += 1
        counts[-1] += level.n_stages == PAPERS_STAGES and _is_by_site(one, level)
    return counts


def _is_by_site(cluster: Cluster, level: Level) -> bool:
    devices = cluster.problem.network.devices
    return all(len({devices[d].region for d in members}) == 1 for members in level.clusters)


def of_toy(results: Results) -> list[float]:
    """The numbers of the toy: stages of the consistent search, its path, its seconds by Eq. 2 with Eq. 3, by Eq. 1 and
    2 in full; then the stages and the seconds by Eq. 2 with Eq. 3 of the printed search."""
    return results.get(Job("toy", 100, _of_toy))


def _of_toy() -> list[float]:
    ours, printed = (search(toy(), options, None, 0).chosen for options in (CONSISTENT, PRINTED))
    assert ours.cost is not None
    return [ours.n_stages, ours.path_s, ours.search_s, ours.cost.total_s, printed.n_stages, printed.search_s]


# ------------------------------------------------------------------------------------------------------------- the page


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    return dict(
        pictures={"hybrid_ps_planner.png": draw(results)},
        instances=instances,
        **choices(results),
        **compared(results),
        **plan_of_three(results),
        **draws(results),
        **toy_by_hand(results),
        **sites_drawn(results),
        **told_sites(),
    )


def choices(results: Results) -> dict[str, Any]:
    """The table of what each reading chooses."""
    rows = []
    for precision, host_gb in HOST_GB.items():
        clusters = Cluster(precision), Cluster(precision, host_gb)
        found = [chosen(cluster, options, results) for cluster in clusters for options in OPTIONS.values()]
        rows.append([precision, *found[:2], host_gb, *found[2:]])

    right = [precision for precision, host_gb in HOST_GB.items() if finds_sites(Cluster(precision, host_gb), results)]
    wrong = sorted({row[k] for row in rows for k in (1, 2, 4)})
    return dict(choices_right=right, choices_rows=rows, choices_wrong=wrong)


def finds_sites(cluster: Cluster, results: Results) -> bool:
    """Whether the stages of the consistent search are the three sites."""
    return sorted(row[0] for row in stage_rows(cluster, results)) == list(range(PAPERS_STAGES))


def memories(results: Results) -> list[list]:
    """The stages that the consistent search chooses, by memory of a machine."""
    rows = []
    for precision in HOST_GB:
        found = [(gb, chosen(Cluster(precision, gb), CONSISTENT, results)) for gb in MEMORIES_GB]
        told = []
        for n, group in groupby(found, key=lambda pair: pair[1]):
            sizes = [gb for gb, _ in group]
            size = f"{sizes[0]} to {sizes[-1]}" if sizes[1:] else str(sizes[0])
            told.append(f"{size}: {n or 'none fits'}")
        rows.append([precision, "; ".join(told)])
    return rows


def compared(results: Results) -> dict[str, Any]:
    """Seconds of a step in 2, 3 and 4 stages."""
    seconds = {
        precision: [step_s(Cluster(precision), n, results) for n in (PAPERS_STAGES, *COMPARED)] for precision in RATES
    }
    ratios = {precision: [other_s / ours_s for other_s in others] for precision, (ours_s, *others) in seconds.items()}
    rows = [[one, *seconds[one], *(f"{ratio:.3f}" for ratio in ratios[one])] for one in RATES]

    told = []
    for n, of_n in zip(COMPARED, zip(*ratios.values(), strict=True), strict=True):
        told.append(f"{n} stages take {span(of_n, '.3f')} times as long as {PAPERS_STAGES}")
    levels = range(1, N_RELIABLE + 1)
    best = [f"{min(levels, key=lambda n, one=one: step_s(Cluster(one), n, results))} in {one}" for one in RATES]
    return dict(compared_best=best, compared_rows=rows, compared_told=told)


def plan_of_three(results: Results) -> dict[str, Any]:
    cluster = Cluster("bf16", HOST_GB["bf16"])
    names = [*SITES, "several"]
    rows = [
        [k, names[round(site)], f"{round(lo)} to {round(hi) - 1}", *map(round, counts), seconds]
        for k, (site, lo, hi, *counts, seconds) in enumerate(stage_rows(cluster, results))
    ]

    return dict(cluster=cluster, plan_of_three_rows=rows)


def draws(results: Results) -> dict[str, Any]:
    """The table of draws."""
    rows = []
    for near in (True, False):
        for precision, host_gb in HOST_GB.items():
            for name, options in OPTIONS.items():
                *counts, n_sites = drawn(Cluster(precision, host_gb, None, near), options, results)
                told = ", ".join(f"{k + 1}: {n}" for k, n in enumerate(counts) if n)
                rows.append(["near" if near else "as far as sites", precision, name, told, n_sites])
    (low_ms, high_ms), (low, high) = CASE_3

    return dict(draws_high=high, draws_high_ms=high_ms, draws_low=low, draws_low_ms=low_ms, draws_rows=rows)


def toy_by_hand(results: Results) -> dict[str, Any]:
    """Sums on paper beside what the planner finds."""
    stages, path_s, search_s, total_s, n_printed, printed_s = of_toy(results)
    ideal_s = 8 * 32 / 5.5
    rows = [
        ["stages, Eq. 3 consistent", "8 layers, at most 3 on a machine", 3, round(stages)],
        ["path through the sites, s", "2 + 4", 2.0 + 4, path_s],
        ["step by Eq. 2 with Eq. 3, s", "2 (32 + 8 x 32 / 5.5)", 2 * (32 + ideal_s), search_s],
        ["step by Eq. 1 and 2 in full, s", "2 (12 + 36 + 32), at the second stage", 2 * (12.0 + 36 + 32), total_s],
        ["stages, Eq. 3 as printed", "all 5 reliable machines", 5, round(n_printed)],
        ["its step by Eq. 2 with Eq. 3, s", "2 (32 + 8 x 32 / 5.5 / 5)", 2 * (32 + ideal_s / 5), printed_s],
    ]
    agree = all(abs(ours - by_hand) < 1e-6 for _, _, by_hand, ours in rows)
    return dict(agree=agree, toy_by_hand_rows=rows)


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    lines = ["-", "--", ":"]  # two of the three are equal in places
    for precision, style in zip(HOST_GB, lines, strict=True):
        stages = [chosen(Cluster(precision, gb), CONSISTENT, results) for gb in MEMORIES_GB]
        shown = [(gb, n) for gb, n in zip(MEMORIES_GB, stages, strict=True) if n]
        left.step(*zip(*shown, strict=True), where="post", linestyle=style, label=precision)
        levels: Sequence[int] = range(1, N_RELIABLE + 1)
        seconds = [step_s(Cluster(precision), n, results) for n in levels]
        right.plot(levels, [s / seconds[PAPERS_STAGES - 1] for s in seconds], f"o{style}", label=precision)
    left.axhline(PAPERS_STAGES, color="k", linewidth=0.8, linestyle="--")
    left.set(xlabel="GB a machine", ylabel="stages chosen", title="Eq. 3 consistent")
    right.set(xlabel="stages", ylabel="step over that of 3 stages", title="Eq. 1 and 2 in full, no limit of memory")
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure


def sites_drawn(results: Results) -> dict[str, Any]:
    drawn_sites = [
        drawn(Cluster(precision, host_gb, None, near), PRINTED, results)[-1]
        for precision, host_gb in HOST_GB.items()
        for near in (True, False)
    ]
    return dict(drawn_sites=drawn_sites)


def told_sites() -> dict[str, Any]:
    inside = "; ".join(f"{site} {ms:g} ms, {gbps:g} Gb/s" for site, (ms, gbps) in INSIDE.items())
    sizes = ", ".join(f"{n} {site}" for site, n in SITES.items())
    return dict(inside=inside, sizes=sizes)
