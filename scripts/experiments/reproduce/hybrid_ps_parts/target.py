"""The hybrid parameter-server paper's Table 2 and Figures 2, 4 and 5 on the simulated machines of this project."""

from collections.abc import Sequence
from pathlib import Path

from experiments.reproduce.hybrid_ps_parts import cases, fluid
from experiments.reproduce.hybrid_ps_parts.cases import (
    ALL_N,
    BY_POWER,
    DAPPLE,
    EQUAL,
    FP32_BYTES,
    HYBRID,
    HYBRID_OURS,
    LLAMA,
    LOSS_PROB,
    MAIN,
    MODELS,
    NAMES,
    PRINTED_MIN,
    SERVERS_4,
    SHAPES,
    SWARM_OURS,
    SWARM_PRINTED,
    TASK,
    XXLARGE,
    compute_s,
    gain,
)
from experiments.reproduce.hybrid_ps_parts.chains import Static
from experiments.reproduce.hybrid_ps_parts.instances import PARAMS
from experiments.reproduce.hybrid_ps_parts.runs import fill
from experiments.reproduce.hybrid_ps_parts.simulated import DEPTH
from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.results import Results
from matplotlib.figure import Figure

from jaxdt.run.network import Link
from jaxdt.runtime.reporting.interval import SEEDS, Interval

LINES_GBPS = (0.05, 0.175, 0.3)  # of Case 3, and the middle
N_PARAMS = {XXLARGE: 223_000_000, LLAMA: PARAMS // 2}  # of a stage of two; ALBERT-xxlarge by its paper
AGGREGATION_MAX = 0.2  # of a batch, by the paper
OVER_SWARM, OVER_STATIC, CASE_1_MAX = (1.05, 1.25), (1.2, 1.6), 1.3


def run(out: Path, origin: str, results: Results) -> str:
    """The text of the page. Pictures are written to `out`."""
    fill(cases.runs_of(cases.all_batches()), results)
    draw(out / "hybrid_ps.png", results)
    return page(
        "Hybrid parameter server: Table 2 (grade B: orders and ratios)",
        origin,
        [
            ("Targets", table(["target", "ours", "met"], target_rows(results)) + "\n" + TARGETS),
            ("Table 2: time over that of the hybrid system", PICTURE + RATIOS + cases.ratio_table(results)),
            ("Table 2: minutes of a batch", MINUTES + cases.printed_table(results)),
            (f"Case 4 by every reading, {LLAMA}", READINGS + cases.reading_table(results)),
            (f"The bare models against the simulator, {LLAMA}", AGAINST + cases.against_table(results)),
            ("The paper's claim that aggregation takes less than 20 % of a batch", aggregation_table()),
            ("Where ours differs, and why", bullets(why(results))),
            ("What the paper leaves open, and what was assumed", bullets(assumptions())),
            ("Not modelled", bullets(NOT_MODELLED)),
        ],
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


def met(is_met: bool) -> str:
    return "yes" if is_met else "NO"


def draw(path: Path, results: Results) -> None:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for ax, model in zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True):
        base = PRINTED_MIN[model][HYBRID]
        for i, name in enumerate((SWARM_PRINTED, DAPPLE)):
            printed = [minutes / hybrid for minutes, hybrid in zip(PRINTED_MIN[model][name], base, strict=True)]
            ax.bar([x - 0.3 + 0.15 * i for x in range(4)], printed, 0.15, label=f"paper, {name}", hatch="//", alpha=0.6)
        for i, system in enumerate((SWARM_OURS, EQUAL, BY_POWER), 2):
            found = [gain(model, case, system, results, MAIN[-1]) for case in range(1, 5)]
            places = [x - 0.3 + 0.15 * i for x in range(4)]
            ax.bar(places, [g.mean for g in found], 0.15, yerr=[g.half for g in found], label=f"ours, {NAMES[system]}")
        ax.axhline(1.0, color="k", lw=0.6)
        ax.set_xticks(range(4), [f"Case {case}" for case in range(1, 5)])
        ax.set(title=model)
    figure.axes[0].set_ylabel("time over that of the hybrid system")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=80)


# ---------------------------------------------------------------------------------------------------------- aggregation


def aggregation_table() -> str:
    """Arithmetic alone: a worker's gradient of a stage up, and its parameters down, over its link."""
    rows, holds = [], []
    for model, n_params in N_PARAMS.items():
        stage_bytes = FP32_BYTES * n_params
        minutes = [2 * Link(bandwidth_gbps=gbps).occupied_s(stage_bytes) / 60 for gbps in LINES_GBPS]
        batch = PRINTED_MIN[model][HYBRID][3]
        told = [f"{m:.1f} ({m / batch:.0%})" for m in minutes]
        holds.append(f"{sum(m < AGGREGATION_MAX * batch for m in minutes)} ({model})")
        rows.append([model, f"{stage_bytes / 1e9:.2f}", batch, *told])
    head = ["model", "GB of a stage, fp32", "printed min, Case 4", *(f"min at {1e3 * g:g} Mb/s" for g in LINES_GBPS)]
    return table(head, rows) + (
        "\nIn brackets the share of the printed batch. A gradient up and parameters down, one after the other; both "
        "can overlap the next batch. A stage of ALBERT holds all of the shared layers. The claim holds over "
        f"{' and '.join(holds)} of these links.\n"
    )


