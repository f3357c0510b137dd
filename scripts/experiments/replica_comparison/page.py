"""The raw data of runs whose replicas are equal or may differ, and the page made of them, one for each trial."""

import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from page import filled

from replica_comparison.systems import ROOT

RAW = "runs.jsonl"
TEMPLATES = {
    "replicas": ROOT / "configs/replicas/page.md",
    "sdpipe": ROOT / "configs/reproduce/sdpipe_measured/page.md",
}
EQUAL = "allreduce"
ALONE = "none"  # the system whose replicas never exchange anything before the end
HIDDEN = "streaming_diloco"  # the one that does not wait for its exchanges


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

    @property
    def name(self) -> tuple[str, str, int]:
        return (self.peers, self.system, self.seed)


def read(folder: Path) -> tuple[str, list[Run]]:
    """(machine, load and commit, the runs); nothing where there is no file."""
    path = folder / RAW
    if not path.exists():
        return "", []
    head, *lines = (json.loads(line) for line in path.read_text().splitlines())
    return head["about"], [Run(**line) for line in lines]


def add(trial: str, folder: Path, about: str, run: Run) -> None:
    """Add a run to the raw data, and write the page again."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = [*read(folder)[1], run]
    lines = [{"about": about}, *map(asdict, runs)]
    (folder / RAW).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "README.md").write_text(text(trial, about, runs))


def text(trial: str, about: str, runs: Sequence[Run]) -> str:
    """The page of a trial."""
    values = dict(about=about, runs=runs, steps=runs[0].steps, sections=sections(runs))
    return filled(TEMPLATES[trial].read_text(), sys.modules[__name__], values)


def rows_of_gains(runs: Sequence[Run]) -> list[list]:
    """A row for each system: its throughput over that of all-reduce, seed by seed."""
    by_system = grouped(runs)
    equal = by_system.get(EQUAL, {})
    rows = []
    for system, own in by_system.items():
        gains = ratios(equal, own)
        pairs = [(run.predicted_s, run.as_predicted_s) for run in own.values()]
        off = [predicted / measured - 1 for predicted, measured in pairs if predicted and measured]
        spread_of_errors = f"{statistics.median(off):+.1%} ({min(off):+.1%} to {max(off):+.1%})" if off else "-"
        spread_of_gains = f"{statistics.median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})" if gains else "-"
        median_s = f"{statistics.median(run.step_s for run in own.values()):.3f}"
        rows.append(
            [system, len(own), median_s, spread_of_gains, spread_of_errors, spread([r.held_out for r in own.values()])]
        )
    return rows


def sections(runs: Sequence[Run]) -> str:
    """The sections of the trial replicas."""
    found = []
    for peers in dict.fromkeys(run.peers for run in runs):
        own = [run for run in runs if run.peers == peers]
        found += [f"## {peers.capitalize()} peers\n", table(own), *hidden(own)]
    return "\n".join(found)


def table(runs: Sequence[Run]) -> str:
    by_system = grouped(runs)
    alone = by_system.get(ALONE, {})
    lines = [
        "| system | seeds | s a step, median (least to most) | over `none` | MB between replicas | loss |",
        "|---|---|---|---|---|---|",
    ]
    for system, own in by_system.items():
        step_s = [run.step_s for run in own.values()]
        paired = ratios(own, alone)
        lines.append(
            f"| {system} | {len(own)} | {statistics.median(step_s):.3f} ({min(step_s):.3f} to {max(step_s):.3f}) | "
            f"{f'{statistics.median(paired):.3f}' if paired else '-'} | "
            f"{statistics.median(run.replica_bytes for run in own.values()) / 1e6:.0f} | "
            f"{spread([run.held_out for run in own.values()])} |"
        )
    return "\n".join(lines) + "\n"


def hidden(runs: Sequence[Run]) -> list[str]:
    """How far the exchange of streaming DiLoCo hides behind the steps, in a sentence."""
    by_system = grouped(runs)
    if not {ALONE, HIDDEN} <= by_system.keys():
        return []
    paired = ratios(by_system[HIDDEN], by_system[ALONE])
    return [
        f"Streaming DiLoCo takes {statistics.median(paired):.3f} times the seconds of replicas that exchange nothing "
        f"(median of {len(paired)}; {min(paired):.3f} to {max(paired):.3f}).\n"
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


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    deviation = f" +- {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"
