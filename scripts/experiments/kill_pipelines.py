"""Kill processes of fleets whose replicas may differ, at random moments, and compare each run with the replay of its
log.

    python scripts/experiments/kill_pipelines.py --config=configs/sdpipe.py --run_dir=runs/kills [--tries=5] [--seed=0]
        [--victim=coordinator]

Each try starts a fleet. A peer, drawn from the seed, or the coordinator gets SIGKILL at a random moment after the first
row of the metrics. Of the next rows none may come later after the one before it than 3 s, or 3 times the seconds of the
longest row before the kill; without a coordinator, which launch.py starts again, no row comes, so then it is 60 s. The
run has to end with code 0, without a missing row if it has lost no peer, and scripts/tools/replay.py has to find that
no number of the last checkpoint differs from the replay of the run's log in one process. Prints a line a try and one
JSON object with what was wrong.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from jaxdt.cli import local_run, run_flags
from jaxdt.run.errors import BadInput

TRIES = flags.DEFINE_integer("tries", 5, "Number of fleets, each of which loses a process.", 1)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the victims and the moments.")
VICTIM = flags.DEFINE_enum("victim", "peer", ["peer", "coordinator"], "Who is killed.")
WITHIN_S = flags.DEFINE_float("within_s", 8.0, "The kill comes within this time after the first row.", 0.0)

GOES_ON_S, GOES_ON_ROWS = {"peer": 3.0, "coordinator": 60.0}, 3
WATCHED_ROWS = 10  # after a kill: the loss is noticed after 1.5 s
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Kill:
    """The process that was killed, the number of rows at that time, the longest time without a further row, and what is
    wrong ('' if nothing is)."""

    victim: str
    n_rows: int
    gap_s: float
    problem: str


def main() -> int:
    run_flags.required("config", "run_dir")
    rng, folder = random.Random(SEED.value), Path(run_flags.RUN_DIR.value)
    kills: list[Kill] = []
    for number in range(TRIES.value):
        kills.append(attempt(folder / str(number), rng))
        print(f"try {number}: {kills[-1]}", flush=True)
    bad = {str(number): kill.problem for number, kill in enumerate(kills) if kill.problem}
    print(json.dumps({"tries": len(kills), "gap_s_max": max(kill.gap_s for kill in kills), "bad": bad}))
    return 1 if bad else 0


def attempt(run_dir: Path, rng: random.Random) -> Kill:
    """One fleet, from its start to the comparison."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    launcher = local_run.start(
        run_dir.with_suffix(".log"), "launch.py", [*local_run.config_flags(), f"--run_dir={run_dir}", "--report=false"]
    )
    try:
        local_run.wait_for_steps(run_dir, launcher, 1)
        time.sleep(rng.uniform(0.0, WITHIN_S.value))
        children = local_run.children(launcher.pid)
        victims = {name: pid for name, pid in children.items() if name.startswith(VICTIM.value)}
        if not victims:
            raise BadInput(f"--within_s: got {WITHIN_S.value}, and the run was over by then")
        victim = rng.choice(sorted(victims))
        n_rows = len(local_run.losses(run_dir))
        os.kill(victims[victim], signal.SIGKILL)
        gap_s = longest_gap(run_dir, launcher, n_rows)
        code = launcher.wait(timeout=TIMEOUT_S)
    finally:
        local_run.end(launcher, [])
    if code:
        problem = f"the run ended with code {code}, {run_dir.with_suffix('.log')} says why"
    else:
        problem = late(run_dir, n_rows, gap_s) or incomplete(run_dir) or unequal(run_dir)
    return Kill(victim, n_rows, round(gap_s, 2), problem)


def longest_gap(run_dir: Path, launcher: subprocess.Popen, n_rows: int) -> float:
    """The longest time without a row among the next WATCHED_ROWS, from now on."""
    gaps_s = [0.0]
    for number in range(1, WATCHED_ROWS + 1):
        began_s = time.monotonic()
        if local_run.wait_for_steps(run_dir, launcher, n_rows + number):
            gaps_s.append(time.monotonic() - began_s)
    return max(gaps_s)


def late(run_dir: Path, n_rows: int, gap_s: float) -> str:
    """The problem with the longest time without a row after the first n_rows; '' if there is none."""
    rows = local_run.objects(run_dir / "metrics.jsonl")[:n_rows]
    within_s = max(GOES_ON_S[VICTIM.value], GOES_ON_ROWS * max(row["step_s"] for row in rows))
    return f"no row for {gap_s:.2f} s, expected at most {within_s:.2f}" if gap_s > within_s else ""


def incomplete(run_dir: Path) -> str:
    """The problem with the rows of a run that has kept its peers; '' if there is none."""
    n_rows = len(local_run.losses(run_dir))
    n_steps = json.loads((run_dir / "config.json").read_text())["train"]["steps"]
    is_wrong = VICTIM.value == "coordinator" and n_rows != n_steps
    return f"the metrics have {n_rows} rows, expected {n_steps}" if is_wrong else ""


def unequal(run_dir: Path) -> str:
    """The output of the replay of the log if the replay is not equal, else ''."""
    script = Path(__file__).resolve().parents[1] / "tools" / "replay.py"
    done = subprocess.run([sys.executable, script, f"--run_dir={run_dir}"], capture_output=True, text=True, check=False)
    return f"replay.py: {done.stdout}{done.stderr}" if done.returncode else ""


if __name__ == "__main__":
    run_flags.run(main)