# ------------------------------------------------------------------------------------------------------------ sentences


def why(results: Results) -> list[str]:
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
    return [
        "Without losses swarm wiring takes "
        f"{min(ours[1]):.3f} to {max(ours[1]):.3f} of the pool's time in Case 1 and "
        f"{min(ours[3]):.3f} to {max(ours[3]):.3f} in Case 3. In the fluid model, which has no tasks, both take "
        "equally long. What differs is the end of a batch: a server gives the last tasks to the machines that will be "
        "done first, and swarm's routers choose by speed alone. "
        f"The printed Swarm takes {printed[0]:.3f} and {printed[1]:.3f} times as long for {LLAMA}; the first "
        "no difference in scheduling explains.",
        f"What a loss costs: Case 4 over Case 3 of swarm is, over that of the pool, {lost} that may fail.",
        "The pool of ours is a server's, the paper's is a stage's. With 4 servers a stage each has one worker and an "
        "even cut of the batch. A server that loses its worker is helped by the others when these have little to do: "
        f"Case 4 over Case 3 is {several} with so many that may fail, where it is {single} with one server "
        "a stage.",
        "Static chains with equal shares wait for their slow machines in Case 3. The paper says of no baseline whether "
        "its shares follow speeds; ours are shown both ways. The hybrid system and swarm wiring know the speeds, so "
        "shares by power are the fair side.",
        f"The printed Case 4 takes {printed_4} times as long as Case 3. By the fluid model, even where gradients of a "
        f"lost machine survive it, that is less than {cases.fluid_slower(fluid.KEEP, MAIN[0])} with {MAIN[0]} machines "
        "that may fail; to compute them again costs more.",
    ]


def assumptions() -> list[str]:
    times = ", ".join(f"{compute_s(model):.1f} s ({model})" for model in MODELS)
    shapes = ", ".join(f"{tokens} x {width} ({model})" for model, (tokens, width) in SHAPES.items())
    return [
        "Two stages, of equal work; half of each kind of machine in each. The number of stages is not printed.",
        f"The paper's minutes are far above what its models compute, so compute is taken from one figure, {DAPPLE}'s "
        f"Case 1: {times} for a task on one V100, a quarter of it forward, the rest recomputation and backward. "
        "Everything else follows.",
        f"A task is {TASK} sequences, on all sides: the paper divides its mini-batches of 4 among workers at will. "
        f"Boundaries are fp32, {shapes}. Neither precision nor length is printed.",
        "Links of each pair and direction are drawn uniformly: in Case 2 1 to 3 GB/s and 10 to 100 ms between sites, "
        "in Cases 3 and 4 50 to 300 Mb/s and 100 to 150 ms to and between standalone machines, and between the two "
        "sites as in Case 2. Inside a site 2 GB/s and 0.1 ms. Links of a machine share no line.",
        f"Case 4: each machine that may fail is lost with probability {LOSS_PROB:g}, at a moment that is uniform in "
        "the batch of its system without losses; the draws are the same for all systems. Which machines may fail is "
        "not printed: 3, 4 or all 8 standalone ones, half of them in each stage.",
        "A loss is seen after 0.1 s. Who is back in the next batch is there from its beginning, on all sides.",
        f"A machine of the first stage has up to {DEPTH} forwards that wait for their backward (static chains, "
        "servers; beside workers one more), as many as swarm's window allows on average. One server a stage, of "
        "the fastest kind; all others are workers.",
        f"Seeds {SEEDS.start} to {SEEDS.stop - 1}: of links and losses. +- is half the width of a 95 % interval "
        "(Student's t), left out where it would not show; ratios are paired by seed.",
    ]


TARGETS = (
    "The bands are ours, for a system that counts every gradient once; the paper prints single numbers. A static chain "
    "that loses a machine loses its whole share of the batch. Both sides of a row know the same speeds unless the row "
    "says equal shares: there the pipelines do not know them.\n"
)
PICTURE = "![time over that of the hybrid system](hybrid_ps.png)\n\n"
RATIOS = "Paper: ours. Below 1 the other system is faster.\n\n"
MINUTES = f"Paper: ours. In Case 4 {MAIN[-1]} machines may fail.\n\n"
READINGS = (
    "Time over that of the hybrid system with one server a stage, and over the same system's Case 3. "
    f"{', '.join(map(str, ALL_N))} of the standalone machines may fail.\n\n"
)
AGAINST = (
    "Static chains that lose their share are a bare model (`chains.py`), since a pipeline of this project borrows the "
    "machines of others instead. The fluid model (`fluid.py`) has neither tasks nor links.\n\n"
)
NOT_MODELLED = (
    "PipeDream: the text does not say why it is slower than DAPPLE where machines are lost, or faster where none is; "
    "without a flush it would fill and drain less often. So the order of these two is not looked at.",
    "Front and back owners: in the engine a microbatch has one owner for both directions.",
    "Averaging, contributions, downloads: they overlap the next batch in the paper, and take no time here on any side.",
    "Machines that leave and come back within a batch; time to join.",
)
