"""Compare predicted and measured step times, over emulated networks and over real TCP between hosts.

    python scripts/experiments/check_prediction.py emulated [--only=REGEX] [--runs=5] [--steps=4] [--out=DIR]
    python scripts/experiments/check_prediction.py hosts [--only=REGEX] [--runs=3] [--steps=5] [--out=DIR]
    python scripts/experiments/check_prediction.py page --out=configs/prediction

The cases are real runs of the workload `small`. `emulated`: 6 networks x schedules gpipe and 1f1b x cuts into 2 stages,
4 stages and 2 stages with 2 pipelines x codecs none and int8. `hosts`: 4 networks x 3 systems, each peer in a network
namespace of its own, with delay, rate, loss and jitter made by a router (prediction_error/network_hosts.py). It needs
root; without it the command says so in one line and ends with code 0.

The prediction is the one that a run prints before its first step. The error of a run is predicted / measured - 1. Even
an idle virtual machine may change its speed between the timing of the stages and the steps, so the error of a case is
the median over its runs, and all cases are run once before any is run again. --out receives a line of raw data for each
run as soon as it has ended (emulated.jsonl or hosts.jsonl), of which `page` writes README.md. Quote figures from an
otherwise idle machine only: the 72 cases of `emulated` take nearly two hours on two cores, the 12 of `hosts` a quarter
of an hour.
"""

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from prediction_error import host_runs, raw
from prediction_error.network_hosts import missing
from prediction_error.page import errors_table, page, summary

from jaxdt.cli import environment, run_flags
from jaxdt.model.data import write_tokens
from jaxdt.run import network as networks
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput

ONLY = flags.DEFINE_string("only", "", "Run only the cases whose name matches this regular expression.")
RUNS = flags.DEFINE_integer("runs", 5, "Runs of each case.", 1)
STEPS = flags.DEFINE_integer("steps", 4, "Steps of a run; its own summary leaves out the first two.", 3)
OUT = flags.DEFINE_string("out", None, "Folder for the raw data, or of the page.")

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
    """The settings of a run over emulated links."""

    network: str
    cut: str
    schedule: str
    codec: str

    def __str__(self) -> str:
        return f"{self.network} {self.cut} {self.schedule} {self.codec}"


def grid() -> list[Case]:
    """All cases over emulated links."""
    every = itertools.product(CUTS, ("1f1b", "gpipe"), ("none", "int8"), [*LINKS, FOUR_CITIES])
    return [Case(network, cut, schedule, codec) for cut, schedule, codec, network in every]


def chosen(cases: Sequence[Any]) -> list[Any]:
    """The cases that --only selects."""
    found = [case for case in cases if re.search(ONLY.value, str(case))]
    if not found:
        raise BadInput(f"--only: {ONLY.value!r} matches none of the cases, such as {cases[-1]}")
    return found


def run(case: Case, folder: Path, tokens: Path) -> dict[str, Any]:
    """Run a case over emulated links. Returns its line of raw data."""
    stages, pipelines = CUTS[case.cut]
    run_dir = folder / "run"
    command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/small.py'}", "--overwrite"]
    command += [f"--run_dir={run_dir}", "--report=false", f"--emulate={folder / case.network}.json"]
    settings = {"plan.stages": stages, "plan.pipelines": pipelines, "plan.schedule": case.schedule, "codec": case.codec}
    settings |= {"train.steps": STEPS.value, "data.path": tokens}
    command += [f"--config.{name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((run_dir / "summary.json").read_text())
    return {"case": str(case), "predicted_s": found["step_s_predicted"], "measured_s": found["step_s_measured"]}


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


def about() -> dict[str, Any]:
    """Where a series is made."""
    git = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "cores": len(allowed_cpus()),
        "load before": os.getloadavg()[0],
        "Linux": platform.release(),
        "Python": platform.python_version(),
        "JAX": importlib.metadata.version("jax"),
        "commit": git.stdout.strip() or "unknown",
        "runs of a case": RUNS.value,
    }


@contextlib.contextmanager
def record(file: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that prints a run and adds it to a file of --out. At the end the errors are printed."""
    lines: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        output = None
        if OUT.value:
            Path(OUT.value).mkdir(parents=True, exist_ok=True)
            output = stack.enter_context((Path(OUT.value) / file).open("w"))
            output.write(json.dumps({"about": about()}) + "\n")

        def add(line: dict[str, Any]) -> None:
            lines.append(line)
            error = line["predicted_s"] / line["measured_s"] - 1
            seconds = f"{line['predicted_s']:.3f} s predicted, {line['measured_s']:.3f} s"
            print(f"{line['case']}: {seconds}, {100 * error:+.1f} %", file=sys.stderr, flush=True)
            if output:
                output.write(json.dumps(line) + "\n")
                output.flush()

        yield add
    cases = raw.Series({}, tuple(lines)).cases
    print(errors_table(cases), summary(cases), sep="\n", end="")


def emulated() -> int:
    environment.compute_on_cpu()
    cases = chosen(grid())
    with tempfile.TemporaryDirectory() as name, record(raw.EMULATED) as add:
        folder = Path(name)
        tokens = prepare(folder)
        for case in cases * RUNS.value:
            add(run(case, folder, tokens))
    return 0


def hosts() -> int:
    environment.compute_on_cpu()
    cases = chosen(host_runs.CASES)
    if lacks := missing():
        print(f"skipped: hosts on this machine need {lacks}")
        return 0
    with tempfile.TemporaryDirectory() as name, record(raw.HOSTS) as add:
        tokens = prepare(Path(name))
        for seed in range(RUNS.value):
            for network in dict.fromkeys(case.network for case in cases):
                systems = [case.system for case in cases if case.network == network]
                for line in host_runs.run_all(network, systems, STEPS.value, seed, tokens):
                    add(line)
    return 0


def write_page() -> int:
    if not OUT.value or not (Path(OUT.value) / raw.EMULATED).is_file():
        raise BadInput(f"--out: got {OUT.value}, expected a folder with {raw.EMULATED}")
    path = Path(OUT.value) / "README.md"
    path.write_text(page(Path(OUT.value)))
    print(f"wrote {path}")
    return 0


COMMANDS = {"emulated": emulated, "hosts": hosts, "page": write_page}


def main(command: str) -> int:
    return COMMANDS[command]()


if __name__ == "__main__":
    run_flags.run(main, COMMANDS)
