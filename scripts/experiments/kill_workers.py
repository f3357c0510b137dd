"""Kill, pause and start workers of a pool every few seconds, and compare the training with that of one process.

    python scripts/experiments/kill_workers.py --config=configs/pool.py --run_dir=runs/kill_workers \\
        [--steps=30] [--every_s=3] [--tries=1] [--seed=0] [--server]

Each try starts a run of real processes whose forwards take at least 0.15 s, and as soon as a step is committed disturbs
one worker after the other, drawn from the seed among those that are ready to compute: SIGKILL, after which a process
with the same id or a new worker comes; or SIGSTOP for some seconds, which may be longer than its leases. The servers
live; with --server one of them is killed after half of the steps, so each stage needs two (--config.plan.pipelines=2).
The run has to end with code 0 in its first view, or in its second one without that server. Every loss must be that of
one process, within 1e-5 (relative), and the parameters after the last step within 1e-4 (norm of the difference over the
norm). Prints a line a try and one JSON object with what was wrong.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxdt.cli import local_run, run_flags
from jaxdt.runtime.storage.entries import load_entries
from jaxdt.runtime.storage.parts import step_folder

STEPS = flags.DEFINE_integer("steps", 30, "Steps of each run.", 1)
EVERY_S = flags.DEFINE_float("every_s", 3.0, "Mean seconds between two disturbances.", 0.1)
TRIES = flags.DEFINE_integer("tries", 1, "Runs.", 1)
SERVER = flags.DEFINE_bool("server", False, "Kill a server, too.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of the victims and the moments.")

FORWARD_S = 0.15
LOSS_TOLERANCE, PARAMETER_TOLERANCE = 1e-5, 1e-4
AWAY_S_MAX = 6.0  # a worker is paused, or does not come back, for so long at most
KILL, PAUSE = "killed", "paused"
READY = " is ready on "  # in the log of a worker that can compute
TIMEOUT_S = 1800.0


@dataclass
class Disturbed:
    """A run whose workers are disturbed. `workers`: the process of each worker that lives, and its log."""

    run_dir: Path
    launcher: subprocess.Popen
    rng: random.Random
    workers: dict[str, tuple[int, Path]] = field(default_factory=dict)
    servers: dict[str, int] = field(default_factory=dict)  # those that may be killed
    started: list[subprocess.Popen] = field(default_factory=list)
    paused: dict[int, float] = field(default_factory=dict)  # process -> when it goes on
    coming: list[tuple[float, str]] = field(default_factory=list)  # when which worker comes, '' for a new one
    done: Counter[str] = field(default_factory=Counter)

    def go_on(self) -> None:
        """Disturb workers until all steps are committed."""
        next_s = time.monotonic()
        while self.launcher.poll() is None and len(local_run.losses(self.run_dir)) < STEPS.value:
            now_s = time.monotonic()
            if now_s >= next_s:
                self.disturb(now_s)
                next_s = now_s + self.rng.expovariate(1 / EVERY_S.value)
            if self.servers and len(local_run.losses(self.run_dir)) >= STEPS.value // 2:
                os.kill(self.servers[self.rng.choice(sorted(self.servers))], signal.SIGKILL)
                self.done["servers killed"] += 1
                self.servers = {}
            self.resume(now_s)
            for at_s, worker in [due for due in self.coming if due[0] <= now_s]:
                self.coming.remove((at_s, worker))
                self.start(worker)
            time.sleep(0.05)
        self.resume(float("inf"))

    def disturb(self, now_s: float) -> None:
        awake = {worker: log for worker, (pid, log) in self.workers.items() if pid not in self.paused}
        ready = sorted(worker for worker, log in awake.items() if READY in log.read_text())
        if not ready:
            return
        victim, away_s = self.rng.choice(ready), self.rng.uniform(0.0, AWAY_S_MAX)
        pid, _ = self.workers[victim]
        what = self.rng.choice((KILL, PAUSE))
        self.done[what] += 1
        if what == PAUSE:
            os.kill(pid, signal.SIGSTOP)
            self.paused[pid] = now_s + away_s
        else:
            os.kill(pid, signal.SIGKILL)
            del self.workers[victim]
            self.coming.append((now_s + away_s, self.rng.choice((victim, "")) if victim.isdigit() else ""))

    def resume(self, now_s: float) -> None:
        for pid in [pid for pid, until_s in self.paused.items() if until_s <= now_s]:
            del self.paused[pid]
            os.kill(pid, signal.SIGCONT)

    def start(self, worker: str) -> None:
        """A process for the worker of this id if it is one of the plan, else a new worker."""
        log = self.run_dir / "logs" / f"started_{len(self.started)}.log"
        process = local_run.worker(self.run_dir, log, worker, [f"--emulate_forward_s={FORWARD_S}"])
        self.done["came back" if worker else "came"] += 1
        self.started.append(process)
        self.workers[worker or f"new {len(self.started)}"] = process.pid, log


def main() -> int:
    run_flags.required("config", "run_dir")
    rng, folder = random.Random(SEED.value), Path(run_flags.RUN_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    words = local_run.config_flags()
    one = folder / "alone"
    if len(local_run.losses_alone(one, words, STEPS.value)) < STEPS.value:
        print(f"the run of one process has not done {STEPS.value} steps, {one.with_suffix('.log')} says why")
        return 1
    bad = {}
    for number in range(TRIES.value):
        run_dir = folder / str(number)
        code, done = attempt(run_dir, words, rng)
        wrong, differences = f"it ended with code {code}, {run_dir.with_suffix('.log')} says why", {}
        if code == 0:
            differences = {"losses": of_losses(run_dir, one), "parameters": of_parameters(run_dir, one)}
            wrong = problem(run_dir, differences)
        bad |= {number: wrong} if wrong else {}
        counts = dict(done) | dict(losses_of_workers(run_dir))
        print(f"try {number}: {json.dumps(counts)}, {json.dumps(differences)}, {wrong or 'equal'}", flush=True)
    print(json.dumps({"tries": TRIES.value, "steps": STEPS.value, "bad": bad}))
    return 1 if bad else 0


def attempt(run_dir: Path, words: list[str], rng: random.Random) -> tuple[int, Counter[str]]:
    """One run: its exit code, and how its workers were disturbed."""
    flags_ = [f"--run_dir={run_dir}", "--report=false", f"--emulate_forward_s={FORWARD_S}"]
    steps = f"--config.train.steps={STEPS.value}"
    launcher = local_run.start(run_dir.with_suffix(".log"), "launch.py", [*words, steps, *flags_])
    run = Disturbed(run_dir, launcher, rng)
    try:
        local_run.wait_for_steps(run_dir, launcher, 1)
        logs = run_dir / "logs"
        run.workers = {w: (pid, logs / f"peer_{w}.log") for w, pid in local_run.workers(launcher.pid).items()}
        if SERVER.value:
            others = {"coordinator", *(f"peer {worker}" for worker in run.workers)}
            run.servers = {name: pid for name, pid in local_run.children(launcher.pid).items() if name not in others}
        run.go_on()
        return launcher.wait(timeout=TIMEOUT_S), run.done
    finally:
        local_run.end(launcher, run.started)


def losses_of_workers(run_dir: Path) -> Counter[str]:
    """How often servers have lost workers and computed microbatches again."""
    counted: Counter[str] = Counter()
    for report in reports(run_dir, "worker_lost"):
        counted["lost"] += 1
        counted["computed again"] += report["n_redone"]
    return counted


def reports(run_dir: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    """The fields of all reports of a kind, of all processes."""
    for path in sorted((run_dir / "trace").glob("*.jsonl")):
        for record in local_run.objects(path):
            if record["what"] == "report" and record["kind"] == kind:
                yield record["fields"]


def problem(run_dir: Path, differences: Mapping[str, float]) -> str:
    """The problem with a run that has ended; '' if there is none."""
    views = {report["view"] for report in reports(run_dir, "view")}
    expected = {1, 2} if SERVER.value else {1}
    if views != expected:
        return f"it had views {sorted(views)}, expected {sorted(expected)}: workers are in none"
    for what, most in (("losses", LOSS_TOLERANCE), ("parameters", PARAMETER_TOLERANCE)):
        if not differences[what] <= most:
            return f"{what}: relative difference {differences[what]:.1e}, expected at most {most:.0e}"
    return ""


def of_losses(run_dir: Path, one: Path) -> float:
    """The largest relative difference of a loss from that of one process."""
    pairs = zip(local_run.losses(run_dir), local_run.losses(one), strict=True)
    return max(abs(got - expected) / abs(expected) for got, expected in pairs)


def of_parameters(run_dir: Path, one: Path) -> float:
    """The norm of the difference of the parameters over the norm of those of one process."""
    got, expected = (parameters(folder) for folder in (run_dir, one))
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def parameters(run_dir: Path) -> np.ndarray:
    """All parameters of the last checkpoint, as one vector."""
    entries = load_entries(step_folder(run_dir, STEPS.value))
    leaves = (leaves_of(entries[name]["params"]) for name in sorted(entries))
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in itertools.chain.from_iterable(leaves)])


def leaves_of(tree: Any) -> Iterator[np.ndarray]:
    if isinstance(tree, Mapping):
        for name in sorted(tree):
            yield from leaves_of(tree[name])
    else:
        yield np.asarray(tree)


if __name__ == "__main__":
    run_flags.run(main)
