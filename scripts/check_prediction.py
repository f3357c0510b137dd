"""Predicted against measured step times over emulated networks; prints a table and ends with one line of JSON.

    python scripts/check_prediction.py [--only=REGEX] [--steps=8] [--out=FILE.md]

Every case is a real run of the workload `small`: 6 networks x gpipe and 1f1b x 2 stages, 4 stages and 2 x 2 x codec
none and int8. The prediction is the one that the run prints before its first step; the error is
predicted / measured - 1. JSON: `cases`, `median_error`, `max_error`, of absolute values. Quote it from an otherwise
idle machine only: 72 cases take about an hour on two cores.

A virtual machine may be as idle as it can be and yet change its speed between the timing of the stages and the steps.
So a fixed piece of work is timed before and after each case (`drift`); a case with a drift above 5 % is run again, at
most twice, whatever its error. JSON: `repeated`, how often that was, and `unsteady`, cases that drifted to the last.
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
import run_flags  # noqa: E402
from absl import flags  # noqa: E402

from jaxdt.core import network as networks  # noqa: E402
from jaxdt.core.errors import BadInput  # noqa: E402
from jaxdt.model.data import write_tokens  # noqa: E402

ONLY = flags.DEFINE_string("only", "", "Only the cases whose name matches this regular expression.")
STEPS = flags.DEFINE_integer("steps", 8, "Steps of a run; its own summary leaves out the first.")
OUT = flags.DEFINE_string("out", None, "Write the table there too.")

ROOT = Path(__file__).resolve().parent.parent
N_PEERS_MAX = 4
LINKS = {  # name: milliseconds one way, Gb/s
    "1000mbps_1ms": (1.0, 1.0),
    "300mbps_5ms": (5.0, 0.3),
    "300mbps_50ms": (50.0, 0.3),
    "100mbps_20ms": (20.0, 0.1),
    "50mbps_5ms": (5.0, 0.05),
}
FOUR_CITIES = "four_cities"
STEADY, N_TRIES = 0.05, 3
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
    case: Case
    predicted_s: float
    measured_s: float
    drift: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def steady(self) -> bool:
        return abs(self.drift) <= STEADY

    def row(self) -> str:
        seconds = f"{self.predicted_s:.3f} | {self.measured_s:.3f}"
        return f"| {self.case} | {seconds} | {100 * self.error:+.1f} % | {100 * self.drift:+.1f} % |"


def cases() -> list[Case]:
    """All of them, networks in turn so that a slow phase of the machine does not fall on one of them."""
    every = itertools.product(CUTS, ("1f1b", "gpipe"), ("none", "int8"), [*LINKS, FOUR_CITIES])
    found = [Case(network, cut, schedule, codec) for cut, schedule, codec, network in every]
    return [case for case in found if re.search(ONLY.value, str(case))]


def work_s() -> float:
    """Seconds of a fixed piece of work on all cores."""
    matrix, times = np.ones((1024, 1024), np.float32), []
    for _ in range(9):
        began_s = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def run(case: Case, folder: Path, tokens: Path) -> Found:
    """The two figures of a run's summary, and how the machine changed meanwhile."""
    stages, pipelines = CUTS[case.cut]
    run_dir = folder / "run"
    command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/small.py'}", "--overwrite"]
    command += [f"--run_dir={run_dir}", "--report=false", f"--emulate={folder / case.network}.json"]
    settings = {"plan.stages": stages, "plan.pipelines": pipelines, "plan.schedule": case.schedule, "codec": case.codec}
    settings |= {"train.steps": STEPS.value, "data.path": tokens}
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    before_s = work_s()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    drift = work_s() / before_s - 1
    summary = json.loads((run_dir / "summary.json").read_text())
    return Found(case, summary["step_s_predicted"], summary["step_s_measured"], drift)


def main() -> int:
    chosen = cases()
    if not chosen:
        raise BadInput(
            f"--only: {ONLY.value!r} matches none of the cases, such as {Case(FOUR_CITIES, '2x2', '1f1b', 'int8')}"
        )
    lines = ["| case | predicted s | measured s | error | drift |", "|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
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
        found, n_repeated = [], 0
        for case in chosen:
            for n_left in reversed(range(N_TRIES)):
                one = run(case, folder, tokens)
                if one.steady or not n_left:
                    break
                n_repeated += 1
                print(f"again: {one.row()}", file=sys.stderr, flush=True)
            found.append(one)
            lines.append(one.row())
            print(lines[-1], flush=True)
    errors = [abs(one.error) for one in found]
    result = {
        "cases": len(found),
        "median_error": statistics.median(errors),
        "max_error": max(errors),
        "repeated": n_repeated,
        "unsteady": sum(not one.steady for one in found),
    }
    if OUT.value:
        Path(OUT.value).write_text("\n".join([*lines, "", json.dumps(result)]) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_flags.run(main)
