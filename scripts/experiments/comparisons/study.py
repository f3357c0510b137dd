"""`fixed`, `swarm` and `swarm` with rebalancing, while machines leave and join as in a recorded trace.

The same run three times a seed, one after the other, as eight processes of this machine: two stages of four peers with
a tiny model. Forwards sleep for 0.15 s, so that two cores are enough. In each run the machines that the trace loses are
killed (kill -9), and those that it gains are started with `train.py --join`: the same machines at the same moments. The
seed draws the killed machines. A peer that is alone at its stage is spared. The first of the three runs is another one
from seed to seed.

Hardware: any laptop, 2 cores and 4 GB of memory that are free; about 10 minutes a seed, and 100 minutes for the page's
ten seeds, of which none is left out, on a machine that does nothing else. Expected (configs/study/README.md): the
losses of the three agree to 1e-5. While a stage has lost more peers than the other, the run that rebalances is up to
1.8 times as fast as the two others, from the moment at which a peer has moved until newcomers have joined. With equal
machines and even stages all three are equally fast. The result has under `bad` losses that do not agree, and runs of a
seed that did not have the same events. study.png shows the runs of the first seed.
"""

import random
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from churn_comparison import results
from churn_comparison.results import Run
from churn_comparison.setup import ROUTERS, SETUP, TRACE_S, TRACE_SPEED, Setup, fields, schedule
from comparison import Comparison, Given, Line, rotated, told
from page import ROOT, markdown_table, span
from processes import Join, Kill, Trial, at, play

from jaxdt.cli import local_run, plots
from jaxdt.protocol import events as ev
from jaxdt.runtime.reporting.interval import SEEDS, interval, sentence
from jaxdt.sim.faults import CRASH, Fault

SWARM = dict(kind="swarm", routers=ROUTERS)
WIRINGS = {"fixed": dict(kind="fixed"), "swarm": SWARM, "swarm + rebalancing": SWARM | dict(rebalance_s=8.0)}
WARM_UP_STEPS = 3  # every peer has compiled after them
PICTURED_SEED = SEEDS[0]


# ----------------------------------------------------------------------------------------------------------- the runs


def cases(given: Given) -> list[Line]:
    return [dict(seed=seed, name=name) for seed in given.seeds for name in rotated([*WIRINGS], seed)]


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    seconds = TRACE_S / TRACE_SPEED
    for case in left:
        print(f"seed {case['seed']}, {case['name']}: about {seconds + 30:.0f} s", flush=True)
        run_dir = folder / f"seed_{case['seed']}" / case["name"].replace(" ", "_")
        run = played_run(run_dir, case["name"], SETUP, schedule(seconds, case["seed"], TRACE_SPEED), seconds)
        yield {"seed": case["seed"], "run": asdict(run)}


def played_run(folder: Path, name: str, setup: Setup, faults: Sequence[Fault], seconds: float) -> Run:
    """Play a schedule for so long. Machines have the names of the schedule: newcomer n is the one of
    TEMPORARY_IDS + n."""
    config = folder / "study_config.py"
    if config.exists():
        shutil.rmtree(folder)  # of a run that was interrupted
    folder.mkdir(parents=True)
    local_run.write_config(config, fields(setup, WIRINGS[name]))
    trial = Trial(
        config=str(config),
        flags=(f"--config={config}",),
        seconds=seconds,
        begins=WARM_UP_STEPS,
        forward_s=setup.forward_s,
        disturbances=[at(fault.at_s, disturbance(fault, setup)) for fault in faults],
        expected=(),
    )
    played = play(trial, folder / "run", random.Random(0))
    measured = dict(held_up_s=played.held_up_s, cores_busy=played.cores_busy, events=played.events)
    about = dict(name=name, n_samples=setup.microbatches, began_s=played.began_s, seconds=seconds)
    return results.run_of(about | measured, played.records())


def disturbance(fault: Fault, setup: Setup) -> Kill | Join:
    if fault.kind != CRASH:
        return Join()
    is_newcomer = fault.peer >= ev.TEMPORARY_IDS
    name = f"newcomer {fault.peer - ev.TEMPORARY_IDS}" if is_newcomer else f"peer {fault.peer}"
    return Kill(name, by=setup.leave_by, spares_alone=not setup.lose_stages)


