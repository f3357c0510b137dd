"""The hybrid parameter-server paper's Table 2 and Figures 2, 4 and 5 on the simulated machines of this project."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.reproduce.hybrid_ps_parts import cases
from experiments.reproduce.hybrid_ps_parts.cases import (
    ALL_N,
    BY_POWER,
    DAPPLE,
    EQUAL,
    HYBRID,
    HYBRID_OURS,
    LLAMA,
    LOSS_PROB,
    MAIN,
    MODELS,
    NAMES,
    PRINTED_MIN,
    SHAPES,
    SWARM_OURS,
    TASK,
    chains_job,
    compute_s,
    gain,
)
from experiments.reproduce.hybrid_ps_parts.chains import Static
from experiments.reproduce.hybrid_ps_parts.fleets import Fleet, Losses
from experiments.reproduce.hybrid_ps_parts.simulated import DEPTH, System, clean_job, lossy_job
from experiments.reproduce.page import bullets, page, table
from experiments.reproduce.results import Results

from jaxdt.runtime.reporting.interval import SEEDS, Interval

OVER_SWARM, OVER_STATIC, CASE_1_MAX = (1.05, 1.25), (1.2, 1.6), 1.3


def run(out: Path, origin: str, results: Results) -> str:
    """The text of the page. Pictures are written to `out`."""
    simulate(cases.jobs_of(cases.all_batches()), results)
    return page(
        "Hybrid parameter server: Table 2 (grade B: orders and ratios)",
        origin,
        [
            ("Targets", table(["target", "ours", "met"], target_rows(results)) + "\n" + TARGETS),
            ("Table 2: time over that of the hybrid system", RATIOS + cases.ratio_table(results)),
            ("Table 2: minutes of a batch", MINUTES + cases.printed_table(results)),
            (f"Case 4 by every reading, {LLAMA}", READINGS + cases.reading_table(results)),
            (f"The bare models against the simulator, {LLAMA}", AGAINST + cases.against_table(results)),
            ("Where ours differs, and why", bullets(why(results))),
            ("What the paper leaves open, and what was assumed", bullets(assumptions())),
            ("Not modelled", bullets(NOT_MODELLED)),
        ],
    )


def simulate(runs: Iterable[tuple[System | Static, Fleet, Losses | None]], results: Results) -> None:
    """Get the batches of the simulator, on all cores: those without losses first, as they say when losses happen."""
    runs = list(runs)
    ours = [(system, fleet, losses) for system, fleet, losses in runs if isinstance(system, System)]
    bare = [chains_job(system, fleet, losses) for system, fleet, losses in runs if isinstance(system, Static)]
    results.fill([clean_job(system, fleet) for system, fleet, _ in ours] + bare)
    results.fill(
        [lossy_job(system, fleet, losses, results) for system, fleet, losses in ours if losses and losses.of(fleet)]
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


# ------------------------------------------------------------------------------------------------------------ sentences


def why(results: Results) -> list[str]:
    ours = {case: [gain(model, case, SWARM_OURS, results).mean for model in MODELS] for case in (1, 3)}
    printed = [PRINTED_MIN[LLAMA]["Swarm"][case - 1] / PRINTED_MIN[LLAMA][HYBRID][case - 1] for case in (1, 3)]
    redo, everywhere = (
        [cases.slower(LLAMA, system, n, results).mean for n in MAIN] for system in (HYBRID_OURS, SWARM_OURS)
    )
    lost = ", ".join(f"{b / a:.3f} with {n}" for a, b, n in zip(redo, everywhere, MAIN, strict=True))
    return [
        "Without losses our pool is slower than our swarm wiring: swarm takes "
        f"{min(ours[1]):.3f} to {max(ours[1]):.3f} of its time in Case 1 and "
        f"{min(ours[3]):.3f} to {max(ours[3]):.3f} in Case 3. Machines of a pool ask for "
        "work without a plan of it: a backward is done where its forward was, a worker holds three leases, and a "
        "server, which may have three forwards fewer in flight than its workers, waits for work although there is "
        "some. With one task at a time for each machine, as in the fluid model, the two systems take equally long. "
        f"The printed Swarm takes {printed[0]:.3f} and {printed[1]:.3f} times as long for {LLAMA}; the first "
        "no difference in scheduling explains.",
        f"What a loss costs is in the paper's order: Case 4 over Case 3 of swarm is, over that of the pool, "
        f"{lost} that may fail. The pool's slower start takes a part of this gain or all of it.",
        "The pool of ours is a server's, the paper's is a stage's. With 4 servers a stage each has one worker and an "
        "even cut of the batch: a server that loses its worker does the cut alone, and the others do not help.",
        "Static chains with equal shares wait for their slow machines in Case 3. The paper says of no baseline whether "
        "its shares follow speeds; ours are shown both ways. The hybrid system and swarm wiring know the speeds, so "
        "shares by power are the fair side.",
        "The paper's count of Case 4 over 3 (1.10 and 1.04) is below what losing the computation costs by the fluid "
        "model, if gradients of a lost machine are computed again.",
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
        "servers; their workers 3 more), as many as swarm's window allows on average. One server a stage, of "
        "the fastest kind; all others are workers.",
        f"Seeds {SEEDS.start} to {SEEDS.stop - 1}: of links and losses. +- is half the width of a 95 % interval "
        "(Student's t), left out where it would not show; ratios are paired by seed.",
    ]


TARGETS = (
    "The bands are ours, for a system that counts every gradient once; the paper prints single numbers. A static chain "
    "that loses a machine loses its whole share of the batch. Both sides of a row know the same speeds unless the row "
    "says equal shares: there the pipelines do not know them.\n"
)
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
    "Front and back owners, and cuts between the servers of a stage by power: the engine has even cuts and one owner "
    "for both directions.",
    "Averaging, contributions, downloads: they overlap the next batch in the paper, and take no time here on any side.",
    "Machines that leave and come back within a batch; time to join.",
)
