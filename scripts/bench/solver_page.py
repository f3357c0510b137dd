"""The files of `bench_planner.py solvers`: the runs as JSON, their tables, the section of a page, a picture of the
costs."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdt.run.errors import BadInput
from planner.report.tables import NONE, markdown_table

BEGIN, END = "<!-- bench -->\n", "<!-- end of bench -->\n"
EQUAL_FRAC = 1e-3  # medians that differ by less are counted as equal
TICKS_S = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # the axis is linear up to the second one


@dataclass(frozen=True)
class Settings:
    """What all runs have in common: the shape and sizes of Eq. 1-4, the budget of a run, and the seeds."""

    n_stages: int
    n_pipelines: int
    c_dp_bytes: float
    c_pp_bytes: float
    time_s: float | None
    evaluations: int | None
    seeds: range


@dataclass(frozen=True)
class BenchRun:
    """One solver on one network with one seed. `history` holds (seconds, cost) of every improvement."""

    network: str
    solver: str
    seed: int
    cost_s: float
    bound_s: float
    proved: bool
    evaluations: int
    time_s: float
    history: tuple[tuple[float, float], ...]


def of(runs: Sequence[BenchRun], network: str, solver: str) -> list[BenchRun]:
    """The runs of one solver on one network, the cheapest first."""
    found = [run for run in runs if (run.network, run.solver) == (network, solver)]
    return sorted(found, key=lambda run: (run.cost_s, run.seed))


def median_s(runs: Sequence[BenchRun], network: str, solver: str) -> float:
    return statistics.median(run.cost_s for run in of(runs, network, solver))


def names(runs: Sequence[BenchRun]) -> tuple[list[str], list[str]]:
    """(networks, solvers), each once."""
    return list(dict.fromkeys(run.network for run in runs)), list(dict.fromkeys(run.solver for run in runs))


def raw(runs: Sequence[BenchRun]) -> str:
    """One line of JSON a run; costs of plans over missing links are null."""
    rows = []
    for run in runs:
        found_s = run.history[-1][0] if run.history else 0.0
        row = {
            "network": run.network,
            "solver": run.solver,
            "seed": run.seed,
            "cost_s": round(run.cost_s, 6) if math.isfinite(run.cost_s) else None,
            "bound_s": round(run.bound_s, 6) if math.isfinite(run.bound_s) else None,
            "proved": run.proved,
            "plans_scored": run.evaluations,
            "found_after_s": round(found_s, 2),
            "ended_after_s": round(run.time_s, 2),
        }
        rows.append(json.dumps(row))
    return "[\n" + ",\n".join(rows) + "\n]\n"


def markdown(runs: Sequence[BenchRun], settings: Settings) -> str:
    """The settings, the table of costs, and each solver against the first one."""
    networks, solvers = names(runs)
    limits = [
        f"{settings.evaluations:,} plans scored" if settings.evaluations is not None else "",
        f"{settings.time_s:g} s" if settings.time_s is not None else "",
    ]
    first, last = settings.seeds[0], settings.seeds[-1]
    about = (
        f"{settings.n_stages} stages x {settings.n_pipelines} pipelines, c_dp {settings.c_dp_bytes:.0f} B, "
        f"c_pp {settings.c_pp_bytes:.0f} B; each run: {' or '.join(limit for limit in limits if limit)}, one core; "
        f"{f'seeds {first} to {last}' if last > first else f'seed {first}'}: the median cost in seconds by Eq. 1-4, "
        "and the least and the most where they differ by a thousandth or more. Bold: proved optimal."
    )
    rows: list[list[str]] = []
    for network in networks:
        bound_s = max(run.bound_s for run in runs if run.network == network)
        rows.append([network, seconds(bound_s), *(cell(of(runs, network, solver)) for solver in solvers)])
    costs = markdown_table(["network", "best bound", *(f"`{solver}`" for solver in solvers)], rows)
    return "\n".join([about, "", costs, "", against_first(runs)]) + "\n"


def cell(runs: Sequence[BenchRun]) -> str:
    """Median, and least to most where they differ; bold if every run is proved."""
    costs = [run.cost_s for run in runs]
    text = seconds(statistics.median(costs))
    if math.isfinite(costs[-1]) and costs[-1] > costs[0] * (1 + EQUAL_FRAC):
        text += f" ({seconds(costs[0])} to {seconds(costs[-1])})"
    return f"**{text}**" if all(run.proved for run in runs) else text


def against_first(runs: Sequence[BenchRun]) -> str:
    """A table of ratios of medians: each solver to the first one, over the networks where both have a plan."""
    networks, solvers = names(runs)
    best_s = {network: min(median_s(runs, network, solver) for solver in solvers) for network in networks}
    head = ["solver", f"networks with the best median (within {EQUAL_FRAC:.1%})"]
    head += [f"median over `{solvers[0]}`'s: geometric mean", "least", "most"]
    rows: list[list[str]] = []
    for solver in solvers:
        medians_s = {network: median_s(runs, network, solver) for network in networks}
        n_best = sum(medians_s[network] <= best_s[network] * (1 + EQUAL_FRAC) for network in networks)
        ratios = [medians_s[network] / median_s(runs, network, solvers[0]) for network in networks]
        ratios = [ratio for ratio in ratios if 0 < ratio < math.inf]
        found = [statistics.geometric_mean(ratios), min(ratios), max(ratios)] if ratios else []
        cells = [f"{ratio:.3f}" for ratio in found] or [NONE] * 3
        rows.append([f"`{solver}`", f"{n_best} of {len(networks)}", *cells])
    return markdown_table(head, rows)


def seconds(value_s: float) -> str:
    return f"{value_s:.3f}" if math.isfinite(value_s) else NONE


def section_of(page: Path) -> tuple[str, str]:
    """The text of a page before and after its section of results; BadInput if the page has no such section."""
    text = page.read_text() if page.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BadInput(
            f"--write: {page} has no lines {BEGIN.strip()} and {END.strip()}, expected one of each, in order"
        )
    return text[: text.index(BEGIN)], text[text.index(END) + len(END) :]


def write_section(page: Path, text: str):
    """Replace a page's section of results."""
    before, after = section_of(page)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def draw(runs: Sequence[BenchRun], out: Path):
    """Best cost against time of each solver's median run: one panel a network, one line a solver."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    networks, solvers = names(runs)
    across = min(3, len(networks))
    down = -(-len(networks) // across)
    figure = Figure(figsize=(5 * across, 3.4 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False)
    end_s = max(1e-3, *(run.time_s for run in runs))
    ticks_s = [at_s for at_s in TICKS_S if at_s <= end_s]
    for name, axes in zip(networks, panels.flat, strict=False):
        for i, solver in enumerate(solvers):
            own = of(runs, name, solver)
            run = own[(len(own) - 1) // 2]
            if math.isfinite(run.cost_s):
                times_s, costs_s = zip(*(run.history or ((0.0, run.cost_s),)), strict=True)
                style = {"linestyle": ("-", "--")[i >= 5], "color": f"C{i}"}
                axes.step([*times_s, end_s], [*costs_s, run.cost_s], where="post", **style)
        bound_s = max(run.bound_s for run in runs if run.network == name)
        if math.isfinite(bound_s):
            axes.axhline(bound_s, color="black", linestyle=":")
        axes.set(title=name, xlim=(0, end_s), xlabel="seconds", ylabel="best cost, s")
        axes.set_xscale("symlog", linthresh=TICKS_S[1])
        axes.set_xticks(ticks_s, [f"{at_s:g}" for at_s in ticks_s], minor=False)
        axes.minorticks_off()
    for axes in panels.flat[len(networks) :]:
        axes.set_visible(False)
    handles = [
        Line2D([], [], color=f"C{i}", linestyle=("-", "--")[i >= 5], label=solver) for i, solver in enumerate(solvers)
    ]
    handles.append(Line2D([], [], color="black", linestyle=":", label="best bound"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    figure.savefig(out, dpi=80)
