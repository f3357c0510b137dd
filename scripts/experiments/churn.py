"""Kill a peer of a fleet every few seconds, and start a newcomer each time, for as long as one likes.

    python scripts/experiments/churn.py --config=configs/swarm.py --config.codec=none --run_dir=runs/churn \\
        [--minutes=15] [--period_s=20] [--seed=0]

The coordinator and the first peer of each stage are never killed, so that their memory, file descriptors and threads
can be followed. The victims among the other peers are drawn from the seed and get SIGKILL. Afterwards one process does
the first 300 steps alone. Later steps are not compared: two sums of the same numbers in another order differ by 1e-7,
and training may double the difference every fifty steps. Prints a line a kill and one JSON object, which
run_dir/churn.json keeps together with all samples:

  growth            the leak check (scripts/experiments/leak_check.py): by how much rss (resident memory), fds and
  threads
                    of each process that was never killed grew after the warm-up, as a fraction
  loss_difference   the largest relative difference between the losses of the two runs in the compared steps
  bad               the violated limits: growth of more than 5 %, losses that differ by more than 1e-5
"""

import json
import os
import random
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from absl import flags
from leak_check import FIGURES, Sample, growth

from jaxdt.cli import environment, local_run, run_flags
from jaxdt.run import network as networks
from jaxdt.run.errors import BadInput
from jaxdt.runtime import run_dir as run_dirs

MINUTES = flags.DEFINE_float("minutes", 15.0, "Duration of the run.", 0.1)
PERIOD_S = flags.DEFINE_float("period_s", 20.0, "Seconds from one kill to the next.", 1.0)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the victims.")
LATENCY_MS = flags.DEFINE_float("latency_ms", 20.0, "One-way latency of each emulated link.", 0.0)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Delete the files of an earlier run in run_dir.")

SAMPLE_S = 2.0
GROWTH_MAX, DIFFERENCE_MAX, STEPS_COMPARED = 0.05, 1e-5, 300


@dataclass
class ChurnRun:
    """A fleet, its newcomers by the number of the kill that they replace, and samples of the watched processes by
    name."""

    launcher: subprocess.Popen
    run_dir: Path
    began_s: float
    newcomers: dict[int, subprocess.Popen] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    n_kills: int = 0

    def sample(self, name: str, pid: int) -> None:
        """Take a sample of a process, if it is still there."""
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            n_fds = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return
        if "VmRSS" in status:
            sample = (
                time.monotonic() - self.began_s,
                1024 * int(status["VmRSS"].split()[0]),
                n_fds,
                int(status["Threads"]),
                self.n_members(),
            )
            self.samples.setdefault(name, []).append(sample)

    def n_members(self) -> int:
        """The number of members of the newest view."""
        return len(json.loads((self.run_dir / "coordinator" / "view.json").read_bytes())["members"])

    def kill_one(self, pids: dict[str, int], immortal: set[str], rng: random.Random) -> None:
        """Kill a random peer that is not immortal and start a newcomer. `pids`: the launcher's children."""
        self.newcomers = {n: child for n, child in self.newcomers.items() if child.poll() is None}
        mortal = {name: pid for name, pid in pids.items() if name not in immortal}
        mortal |= {f"newcomer {n}": child.pid for n, child in self.newcomers.items()}
        if mortal:
            victim = rng.choice(sorted(mortal))
            os.kill(mortal[victim], signal.SIGKILL)
            at_s = time.monotonic() - self.began_s
            print(f"{at_s:.0f} s: killed {victim}, {len(local_run.losses(self.run_dir))} steps", flush=True)
        self.n_kills += 1
        log = self.run_dir / "logs" / f"newcomer_{self.n_kills}.log"
        self.newcomers[self.n_kills] = local_run.join(self.run_dir, log)

    def end(self) -> None:
        local_run.end(self.launcher, self.newcomers.values())


def churn(run_dir: Path, immortal: set[str], network: Path) -> ChurnRun:
    """Run a fleet, kill and join until the time is over, and end the fleet."""
    rng = random.Random(SEED.value)
    arguments = [f"--emulate={network}", "--config.train.steps=100000000", f"--run_dir={run_dir}", "--report=false"]
    launcher = local_run.start(run_dir.with_suffix(".log"), "launch.py", [*local_run.config_flags(), *arguments])
    run = ChurnRun(launcher, run_dir, time.monotonic())
    try:
        if not local_run.wait_for_steps(run_dir, launcher, 1):
            raise BadInput(f"run_dir: {run_dir}: the fleet ended, {run_dir.with_suffix('.log')} says why")
        run.began_s = time.monotonic()
        kill_at_s = run.began_s + PERIOD_S.value
        end_s = run.began_s + 60.0 * MINUTES.value
        while (now_s := time.monotonic()) < end_s and launcher.poll() is None:
            pids = local_run.children(launcher.pid)
            for name in immortal & set(pids):
                run.sample(name, pids[name])
            if now_s >= kill_at_s:
                kill_at_s = now_s + PERIOD_S.value
                run.kill_one(pids, immortal, rng)
            time.sleep(SAMPLE_S)
    finally:
        run.end()
    return run


def evaluate(run: ChurnRun, expected: list[float], n_compared: int) -> dict:
    """The result of a run. `expected`: losses of one process in the compared steps."""
    losses = local_run.losses(run.run_dir)
    difference = max((abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False)), default=float("inf"))
    grown = {name: growth(samples, PERIOD_S.value) for name, samples in sorted(run.samples.items())}
    bad = [
        f"{name}: {figure} grows by {100 * by:.1f} %"
        for name, by_figure in grown.items()
        for figure, by in by_figure.items()
        if by > GROWTH_MAX
    ]
    if difference > DIFFERENCE_MAX:
        bad.append(f"losses differ by {difference:.1e}")
    if len(expected) != n_compared:
        bad.append(f"{n_compared} steps to compare, alone {len(expected)}")
    means = {}
    for name, samples in sorted(run.samples.items()):
        _, *columns = zip(*samples, strict=True)
        means[name] = {figure: statistics.mean(column) for figure, column in zip(FIGURES, columns, strict=False)}
    return {
        "minutes": run.samples["coordinator"][-1][0] / 60,
        "kills": run.n_kills,
        "steps": len(losses),
        "growth": grown,
        "means": means,
        "loss_difference": difference,
        "bad": bad,
        "seed": SEED.value,
    }


def main() -> int:
    environment.compute_on_cpu()
    run_flags.required("config", "run_dir")
    _, plan, _ = run_flags.config_and_plan()
    run_dir = Path(run_flags.RUN_DIR.value)
    alone_dir = run_dir.with_name(f"{run_dir.name}_alone")
    for folder in (run_dir, alone_dir):
        if replaced := run_dirs.clear(folder, OVERWRITE.value):
            print(replaced)
        folder.parent.mkdir(parents=True, exist_ok=True)
    network = run_dir.with_suffix(".network.json")
    network.write_text(json.dumps(networks.to_json(networks.uniform(max(plan.peers) + 1, LATENCY_MS.value / 1e3, 1.0))))
    immortal = {"coordinator", *(f"peer {row[0]}" for row in plan.placement)}
    run = churn(run_dir, immortal, network)
    n_compared = min(len(local_run.losses(run_dir)), STEPS_COMPARED)
    result = evaluate(run, local_run.losses_alone(alone_dir, local_run.config_flags(), n_compared), n_compared)
    (run_dir / "churn.json").write_text(json.dumps(result | {"samples": run.samples}))
    print(json.dumps(result))
    return 1 if result["bad"] else 0


if __name__ == "__main__":
    run_flags.run(main)