def by_seed(lines: Sequence[Line]) -> dict[int, list[Run]]:
    """The runs of each seed that has all of them, in the order in which they were made."""
    found: dict[int, list[Run]] = {}
    for line in lines:
        found.setdefault(line["seed"], []).append(run_in(line["run"]))
    return {seed: found[seed] for seed in sorted(found) if len(found[seed]) == len(WIRINGS)}


def run_in(fields: dict) -> Run:
    """A run from its line. JSON has neither tuples nor integers as keys."""
    by_step = {name: {int(step): value for step, value in fields[name].items()} for name in ("ends_s", "losses")}
    lists = dict(
        events=tuple(map(tuple, fields["events"])),
        peers=tuple((at_s, tuple(sizes)) for at_s, sizes in fields["peers"]),
        moves_s=tuple(fields["moves_s"]),
    )
    return Run(**(fields | by_step | lists))


def result(lines: Sequence[Line]) -> dict[str, Any]:
    """The figures of the runs of each seed, and what is wrong with them."""
    found = {seed: results.compare(runs) for seed, runs in by_seed(lines).items()}
    return {"seeds": found, "bad": _bad(found)}


def _bad(found: Mapping[int, dict]) -> list[str]:
    return [f"seed {seed}: {'; '.join(own['bad'])}" for seed, own in found.items() if own["bad"]]


# ----------------------------------------------------------------------------------------------------------- the page


def values(folder: Path, out: Path) -> dict[str, Any] | None:
    """Means and ratios are of all ten seeds; the picture is of the first one that is there."""
    about, lines = COMPARISON.read(folder)
    runs = by_seed(lines)
    if runs:
        plots.churn_comparison(out / "study.png", sorted(runs[min(runs)], key=lambda run: run.name))
    if [*runs] != [*SEEDS]:
        return None
    compared = {seed: results.compare(own) for seed, own in runs.items()}
    figures = [found["runs"] for found in compared.values()]
    names = sorted(figures[0])
    rates = {name: [own[name]["samples_per_s"] for own in figures] for name in names}
    shown = dict(about=told(about), names=names, seeds_table=seeds_table(rates), sentences=_sentences(rates))
    return shown | dict(means=_means(figures, names), checks=_checks(compared, runs))


def seeds_table(rates: Mapping[str, Sequence[float]]) -> str:
    """Samples/s of each wiring, over the seeds and for each."""
    head = ["wiring", "samples/s", *(f"seed {seed}" for seed in SEEDS)]
    rows = [[name, interval(own), *(f"{rate:.2f}" for rate in own)] for name, own in sorted(rates.items())]
    return markdown_table(head, rows) + "\n"


def _sentences(rates: dict[str, list[float]]) -> list[str]:
    names = list(rates)
    pairs = [(one, other) for i, other in enumerate(names) for one in names[i + 1 :]]
    return [sentence(one, other, rates) for one, other in pairs]


def _means(figures: Sequence[dict], names: Sequence[str]) -> list[list]:
    """Means over seeds of what else the runs had."""
    whats = {
        "seconds in which a stage had two peers more than the other": "uneven_s",
        "steps": "steps",
        "moves of peers between stages": "moves",
        "machines that left": "leaves",
        "machines that came": "joins",
        "machines spared, since each was alone at its stage": "spared",
    }
    return [[what, *(interval(own[name][field] for own in figures) for name in names)] for what, field in whats.items()]


def _checks(compared: Mapping[int, dict], by_seed: Mapping[int, Sequence[Run]]) -> str:
    """Whether the runs of a seed had the same events and losses, and how busy the machine was."""
    runs = [run for own in by_seed.values() for run in own]
    steps = sum(found["steps_compared"] for found in compared.values())
    difference = max(found["loss_difference"] for found in compared.values())
    bad = _bad(compared)
    busy = [run.cores_busy for run in runs]
    lines = [
        f"Losses of the {steps} steps that all three runs of a seed did differ by at most {difference:.1e} (relative), "
        "whoever was killed.",
        f"What a comparison must not show: {'. '.join(bad)}." if bad else "All runs of a seed had the same events.",
        f"The process that killed and started others was held up for {max(run.held_up_s for run in runs):.2f} s at "
        f"most. {statistics.fmean(busy):.1f} cores were busy in the mean of a run ({span(busy, '.1f')}), with all that "
        "ran on the machine.",
    ]
    return " ".join(lines) + "\n"


COMPARISON = Comparison(
    page=ROOT / "configs/study",
    cases=cases,
    made=made,
    values=values,
    result=result,
    n_seeds=len(SEEDS),
    fields=("seed", "run"),
)
