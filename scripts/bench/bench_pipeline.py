"""Times the workload `small` in one process and as a 2-stage 1F1B pipeline, in turn; prints one JSON object.

    python scripts/bench/bench_pipeline.py [--rounds=3] [--rival "CMD"] [--rival_key=step_s_median]

  single_step_s  the whole model in one process, median over rounds of the run's median step
  step_s         two processes, one compute thread each; stage 0 has one forward more in flight than the two that 1F1B
                 needs without links, so that it does not wait for the way there and back
  ideal_s        (M - 1) max_s w_s + sum_s w_s + slowest update, w_s = stage s's own measured forward + backward
  ideal_ratio    step_s / ideal_s, the median of the rounds' own ratios
  cpu_ratio      CPU seconds a step of all peers, against the single process
  rival_step_s   with --rival: the median of what CMD's last line of JSON says under --rival_key, run in the same rounds

Quote it from an otherwise idle machine only.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np  # noqa: E402
from absl import flags  # noqa: E402
from external_baseline import check, rival_seconds  # noqa: E402

from jaxdt.cli import script_main  # noqa: E402
from jaxdt.model.data import write_tokens  # noqa: E402
from jaxdt.protocol import trace  # noqa: E402
from jaxdt.spec.work import parse_work  # noqa: E402

WARM_UP = 3
ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each is run, in turn.", 1)
STEPS = flags.DEFINE_integer("steps", 14, "Steps of a run; the first three are not counted.", WARM_UP + 2)
RIVAL = flags.DEFINE_string("rival", None, "Command of another system on the same workload.")
RIVAL_KEY = flags.DEFINE_string("rival_key", "step_s_median", "Where its JSON says the seconds of a step.")
EXTRA = flags.DEFINE_multi_string("flag", [], "Another flag for launch.py, such as --config.plan.layers=5,3.")

ROOT = Path(__file__).resolve().parents[2]


def run_ours(folder: Path, stages: int, tokens: Path) -> dict:
    """step_s, cpu_s a step, and ideal_s of one run."""
    command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/small.py'}", "--overwrite"]
    command += [f"--run_dir={folder}", "--report=false", "--pin=1", f"--config.data.path={tokens}"]
    command += [f"--config.plan.stages={stages}", f"--config.train.steps={STEPS.value}"]
    command += ["--config.plan.in_flight=3,1", *EXTRA.value] if stages > 1 else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    step_s = statistics.median(m["step_s"] for m in metrics[WARM_UP:])
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    cpu: dict[int, list[float]] = defaultdict(list)
    for path in (folder / "trace").glob("peer_*.jsonl"):
        for record in trace.read(path.read_text().splitlines()):
            if record["what"] == "run" and (work := parse_work(record["work"])).step >= WARM_UP:
                seconds[work.stage, work.kind].append(record["s"])
            if record["what"] == "report" and record["kind"] == "usage" and record["fields"]["step"] >= WARM_UP:
                cpu[record["peer"]].append(record["fields"]["cpu_s"])
    median = lambda stage, kind: statistics.median(seconds[stage, kind])  # noqa: E731
    per_stage = [median(stage, "F") + median(stage, "B") for stage in range(stages)]
    update_s = max(median(stage, "U") + median(stage, "G") for stage in range(stages))
    ideal_s = 7 * max(per_stage) + sum(per_stage) + update_s
    cpu_s = sum((used[-1] - used[0]) / (len(used) - 1) for used in cpu.values())
    return {"step_s": step_s, "cpu_s": cpu_s, "ideal_s": ideal_s}


def main() -> None:
    check(RIVAL.value)
    single, ours, rival = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = np.random.default_rng(1).integers(0, 1024, 200_000)
        tokens = folder / "random.tok"
        write_tokens(tokens, "random", 1024, ids, ids[:20_000])
        for _ in range(ROUNDS.value):
            single.append(run_ours(folder / "single", 1, tokens))
            ours.append(run_ours(folder / "pipeline", 2, tokens))
            if RIVAL.value:
                rival.append(rival_seconds(RIVAL.value, RIVAL_KEY.value))
    median = lambda runs, key: statistics.median(run[key] for run in runs)  # noqa: E731
    result = {
        "single_step_s": median(single, "step_s"),
        "step_s": median(ours, "step_s"),
        "ideal_s": median(ours, "ideal_s"),
        "ideal_ratio": statistics.median(run["step_s"] / run["ideal_s"] for run in ours),
        "cpu_ratio": statistics.median(two["cpu_s"] / one["cpu_s"] for one, two in zip(single, ours, strict=True)),
        "rounds": [{"single_step_s": a["step_s"], **b} for a, b in zip(single, ours, strict=True)],
    }
    if rival:
        result |= {"rival_step_s": statistics.median(rival), "rival_rounds": rival}
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in result.items()}))


if __name__ == "__main__":
    script_main.run(main)
