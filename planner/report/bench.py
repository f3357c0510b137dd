"""`python -m planner bench`: solvers over networks, as a markdown table and cost against time (the paper's Fig. 4)."""

import math
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from jaxdt.spec import network as networks
from jaxdt.spec.errors import BadInput
from planner.cost.reference import cost_of
from planner.model.problem import placement_s, problem_of
from planner.model.result import Solution
from planner.report.tables import NONE
from planner.search import layouts
from planner.search.base import check_solver
from planner.search.incumbent import Budget, Incumbent
from planner.search.solve import solve


@dataclass(frozen=True)
class BenchRow:
    """One solver on one network; total_s is the reference cost, block_s that of the block layout."""

    network: str
    solver: str
    total_s: float
    block_s: float
    solution: Solution


def measure(path: str, solver: str, flags: Namespace) -> BenchRow | None:
    """Run one solver on one network; None for a network of another size."""
    network = networks.load(path)
    if network.n_devices != flags.stages * flags.pipelines:
        return None
    problem = problem_of(network, flags.stages, flags.pipelines, flags.c_dp_bytes, flags.c_pp_bytes)
    solution = solve(problem, Incumbent(Budget(flags.time_limit_s)), solver, flags.seed)
    total_s = cost_of(network, solution.placement.tolist(), flags.c_dp_bytes, flags.c_pp_bytes).total_s
    block_s = placement_s(problem, layouts.block(problem))
    block_s = block_s if block_s < problem.missing_s else math.inf
    return BenchRow(network.name or Path(path).stem, solver, total_s, block_s, solution)


def markdown(rows: list[BenchRow], flags: Namespace) -> str:
    lines = [
        f"{flags.stages} stages x {flags.pipelines} pipelines, c_dp {flags.c_dp_bytes:.0f} B, "
        f"c_pp {flags.c_pp_bytes:.0f} B, {flags.time_limit_s:g} s a run, seed {flags.seed}; seconds by Eq. 1-4.",
        "",
        "| network | block | solver | cost | bound | gap | found after s | ended after s | plans scored |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        solution = row.solution
        bound_s = solution.bound_s
        bounded = 0 < bound_s < math.inf and row.total_s < math.inf
        gap = "proved" if solution.proved else f"{row.total_s / bound_s - 1:.1%}" if bounded else NONE
        last_s = solution.history[-1][0] if solution.history else 0.0
        lines.append(
            f"| {row.network} | {_seconds(row.block_s)} | {row.solver} | {_seconds(row.total_s)} | {_seconds(bound_s)} "
            f"| {gap} | "
            f"{last_s:.1f} | {solution.time_s:.1f} | {solution.evaluations:,} |"
        )
    return "\n".join(lines) + "\n"


def _seconds(value_s: float) -> str:
    return f"{value_s:.3f}" if math.isfinite(value_s) else NONE


def draw(rows: list[BenchRow], limit_s: float, out: Path):
    """Best cost against time: one panel a network, one line a solver."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.network for row in rows))
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure, panels = pyplot.subplots(
        down, across, figsize=(5 * across, 3.4 * down), squeeze=False, layout="constrained"
    )
    for name, axes in zip(names, panels.flat, strict=False):
        for row in (row for row in rows if row.network == name):
            if not math.isfinite(row.total_s):
                continue
            times_s, costs_s = (
                zip(*row.solution.history, strict=True) if row.solution.history else ((0.0,), (row.total_s,))
            )
            axes.step([*times_s, limit_s], [*costs_s, row.total_s], where="post", label=row.solver)
        bound_s = max(row.solution.bound_s for row in rows if row.network == name)
        if math.isfinite(bound_s):
            axes.axhline(bound_s, color="black", linestyle=":")
        axes.set(title=name, xscale="symlog", xlim=(0, limit_s), xlabel="seconds", ylabel="best cost, s")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    figure.savefig(out, dpi=80)
    pyplot.close(figure)


def run(flags: Namespace) -> int:
    solvers = flags.solvers.split(",")
    for solver in solvers:
        check_solver("solvers", solver)
    rows = []
    out = Path(flags.out)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is not a folder, expected one, or a name for a new one")
    for path in flags.networks:
        for solver in solvers:
            row = measure(path, solver, flags)
            if row is not None:
                rows.append(row)
                print(f"{row.network} {solver}: {_seconds(row.total_s)} s", file=sys.stderr, flush=True)
    if not rows:
        raise BadInput(f"networks: none has {flags.stages} x {flags.pipelines} devices")
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.md").write_text(markdown(rows, flags))
    draw(rows, flags.time_limit_s, out / "bench.png")
    print(markdown(rows, flags), end="")
    return 0
