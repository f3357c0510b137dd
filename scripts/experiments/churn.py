"""A fleet from which a peer is killed every few seconds, with a newcomer for it each time, for as long as one likes.

    python scripts/experiments/churn.py --config=configs/swarm.py --config.codec=none --run_dir=runs/churn \\
        [--minutes=15] [--period_s=20] [--seed=0]

The first peer of each stage and the coordinator live on, so that their memory, file descriptors and threads can be
followed; who is killed (SIGKILL) among the others is drawn from the seed. Afterwards one process does the first 300
steps alone (later ones say little: two sums of the same numbers in another order differ by 1e-7, and training may
double that every fifty steps). Prints a line a kill and one JSON object, which run_dir/churn.json keeps with all
samples:

  growth            of each process that lived on, over the time after the warm-up, as a fraction: rss (resident
                    memory), fds, threads; the last two, which follow the number of members, between times at which
                    it was equal (scripts/experiments/leak_check.py says how)
  loss_difference   the largest relative one between the two runs' losses of these steps
  bad               what is not as promised: growth of more than 5 %, losses that differ by more than 1e-5
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import flags  # noqa: E402
from leak_check import WHAT, growth  # noqa: E402

from jaxdt.cli import (
    local_run,  # noqa: E402
    run_flags,  # noqa: E402
)
from jaxdt.runtime import run_dir as run_dirs  # noqa: E402
from jaxdt.spec import network as networks  # noqa: E402
from jaxdt.spec.errors import BadInput  # noqa: E402

MINUTES = flags.DEFINE_float("minutes", 15.0, "How long.", 0.1)
PERIOD_S = flags.DEFINE_float("period_s", 20.0, "From one kill to the next.", 1.0)
SEED = flags.DEFINE_integer("seed", 0, "Of the victims.")
LATENCY_MS = flags.DEFINE_float("latency_ms", 20.0, "One way, on each emulated link.", 0.0)
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Delete what an earlier run left in run_dir.")

SAMPLE_S = 2.0
GROWTH_MAX, DIFFERENCE_MAX, STEPS_COMPARED = 0.05, 1e-5, 300


@dataclass
class Churned:
    """The fleet, its newcomers and what was seen of them. `samples[name]`: (seconds, bytes, fds, threads, members)."""

    launcher: subprocess.Popen
    run_dir: Path
    began_s: float
    newcomers: dict[int, subprocess.Popen] = field(default_factory=dict)
    samples: dict[str, list[tuple]] = field(default_factory=dict)
    n_kills: int = 0

    def sample(self, name: str, pid: int) -> None:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            n_fds = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return
        if "VmRSS" in status:
            one = (
                time.monotonic() - self.began_s,
                1024 * int(status["VmRSS"].split()[0]),
                n_fds,
                int(status["Threads"]),
                self.n_members(),
            )
            self.samples.setdefault(name, []).append(one)

    def n_members(self) -> int:
        """Of the newest view."""
        return len(json.loads((self.run_dir / "coordinator" / "view.json").read_bytes())["members"])

    def join(self) -> None:
        n = self.n_kills
        self.newcomers[n] = local_run.join(self.run_dir, self.run_dir / "logs" / f"newcomer_{n}.log")

    def losses(self) -> list[float]:
        return losses(self.run_dir)

    def end(self) -> None:
        local_run.end(self.launcher, self.newcomers.values())


def losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in local_run.objects(run_dir / "metrics.jsonl")]


def launch(run_dir: Path, *more: str) -> subprocess.Popen:
    """A fleet with this command line's config."""
    own = [word for word in sys.argv[1:] if word.startswith("--config")]
    where = f"--run_dir={run_dir}", "--report=false"
    return local_run.start(run_dir.with_suffix(".log"), "launch.py", *own, *where, *more)


