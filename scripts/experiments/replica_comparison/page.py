"""The raw data of runs whose replicas are equal or may differ, and the page made of them, one for each trial."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

RAW = "runs.jsonl"
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
    (folder / "README.md").write_text({"replicas": text, "sdpipe": text_of_stragglers}[trial](about, runs))


def text_of_stragglers(about: str, runs: Sequence[Run]) -> str:
    """The page of the trial sdpipe."""
    return SDPIPE_HEAD.format(about=about, steps=runs[0].steps) + "\n" + table_of_gains(runs) + "\n" + SDPIPE_FOOT


def table_of_gains(runs: Sequence[Run]) -> str:
    """A row for each system: its throughput over that of all-reduce, seed by seed."""
    by_system = grouped(runs)
    equal = by_system.get(EQUAL, {})
    lines = [
        "| system | seeds | s a step, median | over all-reduce, median (least to most) | prediction off by | loss |",
        "|---|---|---|---|---|---|",
    ]
    for system, own in by_system.items():
        gains = ratios(equal, own)
        pairs = [(run.predicted_s, run.as_predicted_s) for run in own.values()]
        off = [predicted / measured - 1 for predicted, measured in pairs if predicted and measured]
        spread_of_errors = f"{statistics.median(off):+.1%} ({min(off):+.1%} to {max(off):+.1%})" if off else "-"
        spread_of_gains = f"{statistics.median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})" if gains else "-"
        lines.append(
            f"| {system} | {len(own)} | {statistics.median(run.step_s for run in own.values()):.3f} | "
            f"{spread_of_gains} | {spread_of_errors} | "
            f"{spread([run.held_out for run in own.values()])} |"
        )
    return "\n".join(lines) + "\n"


def text(about: str, runs: Sequence[Run]) -> str:
    """The page of the trial replicas."""
    sections = [HEAD.format(about=about, steps=runs[0].steps)]
    for peers in dict.fromkeys(run.peers for run in runs):
        own = [run for run in runs if run.peers == peers]
        sections += [f"## {peers.capitalize()} peers\n", table(own), *hidden(own)]
    return "\n".join([*sections, FOOT])


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


HEAD = """# Replicas that are equal, and replicas that may differ

    python scripts/experiments/compare_replicas.py --run_dir=runs/replicas --page=configs/replicas --about=TEXT
    python scripts/experiments/compare_replicas.py --run_dir=runs/replicas --page=configs/replicas --about=TEXT \\
        --stalls --systems=allreduce,local_sgd,sdpipe,none --seeds=0,1,2

The model of `configs/quickstart.py`, 2 stages x 2 pipelines, {steps} steps with the same tokens, over the emulated
links of `configs/networks/four_cities.json`, as real processes of one machine. Forwards take at least 30 ms and
backwards 60, so that the machine's cores are not what is measured. The first system is another one from seed to seed.
With --stalls each peer pauses for a second in a tenth of its steps. {about}
Raw data: [`runs.jsonl`](runs.jsonl), from which this page is written.

A step is 8 microbatches, 4 of each pipeline. `none` never averages before the end; it says what a pipeline takes alone.
"Over `none`" is the median of the ratios seed by seed. The bytes are those between replicas of a stage in the whole
run, but for what a peer had sent in its last second. They contain the mean of the whole state at the end, which all but
`allreduce` make once, and which is all that `none` sends: three numbers a parameter, with an outer optimizer five. The
loss is the held-out loss of the result, nats per byte, mean +- standard deviation over seeds.
"""

FOOT = """## How to read it

It is a small model and a short run: 0.4 million parameters a stage, so an exchange of gradients is short, and an
average every 20 steps happens five times. On a larger model the links count for more, and what is between two averages
is less of the run. Two pipelines cannot show what groups of a few among many are for
([SDPipe](../reproduce/sdpipe/README.md)).
"""

SDPIPE_HEAD = """# SDPipe's stragglers, measured with real processes

    python scripts/experiments/compare_replicas.py --trial=sdpipe --run_dir=runs/sdpipe_measured \\
        --page=configs/reproduce/sdpipe_measured --about=TEXT

The run of `configs/sdpipe.py` with 2 layers of width 32, 2 stages x 4 pipelines, {steps} steps with the same tokens, as
real processes of one machine, beside [the simulated page](../sdpipe/README.md), whose rules and stalls these are: each
peer pauses for 0.3 s before the first forward of a step with probability 0.1, by the same draws under each system.
Forwards take at least 30 ms and backwards 60, and the model is small, so that the cores are not what is measured: with
the model of the config, of width 128, eight peers fill two cores. The first system is another one from seed to seed.
{about} Raw data: [`runs.jsonl`](runs.jsonl), from which this page is written. A run that is there is not made
again, so the same command goes on after an interruption.
"""

SDPIPE_FOOT = """\
A step is 8 microbatches, 2 of each pipeline; the first 10 are not timed. Throughput is compared seed by seed.
"Prediction off by": the step time that each run predicted at its start, from the times that its peers had measured,
against what its summary says it measured: the median step of all-reduce, the mean row of the others. With stalls the
median step of all-reduce has one; its mean, which the ratios compare, does not always.

`sdpipe_p10` and `sdpipe_p4n` are SDPipe with P = 10 and P = 4N. `pairs` and `first_come` are the two readings of
AD-PSGD; with four pipelines `preduce` has the settings of `first_come`, so the two differ by chance alone. `hetpipe`
has a wave of 10 steps and a staleness of 4. `none` never averages before the end. The loss is the held-out loss of the
result, nats per byte, mean +- standard deviation over seeds.
"""
