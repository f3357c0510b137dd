"""The hybrid parameter-server paper's Table 2 and Figures 2, 4 and 5 on the simulated machines of this project."""

from collections.abc import Sequence
from typing import Any

from experiments.page import bars
from experiments.reproduce.hybrid_ps_parts import cases, fluid
from experiments.reproduce.hybrid_ps_parts.cases import (
    BY_POWER,
    DAPPLE,
    EQUAL,
    FP32_BYTES,
    HYBRID,
    HYBRID_OURS,
    LLAMA,
    MAIN,
    MODELS,
    NAMES,
    PRINTED_MIN,
    SERVERS_4,
    SHAPES,
    SWARM_OURS,
    SWARM_PRINTED,
    XXLARGE,
    compute_s,
    fill,
    gain,
    met,
)
from experiments.reproduce.hybrid_ps_parts.chains import Static
from experiments.reproduce.hybrid_ps_parts.instances import PARAMS
from experiments.reproduce.hybrid_ps_parts.simulated import DEPTH
from experiments.reproduce.results import Results
from matplotlib.figure import Figure

from jaxdt.run.network import Link
from jaxdt.runtime.reporting.interval import SEEDS, Interval

LINES_GBPS = (0.05, 0.175, 0.3)  # of Case 3, and the middle
N_PARAMS = {XXLARGE: 223_000_000, LLAMA: PARAMS // 2}  # of a stage of two; ALBERT-xxlarge by its paper
AGGREGATION_MAX = 0.2  # of a batch, by the paper
OVER_SWARM, OVER_STATIC, CASE_1_MAX = (1.05, 1.25), (1.2, 1.6), 1.3


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    fill(cases.runs_of(cases.all_batches()), results)
    return dict(
        pictures={"hybrid_ps.png": draw(results)},
        cases=cases,
        **aggregation_table(),
        **told_losses(results),
        **told_shapes(),
        DEPTH=DEPTH,
        SEEDS=SEEDS,
        fluid=fluid,
    )


# -------------------------------------------------------------------------------------------------------------- targets


def target_rows(results: Results) -> list[list[str]]:
    rows = []
    for model in MODELS:
        overhead = 1 / gain(model, 1, EQUAL, results).mean
        told = f"{overhead:.3f}"
        rows.append([f"{model}, Case 1: at most {CASE_1_MAX:g} times DAPPLE", told, met(overhead <= CASE_1_MAX)])
        for static in (EQUAL, BY_POWER):
            rows.append([f"{model}, Case 3: hybrid < swarm < {NAMES[static]}", *order(model, 3, static, 0, results)])
        for n in MAIN:
            for static in (EQUAL, BY_POWER):
                name = f"{model}, Case 4, {n} may fail: hybrid < swarm < {NAMES[static]}"
                rows.append([name, *order(model, 4, static, n, results)])
            found = gain(model, 4, SWARM_OURS, results, n)
            rows.append([f"{model}, Case 4, {n} may fail: {band(OVER_SWARM)} over swarm", *within(found, OVER_SWARM)])
            for static in (EQUAL, BY_POWER):
                name = f"{model}, Case 4, {n} may fail: {band(OVER_STATIC)} over {NAMES[static]}"
                rows.append([name, *within(gain(model, 4, static, results, n), OVER_STATIC)])
    return rows


def order(model: str, case: int, static: Static, n_failing: int, results: Results) -> tuple[str, str]:
    """Times over the hybrid system's, and whether they are in the paper's order."""
    swarm, chains = (gain(model, case, system, results, n_failing) for system in (SWARM_OURS, static))
    return f"1 : {swarm} : {chains}", met(1 < swarm.mean < chains.mean)


def within(found: Interval, limits: Sequence[float]) -> tuple[str, str]:
    low, high = limits
    return str(found), met(low <= found.mean <= high)


def band(limits: Sequence[float]) -> str:
    return f"{limits[0]:g} to {limits[1]:g}"


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for ax, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
        base = PRINTED_MIN[model][HYBRID]
        for i, name in enumerate((SWARM_PRINTED, DAPPLE)):
            printed = [minutes / hybrid for minutes, hybrid in zip(PRINTED_MIN[model][name], base, strict=True)]
            ax.bar([x - 0.3 + 0.15 * i for x in range(4)], printed, 0.15, label=f"paper, {name}", hatch="//", alpha=0.6)
        for i, system in enumerate((SWARM_OURS, EQUAL, BY_POWER), 2):
            means, halves = bars([gain(model, case, system, results, MAIN[-1]) for case in range(1, 5)])
            places = [x - 0.3 + 0.15 * i for x in range(4)]
            ax.bar(places, means, 0.15, yerr=halves, label=f"ours, {NAMES[system]}")
        ax.axhline(1.0, color="k", lw=0.6)
        ax.set_xticks(range(4), [f"Case {case}" for case in range(1, 5)])
        ax.set(title=model)
    figure.axes[0].set_ylabel("time over that of the hybrid system")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


# ---------------------------------------------------------------------------------------------------------- aggregation


def aggregation_table() -> dict[str, Any]:
    """Arithmetic alone: a worker's gradient of a stage up, and its parameters down, over its link."""
    rows, holds = [], []
    for model, n_params in N_PARAMS.items():
        stage_bytes = FP32_BYTES * n_params
        minutes = [2 * Link(bandwidth_gbps=gbps).occupied_s(stage_bytes) / 60 for gbps in LINES_GBPS]
        batch = PRINTED_MIN[model][HYBRID][3]
        told = [f"{m:.1f} ({m / batch:.0%})" for m in minutes]
        holds.append(f"{sum(m < AGGREGATION_MAX * batch for m in minutes)} ({model})")
        rows.append([model, f"{stage_bytes / 1e9:.2f}", batch, *told])

    return dict(holds=holds, aggregation_table_rows=rows)


# ------------------------------------------------------------------------------------------------------------ sentences


def told_losses(results: Results) -> dict[str, Any]:
    ours = {case: [gain(model, case, SWARM_OURS, results).mean for model in MODELS] for case in (1, 3)}
    printed = [PRINTED_MIN[LLAMA][SWARM_PRINTED][case - 1] / PRINTED_MIN[LLAMA][HYBRID][case - 1] for case in (1, 3)]
    redo, everywhere = (
        [cases.slower(LLAMA, system, n, results).mean for n in MAIN] for system in (HYBRID_OURS, SWARM_OURS)
    )
    several, single = (
        " and ".join(f"{cases.slower(LLAMA, system, n, results)} ({n})" for n in MAIN)
        for system in (SERVERS_4, HYBRID_OURS)
    )
    lost = ", ".join(f"{b / a:.3f} with {n}" for a, b, n in zip(redo, everywhere, MAIN, strict=True))
    printed_4 = " and ".join(f"{PRINTED_MIN[m][HYBRID][3] / PRINTED_MIN[m][HYBRID][2]:.3f}" for m in MODELS)
    return dict(lost=lost, ours=ours, printed=printed, printed_4=printed_4, several=several, single=single)


def told_shapes() -> dict[str, Any]:
    times = ", ".join(f"{compute_s(model):.1f} s ({model})" for model in MODELS)
    shapes = ", ".join(f"{tokens} x {width} ({model})" for model, (tokens, width) in SHAPES.items())
    return dict(shapes=shapes, times=times)
