"""Time the workload `small` in one process and as a 2-stage 1F1B pipeline, in turn. Prints one JSON object.

    python scripts/bench/bench_pipeline.py [--rounds=3] [--rival "CMD"] [--rival_key=step_s_median]

  single_step_s  the whole model in one process: the median over rounds of the run's median step
  step_s         two processes with one compute thread each. Stage 0 has three forwards in flight, one more than 1F1B
                 needs without links, so that it does not wait for the round trip
  ideal_s        (M - 1) max_s w_s + sum_s w_s + slowest update; w_s is the measured forward + backward of stage s
  ideal_ratio    the median over rounds of step_s / ideal_s
  cpu_ratio      CPU seconds a step of all peers, divided by those of the single process
  rival_step_s   with --rival: an external baseline, run in the same rounds. CMD is its command; the value is the median
                 of --rival_key in the JSON object on the last line of its output

Quote the results from an otherwise idle machine only.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from absl import flags
from external_baseline import baseline_seconds, check_command

from jaxdt.cli import environment, local_run, script_main
from jaxdt.model.data import write_tokens
from jaxdt.protocol import trace
from jaxdt.run.work import parse_work

WARM_UP = 3  # steps
N_MICROBATCHES = 8  # of configs/small.py
ROUNDS = flags.DEFINE_integer("rounds", 3, "How many times each system is run, in turn.", 1)
STEPS = flags.DEFINE_integer("steps", 14, "Steps of a run; the first three are not counted.", WARM_UP + 2)
RIVAL = flags.DEFINE_string("rival", None, "Command of an external baseline on the same workload.")
RIVAL_KEY = flags.DEFINE_string("rival_key", "step_s_median", "Key of the seconds of a step in the baseline's JSON.")
EXTRA = flags.DEFINE_multi_string("flag", [], "Flag for launch.py of the pipeline, such as --config.plan.layers=5,3.")

ROOT = Path(__file__).resolve().parents[2]


def run_ours(folder: Path, stages: int, tokens: Path) -> dict[str, float]:
    """step_s, cpu_s a step, and ideal_s of one run."""
    launch(folder, stages, tokens)
    work_s, cpu_s = traced_seconds(folder)
    per_stage = [work_s[stage, "F"] + work_s[stage, "B"] for stage in range(stages)]
    update_s = max(work_s[stage, "U"] + work_s[stage, "G"] for stage in range(stages))
    return {
        "step_s": statistics.median(local_run.step_seconds(folder)[WARM_UP:]),
        "cpu_s": cpu_s,
        "ideal_s": (N_MICROBATCHES - 1) * max(per_stage) + sum(per_stage) + update_s,
    }


def launch(folder: Path, stages: int, tokens: Path) -> None:
    """Run the workload with one peer per stage, each of them on one CPU."""
    command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/small.py'}", "--overwrite"]
    command += [f"--run_dir={folder}", "--report=false", "--pin=1", f"--config.data.path={tokens}"]
    command += [f"--config.plan.stages={stages}", f"--config.train.steps={STEPS.value}"]
    command += ["--config.plan.in_flight=3,1", *EXTRA.value] if stages > 1 else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def traced_seconds(folder: Path) -> tuple[dict[tuple[int, str], float], float]:
    """Median seconds of the Work of each (stage, kind), and CPU seconds a step of all peers, after the warm-up."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    cpu: dict[int, list[float]] = defaultdict(list)
    for path in (folder / "trace").glob("peer_*.jsonl"):
        for record in trace.read(path.read_text().splitlines()):
            if record["what"] == "run" and (work := parse_work(record["work"])).step >= WARM_UP:
                seconds[work.stage, work.kind].append(record["s"])
            if record["what"] == "report" and record["kind"] == "usage" and record["fields"]["step"] >= WARM_UP:
                cpu[record["peer"]].append(record["fields"]["cpu_s"])
    work_s = {key: statistics.median(times) for key, times in seconds.items()}
    return work_s, sum((used[-1] - used[0]) / (len(used) - 1) for used in cpu.values())


def median_of(runs: list[dict[str, float]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def main() -> None:
    environment.compute_on_cpu()
    check_command(RIVAL.value)
    single: list[dict[str, float]] = []
    ours: list[dict[str, float]] = []
    baseline: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ids = np.random.default_rng(1).integers(0, 1024, 200_000)
        tokens = folder / "random.tok"
        write_tokens(tokens, "random", 1024, ids, ids[:20_000])
        for _ in range(ROUNDS.value):
            single.append(run_ours(folder / "single", 1, tokens))
            ours.append(run_ours(folder / "pipeline", 2, tokens))
            if RIVAL.value:
                baseline.append(baseline_seconds(RIVAL.value, RIVAL_KEY.value))
    result = {
        "single_step_s": median_of(single, "step_s"),
        "step_s": median_of(ours, "step_s"),
        "ideal_s": median_of(ours, "ideal_s"),
        "ideal_ratio": statistics.median(run["step_s"] / run["ideal_s"] for run in ours),
        "cpu_ratio": statistics.median(two["cpu_s"] / one["cpu_s"] for one, two in zip(single, ours, strict=True)),
        "rounds": [{"single_step_s": a["step_s"], **b} for a, b in zip(single, ours, strict=True)],
    }
    if baseline:
        result |= {"rival_step_s": statistics.median(baseline), "rival_rounds": baseline}
    print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in result.items()}))


if __name__ == "__main__":
    script_main.run(main)
