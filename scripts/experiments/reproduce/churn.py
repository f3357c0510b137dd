"""Whole runs on a trace of spot machines: `fixed`, `swarm`, and `swarm` with two rules for rebalancing.

The setup is that of scripts/experiments/comparisons/study.py, which runs real processes. Here all is simulated, and 10
seeds draw who leaves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from experiments.churn_comparison.results import Run, is_alone, run_of, uneven_spans
from experiments.churn_comparison.setup import ROUTERS, SETUP, TRACE, TRACE_BEGIN_S, TRACE_S, TRACE_SPEED, fields
from experiments.churn_comparison.setup import schedule as scheduled
from experiments.reproduce.machines import on_machines
from experiments.reproduce.results import Job, Results
from experiments.reproduce.swarm_rebalancing import read
from matplotlib.figure import Figure

from jaxdt.protocol import events as ev
from jaxdt.run import config as configs
from jaxdt.run.network import Link
from jaxdt.run.plan import Plan
from jaxdt.runtime.reporting.interval import SEEDS, Interval, interval, paired_ratio, sentence
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.sim.predict import Conditions, simulate
from jaxdt.sim.sim_peer import Outcome

PERIOD_S = 8.0
BEGIN_S = 10.0  # of the simulation, when the trace begins
LINK = Link(1e-4, 10.0)  # loopback
N_BINS = 32
KINDS = ("step", "view", "move")
FIXED, SWARM, OURS, LITERAL = ARMS = ("fixed", "swarm", "swarm + rebalancing", "swarm + Algorithm 2's listing")
FIGURES = ("samples_per_s", "uneven_s", "moves", "spared", "n_steps")


@dataclass(frozen=True)
class Case:
    """A run: one of ARMS, seconds of the trace in one of the run, and the seed of who leaves."""

    arm: str
    speed: float
    seed: int

    @property
    def seconds(self) -> float:
        return TRACE_S / self.speed

    def job(self) -> Job:
        """The simulation. Its values: those named FIGURES, then samples/s in N_BINS equal parts of the run."""
        inputs = (
            f"{read(TRACE).label} from {TRACE_BEGIN_S:g} s for {TRACE_S:g} s arm={self.arm!r} speed={self.speed:g} "
            f"seed={self.seed} {SETUP} period={PERIOD_S:g} routers={ROUTERS} {LINK}"
        )
        return Job(inputs, round(30 * self.seconds), partial(values_of, self))


def values_of(case: Case) -> list[float]:
    """The values of a run."""
    run, n_spared = played(case)
    width_s = case.seconds / N_BINS
    uneven_s = sum(b - a for a, b in uneven_spans(run))
    n_steps = sum(0 < end_s <= run.seconds for end_s in run.ends_s.values())
    figures = [run.rate(0.0, case.seconds), uneven_s, len(run.moves_s), n_spared, n_steps]
    return [*figures, *(run.rate(n * width_s, (n + 1) * width_s) for n in range(N_BINS))]


def played(case: Case) -> tuple[Run, int]:
    """The run, and how many machines were spared because they were alone at their stage, as the study spares them."""
    faults = schedule(case)
    n_spared = 0
    while True:
        outcome = simulated(case, faults)
        alone = first_alone(outcome, faults)
        if alone is None:
            break
        faults = [fault for fault in faults if fault != alone]
        n_spared += 1
    about = dict(name=case.arm, began_s=BEGIN_S, seconds=case.seconds, events=[], n_samples=SETUP.microbatches)
    return run_of(about | dict(held_up_s=0.0, cores_busy=0.0), records(outcome)), n_spared


def schedule(case: Case) -> list[Fault]:
    """The machines that leave and join, and the moments; the same for all arms."""
    faults = scheduled(case.seconds, case.seed, case.speed)
    return [replace(fault, at_s=BEGIN_S + fault.at_s) for fault in faults]


def simulated(case: Case, faults: Sequence[Fault]) -> Outcome:
    """The run, and some seconds more, since the step under way at its end counts in part."""
    wiring = dict(kind="fixed") if case.arm == FIXED else dict(kind="swarm", routers=ROUTERS)
    if case.arm in (OURS, LITERAL):
        wiring |= dict(rebalance_s=PERIOD_S, rebalance_rule="algorithm2" if case.arm == LITERAL else "bottleneck")
    given = fields(SETUP, wiring)
    config = configs.parse(given | {"model": {"preset": "debug"} | given["model"]})
    plan = replace(configs.default_plan(config), in_flight=(*[SETUP.microbatches] * (SETUP.stages - 1), 1))
    until_s = BEGIN_S + case.seconds + 60.0
    return simulate(config, plan, conditions_of(plan), faults=faults, until_s=until_s)


def conditions_of(plan: Plan) -> Conditions:
    return on_machines(
        {peer: work_seconds(plan.seat(peer)[0]) for peer in plan.peers},
        lambda src, dst: LINK,
        LINK,
        persist_s=0.002,
        seconds_at=lambda machine, stage: work_seconds(stage),
    )


def work_seconds(stage: int) -> dict[str, float]:
    """Seconds of each kind of Work. The last stage's backward contains its forward."""
    forward_s = SETUP.forward_s
    seconds = {"F": forward_s, "B": 2 * forward_s, "E": forward_s, "G": 0.001, "U": 0.001}
    return seconds | {"F": 0.0, "B": 3 * forward_s} if stage == SETUP.stages - 1 else seconds


