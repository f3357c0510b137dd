"""Predicted against measured step times over emulated networks; prints a table and ends with one line of JSON.

    python scripts/experiments/check_prediction.py [--only=REGEX] [--runs=5] [--steps=4] [--out=FILE.md]

Every case is the workload `small`: 6 networks x gpipe and 1f1b x 2 stages, 4 stages and 2 x 2 x codec none and int8, in
real runs. The prediction is the one that a run prints before its first step; a run's error is predicted / measured - 1.
A virtual machine may be as idle as it can be and yet change its speed between the timing of the stages and the steps,
so a case's error is the median of its runs'; all cases are run once before any is run again. JSON: `cases`,
`median_error` and `max_error`, of their absolute values, and the same of single runs (`median_run`, `max_run`). Quote
it from an otherwise idle machine only: 72 cases take nearly two hours on two cores.
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402

from jaxdt.cli import run_flags  # noqa: E402
from jaxdt.model.data import write_tokens  # noqa: E402
from jaxdt.spec import network as networks  # noqa: E402
from jaxdt.spec.errors import BadInput  # noqa: E402

ONLY = flags.DEFINE_string("only", "", "Only the cases whose name matches this regular expression.")
RUNS = flags.DEFINE_integer("runs", 5, "Runs of each case.", 1)
STEPS = flags.DEFINE_integer("steps", 4, "Steps of a run; its own summary leaves out the first two.", 3)
OUT = flags.DEFINE_string("out", None, "Write the table there too.")

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
    """One run."""

    network: str
    cut: str
    schedule: str
    codec: str

    def __str__(self) -> str:
        return f"{self.network} {self.cut} {self.schedule} {self.codec}"


@dataclass(frozen=True)
class Found:
    """What a run said."""

    case: Case
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def __str__(self) -> str:
        return f"{self.case}: {self.predicted_s:.3f} s predicted, {self.measured_s:.3f} s, {100 * self.error:+.1f} %"


def cases() -> list[Case]:
    """Those that are wanted."""
    every = itertools.product(CUTS, ("1f1b", "gpipe"), ("none", "int8"), [*LINKS, FOUR_CITIES])
    found = [Case(network, cut, schedule, codec) for cut, schedule, codec, network in every]
    return [case for case in found if re.search(ONLY.value, str(case))]


def run(case: Case, folder: Path, tokens: Path) -> Found:
    """The two figures of a run's summary."""
    stages, pipelines = CUTS[case.cut]
    run_dir = folder / "run"
    command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/small.py'}", "--overwrite"]
    command += [f"--run_dir={run_dir}", "--report=false", f"--emulate={folder / case.network}.json"]
    settings = {"plan.stages": stages, "plan.pipelines": pipelines, "plan.schedule": case.schedule, "codec": case.codec}
    settings |= {"train.steps": STEPS.value, "data.path": tokens}
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((run_dir / "summary.json").read_text())
    return Found(case, summary["step_s_predicted"], summary["step_s_measured"])


def row(case: Case, runs: list[Found]) -> str:
    """Of the table: medians, and the errors of all runs."""
    errors = [100 * one.error for one in runs]
    seconds = [statistics.median(getattr(one, name) for one in runs) for name in ("predicted_s", "measured_s")]
    columns = [*(f"{s:.3f}" for s in seconds), f"{statistics.median(errors):+.1f} %"]
    return f"| {case} | {' | '.join(columns)} | {', '.join(f'{error:+.1f}' for error in errors)} |"


def main() -> int:
    chosen = cases()
    if not chosen:
        raise BadInput(
            f"--only: {ONLY.value!r} matches none of the cases, such as {Case(FOUR_CITIES, '2x2', '1f1b', 'int8')}"
        )
    found: dict[Case, list[Found]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokens = folder / "tokens.tok"
        ids = np.random.default_rng(0).integers(0, 1024, 200_000).astype(np.uint16)
        write_tokens(tokens, "random", 1024, ids, ids[:20_000])
        for link, (latency_ms, gbps) in LINKS.items():
            network = networks.uniform(N_PEERS_MAX, latency_ms / 1e3, gbps)
            (folder / f"{link}.json").write_text(json.dumps(networks.to_json(network)))
        cities = (ROOT / f"configs/networks/{FOUR_CITIES}.json").read_text()
        (folder / f"{FOUR_CITIES}.json").write_text(cities)
        for case in chosen * RUNS.value:
            found[case].append(run(case, folder, tokens))
            print(found[case][-1], file=sys.stderr, flush=True)
    lines = ["| case | predicted s | measured s | error | of each run |", "|---|---|---|---|---|"]
    lines += [row(case, runs) for case, runs in found.items()]
    errors = [abs(statistics.median(one.error for one in runs)) for runs in found.values()]
    single = [abs(one.error) for runs in found.values() for one in runs]
    result = {
        "cases": len(found),
        "median_error": statistics.median(errors),
        "max_error": max(errors),
        "median_run": statistics.median(single),
        "max_run": max(single),
    }
    if OUT.value:
        Path(OUT.value).write_text("\n".join([*lines, "", json.dumps(result)]) + "\n")
    print("\n".join([*lines, json.dumps(result)]))
    return 0


if __name__ == "__main__":
    run_flags.run(main)
