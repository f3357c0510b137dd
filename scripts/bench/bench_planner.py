"""What the planner promises of time: seconds of CPU on first use, and costs and proofs within a limit of wall clock.

    python scripts/bench/bench_planner.py first_use     # CPU seconds of new processes with an empty cache of kernels
    python scripts/bench/bench_planner.py targets       # costs and proofs: some 15 minutes of a quiet machine
    python scripts/bench/bench_planner.py rate          # plans per CPU second of the annealing, once it is compiled

Each prints one line a measurement. `targets` prints the limit beside the median of three seeds, and ends with exit code
1 where one is missed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import planner
from planner.cost.compiled import generator
from planner.model.generate import generate
from planner.model.problem import problem_of
from planner.search.anneal import (
    Cooling,
    MoveShares,
    Softness,
    anneal,
    anneal_softened,
    devices_of,
    soft_walk_from,
    walk_from,
)
from planner.search.charges import NOTHING

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = ROOT / "configs" / "networks"
C_DP_BYTES, C_PP_BYTES = 650_000_000, 471_249_220
SIZES = planner.ByteSizes(C_DP_BYTES, C_PP_BYTES)
# network -> (most seconds of cost, whether the plan must be proved, seconds of wall clock)
TARGETS = {
    "dtfm_case2_spot": (31.6345, True, 10.0),
    "dtfm_case5_worldwide": (49.2185, True, 10.0),
    "derived/derived_random10_seed2022": (63.3, False, 60.0),
    "derived/derived_random10_seed2023": (61.0, False, 60.0),
    "derived/derived_random10_seed2024": (64.9, False, 60.0),
    "derived/derived_case5_jitter_seed2022": (61.2, False, 60.0),
}
N_SEEDS = 3
LARGE = 1024
FIRST_USE_S = 40.0  # limit of a search
# Prints the CPU seconds of its process (all threads, and the imports) when the first plans of a search are counted.
FIRST_PLANS = """
import sys, time
from planner.__main__ import main
from planner.search.incumbent import Incumbent
count = Incumbent.count
def first(self, evaluations):
    print("first plans", time.process_time(), file=sys.stderr)
    Incumbent.count = count
    count(self, evaluations)
Incumbent.count = first
sys.exit(main(sys.argv[1:]))
"""


def solve_arguments(network: Path | str, solver: str, time_s: float, out: str) -> list[str]:
    sizes = [f"--c_dp_bytes={C_DP_BYTES}", f"--c_pp_bytes={C_PP_BYTES}", "--stages=8", "--pipelines=8"]
    return ["solve", f"--network={network}", *sizes, f"--solver={solver}", f"--time_limit_s={time_s}", f"--out={out}"]


def first_use():
    """CPU seconds before the first plans of a search are scored, and those of `explain`."""
    network = NETWORKS / "derived/derived_case5_jitter_seed2022.json"  # no two devices alike: nothing to prove first
    with tempfile.TemporaryDirectory() as folder:
        plan = f"{folder}/plan.json"
        for solver in ("auto", "evolve"):
            for cache in ("empty", "full"):
                environment = {**os.environ, "NUMBA_CACHE_DIR": f"{folder}/{solver}"}
                command = [sys.executable, "-c", FIRST_PLANS, *solve_arguments(network, solver, FIRST_USE_S, plan)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=ROOT)
                seconds = [line.split()[-1] for line in done.stderr.splitlines() if line.startswith("first plans")]
                found = f"{float(seconds[0]):.2f} CPU s" if seconds else f"none in {FIRST_USE_S} s of wall clock"
                print(f"{solver}, {cache} cache: first plans after: {found}", flush=True)
        before = os.times()
        subprocess.run([sys.executable, "-m", "planner", "explain", plan], capture_output=True, check=True, cwd=ROOT)
        after = os.times()
        seconds = after.children_user + after.children_system - before.children_user - before.children_system
        print(f"explain: {seconds:.2f} CPU s")


def targets() -> bool:
    """Costs at equal limits of wall clock, the median of some seeds; whether all were met. The kernels are compiled
    before: `first_use` measures that."""
    case5 = planner.load_network(NETWORKS / "dtfm_case5_worldwide.json")
    planner.solve(case5, planner.Job(SIZES, n_stages=8, n_pipelines=8), planner.Stop(evaluations=50_000))
    met = True
    for name, (most_s, must_prove, time_s) in TARGETS.items():
        network = planner.load_network(NETWORKS / f"{name}.json")
        job = planner.Job(SIZES, n_stages=8, n_pipelines=8)
        results = [planner.solve(network, job, planner.Stop(time_s=time_s), seed=seed) for seed in range(N_SEEDS)]
        cost_s = statistics.median(result.score_s for result in results)
        n_proved = sum(result.proved for result in results)
        ok = cost_s <= most_s and (n_proved == N_SEEDS or not must_prove)
        met &= ok
        costs = ", ".join(f"{result.score_s:.3f}" for result in results)
        print(f"{name}: {costs} in {time_s:.0f} s, {n_proved} proved; at most {most_s}: {'met' if ok else 'MISSED'}")
    started_s = time.monotonic()
    network = generate("random", LARGE, 0)
    job = planner.Job(SIZES, n_stages=32, n_pipelines=32)
    result = planner.solve(network, job, planner.Stop(time_s=50.0))
    elapsed_s = time.monotonic() - started_s
    print(f"{LARGE} devices: {result.score_s:.1f} s in {elapsed_s:.1f} s of wall clock, at most 60")
    return met and elapsed_s <= 60.0


def rate():
    """Plans per CPU second of `anneal` and `anneal_softened` at 64 devices: to compare two versions, alternate them."""

    problem = problem_of(generate("random", 64, 0), 8, 8, C_DP_BYTES, C_PP_BYTES)
    devices = devices_of(problem)
    for name, n_moves in (("anneal", 300_000), ("anneal_softened", 1_000_000)):
        place = np.random.default_rng(0).permutation(64).reshape(8, 8)
        for moves in (1, n_moves):  # the first call compiles
            started_s = time.thread_time()
            if name == "anneal":
                walk = walk_from(place, 64)
                anneal(devices, walk, NOTHING, generator(0), Cooling(1.0, 0.1, moves), MoveShares(0.01, 0.3))
            else:
                walk = soft_walk_from(place)
                anneal_softened(devices, walk, generator(0), Cooling(1.0, 0.1, moves), Softness(1.0, 0.0), 0.3)
        print(f"{name}: {n_moves / (time.thread_time() - started_s):,.0f} plans per CPU s")


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("what", choices=("first_use", "targets", "rate"))
    what = flags.parse_args().what
    return {"first_use": first_use, "targets": lambda: 1 - targets(), "rate": rate}[what]() or 0


if __name__ == "__main__":
    sys.exit(main())