def records(outcome: Outcome, until_s: float = float("inf")) -> list[dict]:
    """The coordinator's reports until a moment, as records of a trace."""
    return [
        {"t": at_s, "kind": report.kind, "fields": report.fields}
        for at_s, peer, report in outcome.reports
        if peer == ev.COORDINATOR and report.kind in KINDS and at_s < until_s
    ]


def first_alone(outcome: Outcome, faults: Sequence[Fault]) -> Fault | None:
    """The first machine that leaves while it is alone at its stage."""
    newcomers = [report.fields["peer"] for _, _, report in outcome.reports if report.kind == "join_request"]
    newcomers = list(dict.fromkeys(newcomers))
    killed: set[int] = set()
    for fault in (fault for fault in faults if fault.kind == CRASH):
        n = fault.peer - ev.TEMPORARY_IDS
        peer = fault.peer if n < 0 else newcomers[n]
        if is_alone(records(outcome, fault.at_s), peer, killed):
            return fault
        killed.add(peer)
    return None


# --------------------------------------------------------------------------------------------------------------- page


@dataclass(frozen=True)
class Arm:
    """The values of an arm, one list per seed."""

    runs: Sequence[Sequence[float]]

    def figure(self, name: str) -> list[float]:
        return [values[FIGURES.index(name)] for values in self.runs]

    def over(self, other: "Arm") -> Interval:
        """Samples/s over those of another arm, paired by seed."""
        return paired_ratio(self.figure("samples_per_s"), other.figure("samples_per_s"))

    @property
    def bins(self) -> list[Interval]:
        """Samples/s in each part of the run."""
        return [interval(values[len(FIGURES) + n] for values in self.runs) for n in range(N_BINS)]


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    results.fill(Case(arm, TRACE_SPEED, seed).job() for arm in ARMS for seed in SEEDS)
    arms = {arm: Arm([results.get(Case(arm, TRACE_SPEED, seed).job()) for seed in SEEDS]) for arm in ARMS}
    return dict(pictures={"churn.png": draw(arms)}, arms=arms, SEEDS=SEEDS)


def arm_rows(arms: dict[str, Arm]) -> list[list[str]]:
    """A row for each arm."""
    rows = []
    for name, arm in arms.items():
        least, most = (pick(arm.figure("moves")) for pick in (min, max))
        cells = [interval(arm.figure("samples_per_s")), arm.over(arms[SWARM]), arm.over(arms[OURS])]
        cells += [interval(arm.figure("uneven_s")), f"{least:.0f} to {most:.0f}", f"{sum(arm.figure('spared')):.0f}"]
        rows.append([name, *map(str, cells)])
    return rows


def sentences(arms: dict[str, Arm]) -> list[str]:
    """Sentences about a table."""
    pairs = ((OURS, SWARM), (OURS, FIXED), (LITERAL, SWARM), (LITERAL, OURS))
    return [compared(one, other, arms) for one, other in pairs]


def compared(one: str, other: str, arms: dict[str, Arm]) -> str:
    """A sentence that compares two arms, seed by seed."""
    return sentence(one, other, {name: arms[name].figure("samples_per_s") for name in (one, other)})


def draw(arms: dict[str, Arm]) -> Figure:
    figure = Figure(figsize=(11, 4), layout="constrained")
    curves, ratios = figure.subplots(1, 2, width_ratios=(2, 1))
    edges = [n * TRACE_S / TRACE_SPEED / N_BINS for n in range(N_BINS + 1)]
    for i, (name, arm) in enumerate(arms.items()):
        means = [value.mean for value in arm.bins]
        curves.step(edges, [*means, means[-1]], f"C{i}", where="post", label=name)
        values, others = (which.figure("samples_per_s") for which in (arm, arms[SWARM]))
        ratios.plot([i] * len(values), [a / b for a, b in zip(values, others, strict=True)], f"C{i}.", alpha=0.5)
        mean = arm.over(arms[SWARM])
        ratios.errorbar([i + 0.2], [mean.mean], [mean.half], fmt=f"C{i}o", ms=4, capsize=3)
    curves.set(xlabel="seconds", ylabel="samples/s, mean of all seeds", ylim=(0, None), xlim=(0, edges[-1]))
    ratios.axhline(1.0, color="k", lw=0.7)
    ratios.set(ylabel="samples over those of swarm, per seed", xlim=(-0.5, len(arms) - 0.3))
    ratios.set_xticks(range(len(arms)), ["fixed", "swarm", "rebal-\nancing", "Alg. 2's\nlisting"])
    figure.legend(*curves.get_legend_handles_labels(), loc="outside upper center", ncols=len(ARMS))
    return figure
