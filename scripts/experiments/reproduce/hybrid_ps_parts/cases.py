"""The hybrid parameter-server paper's Table 2: its four cases, and what is assumed of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from experiments.reproduce.hybrid_ps_parts import fluid
from experiments.reproduce.hybrid_ps_parts.chains import Static
from experiments.reproduce.hybrid_ps_parts.fleets import ALONE, SLOWDOWN, Fleet, Losses, Machines, Site
from experiments.reproduce.hybrid_ps_parts.simulated import (
    DEPTH,
    FIXED,
    POOL,
    SWARM,
    System,
    batch_s,
    clean_job,
    lossy_job,
)
from experiments.reproduce.results import Job, Results, described

from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval, paired_ratio

HYBRID, SWARM_PRINTED, DAPPLE, PIPEDREAM = ("Hybrid PS", "Swarm", "Dapple", "PipeDream")
XXLARGE, LLAMA = MODELS = ("ALBERT-xxlarge", "Llama-33B")
PRINTED_MIN = {  # minutes of a batch in Cases 1 to 4
    XXLARGE: {
        HYBRID: (56.1, 65.4, 74.8, 82.2),
        SWARM_PRINTED: (53.7, 62.8, 77.5, 96.8),
        DAPPLE: (44.3, 55.9, 79.1, 114.6),
        PIPEDREAM: (43.5, 66.2, 85.2, 115.7),
    },
    LLAMA: {
        HYBRID: (194.6, 216.7, 243.6, 253.6),
        SWARM_PRINTED: (248.4, 272.7, 256.1, 292.5),
        DAPPLE: (168.9, 185.2, 268.5, 356.4),
        PIPEDREAM: (170.2, 204.6, 294.7, 369.8),
    },
}
BATCH, TASK, N_DEVICES, FP32_BYTES = 512, 2, 16, 4  # sequences of a batch and of a task
SHAPES = {XXLARGE: (512, 4096), LLAMA: (2048, 6656)}  # tokens of a sequence, width
SITES = {
    1: (Site("A", 0, 8), Site("A", 1, 8)),
    2: (Site("A", 0, 4), Site("B", 0, 4), Site("C", 1, 4), Site("D", 1, 4)),
    3: (Site("A", 0, 4), Site("B", 1, 4), Site(ALONE, 0, 4, SLOWDOWN), Site(ALONE, 1, 4, SLOWDOWN)),
}
LOSS_PROB = 0.9
MAIN, ALL_N = (3, 4), (3, 4, 8)  # machines that may fail

HYBRID_OURS, SERVERS_4 = System(POOL), System(POOL, n_servers=4)
SWARM_OURS, SWARM_KEEPS = System(SWARM), System(SWARM, keeps=True)
FIXED_OURS = System(FIXED, by_power=True)
EQUAL, BY_POWER, TOGETHER = Static(False, depth=DEPTH), Static(depth=DEPTH), Static(together=True, depth=DEPTH)
NAMES = {
    HYBRID_OURS: "hybrid, 1 server a stage",
    SERVERS_4: "hybrid, 4 servers a stage",
    SWARM_OURS: "swarm, redone in all stages",
    SWARM_KEEPS: "swarm, redone in one stage",
    EQUAL: "static chains, equal shares",
    BY_POWER: "static chains, shares by power",
    TOGETHER: "static chains by power, those who may fail in the same ones",
    FIXED_OURS: "fixed wiring by power, pipelines borrow machines",
}
COMPARED = (HYBRID_OURS, SWARM_OURS, EQUAL, BY_POWER)


def compute_s(model: str) -> float:
    """Seconds of a task in the whole model on a V100: with them DAPPLE's Case 1 takes the printed time, as 1F1B with
    flush fills and drains each of its 8 pipelines once."""
    n_tasks = BATCH // TASK
    n_each = n_tasks // (N_DEVICES // 2)
    return PRINTED_MIN[model][DAPPLE][0] * 60 * N_DEVICES / n_tasks * n_each / (n_each + 1)


def fleet_of(model: str, case: int, seed: int) -> Fleet:
    """The machines of a case; 4 has those of 3, and in 1 nothing is drawn."""
    tokens, width = SHAPES[model]
    return Fleet(
        sites=SITES[min(case, 3)],
        compute_s=compute_s(model),
        boundary_bytes=TASK * tokens * width * FP32_BYTES,
        seed=seed if case > 1 else 0,
        n_microbatches=BATCH // TASK,
    )


Run = tuple[System | Static, Machines, Losses | None]


@dataclass(frozen=True)
class Batch:
    """A batch of a system. n_failing: machines that may fail, in Case 4."""

    model: str
    case: int
    system: System | Static
    n_failing: int = 0

    def minutes(self, results: Results) -> list[float]:
        """The minutes of a batch, one value per seed."""
        return [time_s(self.system, *self.drawn(seed), results) / 60 for seed in SEEDS]

    def drawn(self, seed: int) -> tuple[Fleet, Losses | None]:
        losses = Losses(self.n_failing, LOSS_PROB, seed) if self.case == 4 else None
        return fleet_of(self.model, self.case, seed), losses


def time_s(system: System | Static, machines: Machines, losses: Losses | None, results: Results) -> float:
    """Seconds of a batch, by the simulator or by the bare model of chains."""
    if isinstance(system, System):
        return batch_s(system, machines, losses, results)
    return results.get(chains_job(system, machines, losses))[0]


def chains_job(system: Static, machines: Machines, losses: Losses | None) -> Job:
    """A batch of static chains, by the bare model."""
    assert isinstance(machines, Fleet)  # the bare model has no others
    fleet = machines
    inputs = " ".join(map(described, filter(None, (system, fleet, losses))))
    lost = losses.of(fleet) if losses else {}
    return Job(inputs, 2 * fleet.n_stages * fleet.n_microbatches, partial(_chains, system, fleet, lost))


def _chains(system: Static, fleet: Fleet, lost: dict[int, float]) -> list[float]:
    return [system.batch_s(fleet, lost)]


def fill(runs: Iterable[Run], results: Results) -> None:
    """Get many batches, on all cores: those without losses first, since the simulator's say when losses happen."""
    ours, bare = [], []
    for system, machines, losses in runs:
        if isinstance(system, System):
            ours.append((system, machines, losses))
        else:
            bare.append(chains_job(system, machines, losses))
    results.fill([clean_job(system, machines) for system, machines, _ in ours] + bare)
    lossy = ((system, machines, losses) for system, machines, losses in ours if losses and losses.of(machines))
    results.fill([lossy_job(system, machines, losses, results) for system, machines, losses in lossy])


