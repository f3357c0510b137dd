"""Unequal against equal numbers of replicas a stage, on 24 devices of three kinds: simulated seconds of a step.

    python -m planner network generate --kind mixed --devices 24 --out configs/networks/mixed24.json
    python scripts/experiments/unequal_replicas.py --out configs/networks/mixed24_plan.json

Each search gets the same seconds. The equal plans are the best of two searches: pipelines with `fixed` wiring in any
shape, with uneven layers, uneven shares and devices left out (`planner solve --stages auto`), and equally many replicas
of each stage with `swarm` wiring. Prints a row of each, and writes the unequal plan.
"""

import argparse
import json
import sys
from pathlib import Path

import planner
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.plan import to_json
from planner.api.by_step import workload_of
from planner.search.incumbent import Budget, Incumbent
from planner.step_time.unequal import plan_of_sets, search_sets

ROOT = Path(__file__).resolve().parents[2]
FLOPS = {"A100": 312e12, "V100": 125e12, "T4": 65e12}  # dense, 16 bit, from the vendor's data sheets


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--network", default=str(ROOT / "configs/networks/mixed24.json"))
    flags.add_argument("--model", default="gpt3_1p3b")
    flags.add_argument("--global_batch", type=int, default=512)
    flags.add_argument("--time_limit_s", type=float, default=120.0, help="of each search")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument("--out", help="where to write the unequal plan")
    given = flags.parse_args()
    network = planner.load_network(given.network)
    run = planner.run_of_model(GPTConfig.of(given.model), planner.StepOptions(global_batch=given.global_batch))
    profile = planner.profile_of_flops(run, network, FLOPS)
    job = planner.Job(run, None, None, profile)
    piped = planner.solve(network, job, planner.Stop(time_s=given.time_limit_s), given.seed)
    print(f"fixed wiring: {piped.score_s:.3f} s, {piped.plan.shape}", flush=True)
    workload = workload_of(job, network)
    for name, equal in (("equal", True), ("unequal", False)):
        sets = search_sets(workload, None, Incumbent(Budget(given.time_limit_s)), given.seed, equal)[0]
        plan = plan_of_sets(workload, sets)
        print(
            f"swarm wiring, {name} replicas: {sets.step_s:.3f} s, {plan.shape}, layers {list(sets.stages)}", flush=True
        )
    if given.out:
        Path(given.out).write_text(json.dumps(to_json(plan)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
