"""Replicas that are equal, and replicas that may differ: seconds of a step, bytes between replicas, and loss.

Four peers, 2 stages x 2 pipelines, with the model and the steps of configs/baseline.py, over the emulated links of
configs/networks/four_cities.json. Each system runs with six seeds, and some with three seeds more under peers that
stall: each pauses for a second in a tenth of its steps, by the same draws under each system. Forwards take at least 30
ms, so two cores are enough. The first system is another one from seed to seed. A run takes a minute and a quarter.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from comparison import Comparison, Given, Line, launched, rotated, told
from page import ROOT, centred, markdown_table, span, spread

from jaxdt.cli import local_run

EQUAL = "allreduce"
ALONE = "none"  # the system whose replicas never exchange anything before the end
HIDDEN = "streaming_diloco"  # the one that does not wait for its exchanges
WARM_UP = 10  # steps before those that are timed
EVEN, STALLING = "even", "stalling"


@dataclass(frozen=True)
class Setting:
    """`systems`: name -> config and flags; `how`: the flags of all runs; `stalls`: of stalling peers, with the seed."""

    systems: Mapping[str, Sequence[str]]
    how: Sequence[str]
    stalls: str


SYSTEMS = {
    "allreduce": ("--config=configs/baseline.py", "--config.model.tied_head=false"),
    "all": ("--config=configs/local_sgd.py", "--config.sync.groups.every_steps=1"),
    "local_sgd": ("--config=configs/local_sgd.py",),
    "diloco": ("--config=configs/diloco.py",),
    "streaming_diloco": ("--config=configs/streaming_diloco.py",),
    "sdpipe": ("--config=configs/sdpipe.py", "--config.plan.pipelines=2"),
    "none": ("--config=configs/local_sgd.py", "--config.sync.groups.match=none"),
}
STALLED, STALLED_SEEDS = ("allreduce", "local_sgd", "sdpipe", "none"), 3
SETTING = Setting(
    SYSTEMS,
    how=(f"--emulate={ROOT / 'configs/networks/four_cities.json'}", "--emulate_forward_s=0.03"),
    stalls="0.1,1.0,{seed}",
)


@dataclass(frozen=True)
class Run:
    """One run. `peers`: even, or stalling. `step_s`: mean seconds of a step after the first ones. `replica_bytes`: what
    replicas of one stage sent one another in the whole run. `held_out`: loss of the result, nats per byte.
    `predicted_s`: seconds of a step that the simulator has predicted at the start of the run, where that is kept, and
    `as_predicted_s` the measured ones that it is about: a median where replicas are equal, a mean where they differ."""

    system: str
    peers: str
    seed: int
    steps: int
    step_s: float
    replica_bytes: int
    held_out: float
    predicted_s: float | None = None
    as_predicted_s: float | None = None


# ----------------------------------------------------------------------------------------------------------- the runs


def in_turn(systems: Iterable[str], peers: str, seeds: Sequence[int], steps: int) -> list[Line]:
    return [
        dict(system=system, peers=peers, seed=seed, steps=steps)
        for number, seed in enumerate(seeds)
        for system in rotated([*systems], number)
    ]


def cases(given: Given) -> list[Line]:
    stalled = in_turn(STALLED, STALLING, given.seeds[:STALLED_SEEDS], given.steps)
    return in_turn(SYSTEMS, EVEN, given.seeds, given.steps) + stalled


def maker(setting: Setting) -> Callable[[Sequence[Line], Given, Path], Iterator[Line]]:
    def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
        return (asdict(run_of(setting, folder, **case)) for case in left)

    return made


def run_of(setting: Setting, folder: Path, system: str, peers: str, seed: int, steps: int) -> Run:
    """Make a run, and read what it has measured."""
    run_dir = folder / f"{peers}_{system}_{seed}"
    config, *fields = setting.systems[system]
    words = [
        config.replace("configs", str(ROOT / "configs")),
        *fields,
        f"--config.train.seed={seed}",
        f"--config.train.steps={steps}",
        f"--config.train.eval_every_steps={steps}",
        "--config.train.eval_microbatches=8",
        *setting.how,
    ]
    words += [f"--stall={setting.stalls.format(seed=seed)}"] if peers == STALLING else []
    summary = launched(run_dir, words)
    timed = local_run.step_seconds(run_dir)
    return Run(
        system,
        peers,
        seed,
        len(timed),
        round(statistics.fmean(timed[WARM_UP:]), 5),
        replica_bytes(run_dir, summary["bytes_on_links"]),
        round(summary["eval_loss_last"], 5),
        summary["step_s_predicted"],
        summary["step_s_measured"],
    )


def replica_bytes(run_dir: Path, on_links: dict[str, int]) -> int:
    """The bytes between peers of the same stage, over all such links in both directions."""
    stages = [set(stage) for stage in json.loads((run_dir / "plan.json").read_text())["placement"]]
    total = 0
    for link, n_bytes in on_links.items():
        ends = set(map(int, link.split("->")))
        total += n_bytes if any(ends <= stage for stage in stages) else 0
    return total


# ----------------------------------------------------------------------------------------------------------- the page


def values(folder: Path, out: Path) -> dict[str, Any]:
    about, lines = COMPARISON.read(folder)
    runs = [Run(**line) for line in lines]
    return dict(about=told(about), runs=runs, steps=runs[0].steps, sections=sections(runs))


def sections(runs: Sequence[Run]) -> str:
    found = []
    for peers in dict.fromkeys(run.peers for run in runs):
        own = [run for run in runs if run.peers == peers]
        found += [f"## {peers.capitalize()} peers\n", table(own), *hidden(own)]
    return "\n".join(found)


def table(runs: Sequence[Run]) -> str:
    by_system = grouped(runs)
    alone = by_system.get(ALONE, {})
    rows = []
    for system, own in by_system.items():
        step_s = [run.step_s for run in own.values()]
        paired = ratios(own, alone)
        seconds = centred(step_s, ".3f", statistics.median)
        mega = f"{statistics.median(run.replica_bytes for run in own.values()) / 1e6:.0f}"
        over = f"{statistics.median(paired):.3f}" if paired else "-"
        rows.append([system, len(own), seconds, over, mega, spread([run.held_out for run in own.values()], 3)])
    head = ["system", "seeds", "s a step, median (least to most)", "over `none`", "MB between replicas", "loss"]
    return markdown_table(head, rows) + "\n"


def hidden(runs: Sequence[Run]) -> list[str]:
    """How far the exchange of streaming DiLoCo hides behind the steps, in a sentence."""
    by_system = grouped(runs)
    if not {ALONE, HIDDEN} <= by_system.keys():
        return []
    paired = ratios(by_system[HIDDEN], by_system[ALONE])
    return [
        f"Streaming DiLoCo takes {statistics.median(paired):.3f} times the seconds of replicas that exchange nothing "
        f"(median of {len(paired)}; {span(paired, '.3f')}).\n"
    ]


def grouped(runs: Iterable[Run]) -> dict[str, dict[int, Run]]:
    """The runs by system and seed."""
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        found.setdefault(run.system, {})[run.seed] = run
    return found


def ratios(runs: Mapping[int, Run], others: Mapping[int, Run]) -> list[float]:
    """Seconds a step over those of the other system, for the seeds that both have."""
    return [runs[seed].step_s / others[seed].step_s for seed in sorted(runs.keys() & others.keys())]


COMPARISON = Comparison(
    page=ROOT / "configs/replicas",
    cases=cases,
    made=maker(SETTING),
    values=values,
    n_seeds=6,
    steps=100,
    steps_min=WARM_UP + 1,
    fields=("system", "peers", "seed", "steps"),
)
