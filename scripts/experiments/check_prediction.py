"""Compare predicted and measured step times over emulated networks. Prints a table and one line of JSON.

    python scripts/experiments/check_prediction.py [--only=REGEX] [--runs=5] [--steps=4] [--out=FILE.md]

The cases are real runs of the workload `small`: 6 networks x schedules gpipe and 1f1b x cuts into 2 stages, 4 stages
and 2 stages with 2 pipelines x codecs none and int8. The prediction is the one that a run prints before its first step.
The error of a run is predicted / measured - 1. Even an idle virtual machine may change its speed between the timing of
the stages and the steps, so the error of a case is the median over its runs, and all cases are run once before any is
run again. The JSON object has `cases`, the median and the maximum of the cases' absolute errors (`median_error`,
`max_error`) and those of single runs (`median_run`, `max_run`). Quote it from an otherwise idle machine only: 72 cases
take nearly two hours on two cores.
"""

import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import flags

from jaxdt.cli import environment, run_flags
from jaxdt.model.data import write_tokens
from jaxdt.spec import network as networks
from jaxdt.spec.errors import BadInput

ONLY = flags.DEFINE_string("only", "", "Run only the cases whose name matches this regular expression.")
RUNS = flags.DEFINE_integer("runs", 5, "Runs of each case.", 1)
STEPS = flags.DEFINE_integer("steps", 4, "Steps of a run; its own summary leaves out the first two.", 3)
OUT = flags.DEFINE_string("out", None, "File to which the table is written too.")

ROOT = Path(__file__).resolve().parents[2]
N_PEERS_MAX = 4
LINKS = {  # name: milliseconds one way, Gb/s
    "1000mbps_1ms": (1.0, 1.0),
    "300mbps_5ms": (5.0, 0.3),
    "300mbps_50ms": (50.0, 0.3),
    "100mbps_20ms": (20.0, 0.1),
    "50mbps_5ms": (5.0, 0.05),
}
FOUR_CITIES = "four_cities"
CUTS = {"2x1": (2, 1), "4x1": (4, 1), "2x2": (2, 2)}


@dataclass(frozen=True)
class Case:
    """The settings of a run."""

    network: str
    cut: str
    schedule: str
    codec: str

    def __str__(self) -> str:
        return f"{self.network} {self.cut} {self.schedule} {self.codec}"


@dataclass(frozen=True)
class Result:
    """The step times of a run, from its summary."""

    case: Case
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def __str__(self) -> str:
        return f"{self.case}: {self.predicted_s:.3f} s predicted, {self.measured_s:.3f} s, {100 * self.error:+.1f} %"


def cases() -> list[Case]:
    """The cases that --only selects."""
    every = itertools.product(CUTS, ("1f1b", "gpipe"), ("none", "int8"), [*LINKS, FOUR_CITIES])
    grid = [Case(network, cut, schedule, codec) for cut, schedule, codec, network in every]
    return [case for case in grid if re.search(ONLY.value, str(case))]


def run(case: Case, folder: Path, tokens: Path) -> Result:
    """Run a case."""
    stages, pipelines = CUTS[case.cut]
    run_dir = folder / "run"
    command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/small.py'}", "--overwrite"]
    command += [f"--run_dir={run_dir}", "--report=false", f"--emulate={folder / case.network}.json"]
    settings = {"plan.stages": stages, "plan.pipelines": pipelines, "plan.schedule": case.schedule, "codec": case.codec}
    settings |= {"train.steps": STEPS.value, "data.path": tokens}
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run_dir / "summary.json").read_text())
    return Result(case, summary["step_s_predicted"], summary["step_s_measured"])


def row(case: Case, runs: list[Result]) -> str:
    """A row of the table: medians over the runs, and the errors of all runs."""
    errors = [100 * run.error for run in runs]
    predicted_s = statistics.median(run.predicted_s for run in runs)
    measured_s = statistics.median(run.measured_s for run in runs)
    columns = [f"{predicted_s:.3f}", f"{measured_s:.3f}", f"{statistics.median(errors):+.1f} %"]
    return f"| {case} | {' | '.join(columns)} | {', '.join(f'{error:+.1f}' for error in errors)} |"


def prepare(folder: Path) -> Path:
    """Write the networks of the cases and a random token file into `folder`; returns the token file."""
    tokens = folder / "tokens.tok"
    ids = np.random.default_rng(0).integers(0, 1024, 200_000).astype(np.uint16)
    write_tokens(tokens, "random", 1024, ids, ids[:20_000])
    for link, (latency_ms, gbps) in LINKS.items():
        network = networks.uniform(N_PEERS_MAX, latency_ms / 1e3, gbps)
        (folder / f"{link}.json").write_text(json.dumps(networks.to_json(network)))
    cities = (ROOT / f"configs/networks/{FOUR_CITIES}.json").read_text()
    (folder / f"{FOUR_CITIES}.json").write_text(cities)
    return tokens


def main() -> int:
    environment.compute_on_cpu()
    chosen = cases()
    if not chosen:
        raise BadInput(
            f"--only: {ONLY.value!r} matches none of the cases, such as {Case(FOUR_CITIES, '2x2', '1f1b', 'int8')}"
        )
    results: dict[Case, list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = prepare(folder)
        for case in chosen * RUNS.value:
            results[case].append(run(case, folder, tokens))
            print(results[case][-1], file=sys.stderr, flush=True)
    lines = ["| case | predicted s | measured s | error | of each run |", "|---|---|---|---|---|"]
    lines += [row(case, runs) for case, runs in results.items()]
    errors = [abs(statistics.median(run.error for run in runs)) for runs in results.values()]
    run_errors = [abs(run.error) for runs in results.values() for run in runs]
    summary = {
        "cases": len(results),
        "median_error": statistics.median(errors),
        "max_error": max(errors),
        "median_run": statistics.median(run_errors),
        "max_run": max(run_errors),
    }
    if OUT.value:
        Path(OUT.value).write_text("\n".join([*lines, "", json.dumps(summary)]) + "\n")
    print("\n".join([*lines, json.dumps(summary)]))
    return 0


if __name__ == "__main__":
    run_flags.run(main)