def over(one: Batch, other: Batch, results: Results) -> Interval:
    """The time of `one` over that of `other`, seed by seed."""
    return paired_ratio(one.minutes(results), other.minutes(results))


def gain(model: str, case: int, system: System | Static, results: Results, n_failing: int = 0) -> Interval:
    """The time of a system over that of the hybrid one."""
    hybrid = Batch(model, case, HYBRID_OURS, n_failing)
    return over(replace(hybrid, system=system), hybrid, results)


def slower(model: str, system: System | Static, n_failing: int, results: Results) -> Interval:
    """Case 4 over Case 3."""
    return over(Batch(model, 4, system, n_failing), Batch(model, 3, system), results)


def met(is_met: bool) -> str:
    return "yes" if is_met else "NO"


# ------------------------------------------------------------------------------------------------------------- sections


def printed_rows(results: Results) -> list[list]:
    """Minutes of both sides, with 4 machines that may fail in Case 4."""
    pairs = ((HYBRID, HYBRID_OURS), (SWARM_PRINTED, SWARM_OURS), (DAPPLE, EQUAL), (DAPPLE, BY_POWER), (PIPEDREAM, None))
    rows = []
    for model in MODELS:
        for printed, ours in pairs:
            cells = []
            for case in range(1, 5):
                paper = PRINTED_MIN[model][printed][case - 1]
                found = str(interval(Batch(model, case, ours, MAIN[-1]).minutes(results))) if ours else "-"
                cells.append(f"{paper:g}: {found}")
            rows.append([model, printed, NAMES[ours] if ours else "not modelled", *cells])
    return rows


def ratio_rows(results: Results) -> list[list]:
    """Time over that of the hybrid system: printed, and ours."""
    rows = []
    for model in MODELS:
        for printed, ours in ((SWARM_PRINTED, SWARM_OURS), (DAPPLE, EQUAL), (DAPPLE, BY_POWER)):
            minutes, base = PRINTED_MIN[model][printed], PRINTED_MIN[model][HYBRID]
            cells = [f"{minutes[c - 1] / base[c - 1]:.3f}: {gain(model, c, ours, results)}" for c in (1, 2, 3)]
            case_4 = minutes[3] / base[3]
            cells += [f"{case_4:.3f}: {gain(model, 4, ours, results, n)}" for n in MAIN]
            rows.append([model, printed, NAMES[ours], *cells])
    return rows


def reading_rows(results: Results) -> list[list]:
    """Case 4 by every reading, for one model: minutes over the hybrid system's of the same row of machines, and over
    those of its own Case 3."""
    rows = []
    for system, name in NAMES.items():
        cells = []
        for n in ALL_N:
            cells += [str(gain(LLAMA, 4, system, results, n)), str(slower(LLAMA, system, n, results))]
        rows.append([name, str(gain(LLAMA, 3, system, results)), *cells])
    return rows


def fluid_slower(reading: str, n_failing: int) -> Interval:
    """Case 4 over Case 3 by the fluid model."""
    drawn = [Batch(LLAMA, 4, HYBRID_OURS, n_failing).drawn(seed) for seed in SEEDS]
    return interval(fluid.slowdown(fleet, losses.of(fleet), reading) for fleet, losses in drawn if losses)


def against_rows(results: Results) -> list[list]:
    """The bare models beside the simulator, where both can speak."""
    rows = []
    for reading, system in ((fluid.KEEP, None), (fluid.REDO, HYBRID_OURS), (fluid.EVERYWHERE, SWARM_OURS)):
        for n in ALL_N:
            ours = str(slower(LLAMA, system, n, results)) if system else "no wiring does that"
            rows.append([f"Case 4 over 3, {n} may fail, fluid: {reading}", str(fluid_slower(reading, n)), ours])
    for by_power in (False, True):
        static, system = (EQUAL, BY_POWER)[by_power], System(FIXED, by_power=by_power)
        for case in (1, 2, 3):
            minutes = [str(interval(Batch(LLAMA, case, one).minutes(results))) for one in (static, system)]
            rows.append([f"minutes of Case {case}, {NAMES[static]}", *minutes])
    return rows


def runs_of(batches: Sequence[Batch]) -> list[Run]:
    return [(batch.system, *batch.drawn(seed)) for batch in batches for seed in SEEDS]


def all_batches() -> list[Batch]:
    """Every batch of the sections."""
    found = [Batch(model, case, system) for model in MODELS for case in (1, 2, 3) for system in COMPARED]
    found += [Batch(LLAMA, 3, system) for system in NAMES]
    found += [Batch(LLAMA, case, System(FIXED, by_power=way)) for case in (1, 2, 3) for way in (False, True)]
    found += [Batch(model, 4, system, n) for model in MODELS for n in MAIN for system in COMPARED]
    return found + [Batch(LLAMA, 4, system, n) for n in ALL_N for system in NAMES]