def churn(run_dir: Path, immortal: set[str], network: Path) -> Churned:
    """Kill and join until the time is over."""
    chance = random.Random(SEED.value)
    one = Churned(launch(run_dir, f"--emulate={network}", "--config.train.steps=100000000"), run_dir, time.monotonic())
    try:
        while not one.losses():
            if one.launcher.poll() is not None:
                raise BadInput(f"run_dir: {run_dir}: the fleet ended, {run_dir.with_suffix('.log')} says why")
            time.sleep(0.2)
        one.began_s = time.monotonic()
        next_s = one.began_s + PERIOD_S.value
        while (now_s := time.monotonic()) < one.began_s + 60.0 * MINUTES.value and one.launcher.poll() is None:
            pids = local_run.children(one.launcher.pid)
            for name in immortal & set(pids):
                one.sample(name, pids[name])
            if now_s >= next_s:
                next_s = now_s + PERIOD_S.value
                one.newcomers = {n: child for n, child in one.newcomers.items() if child.poll() is None}
                mortal = {name: pid for name, pid in pids.items() if name not in immortal}
                mortal |= {f"newcomer {n}": child.pid for n, child in one.newcomers.items()}
                if mortal:
                    victim = chance.choice(sorted(mortal))
                    os.kill(mortal[victim], signal.SIGKILL)
                    print(f"{now_s - one.began_s:.0f} s: killed {victim}, {len(one.losses())} steps", flush=True)
                one.n_kills += 1
                one.join()
            time.sleep(SAMPLE_S)
    finally:
        one.end()
    return one


def main() -> int:
    run_flags.required("config", "run_dir")
    _, plan, _ = run_flags.config_and_plan()
    run_dir = Path(run_flags.RUN_DIR.value)
    alone = run_dir.with_name(f"{run_dir.name}_alone")
    for folder in (run_dir, alone):
        run_dirs.clear(folder, OVERWRITE.value)
        folder.parent.mkdir(parents=True, exist_ok=True)
    network = run_dir.with_suffix(".network.json")
    network.write_text(json.dumps(networks.to_json(networks.uniform(max(plan.peers) + 1, LATENCY_MS.value / 1e3, 1.0))))
    immortal = {"coordinator", *(f"peer {row[0]}" for row in plan.placement)}
    one = churn(run_dir, immortal, network)
    got = one.losses()
    n_compared = min(len(got), STEPS_COMPARED)
    whole = ["--config.plan.stages=1", "--config.plan.pipelines=1", f"--config.train.steps={n_compared}"]
    launch(alone, *whole, "--config.wiring.kind=fixed", "--config.wiring.rebalance_s=0").wait()
    expected = losses(alone)
    difference = max((abs(a - b) / abs(b) for a, b in zip(got, expected, strict=False)), default=float("inf"))
    grown = {name: growth(samples, PERIOD_S.value) for name, samples in sorted(one.samples.items())}
    bad = [f"{name}: {what} grows by {100 * by:.1f} %" for name, all_ in grown.items() for what, by in all_.items()
           if by > GROWTH_MAX]  # fmt: skip
    bad += [] if difference <= DIFFERENCE_MAX else [f"losses differ by {difference:.1e}"]
    bad += [] if len(expected) == n_compared else [f"{n_compared} steps to compare, alone {len(expected)}"]
    result = {
        "minutes": one.samples["coordinator"][-1][0] / 60,
        "kills": one.n_kills,
        "steps": len(got),
        "growth": grown,
        "means": {
            name: dict(zip(WHAT, map(statistics.mean, list(zip(*all_, strict=True))[1:]), strict=False))
            for name, all_ in sorted(one.samples.items())
        },  # fmt: skip
        "loss_difference": difference,
        "bad": bad,
        "seed": SEED.value,
    }
    (run_dir / "churn.json").write_text(json.dumps(result | {"samples": one.samples}))
    print(json.dumps(result))
    return 1 if bad else 0


if __name__ == "__main__":
    run_flags.run(main)
