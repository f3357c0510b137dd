"""The planner's promises of time, and its solvers compared: costs and proofs within a limit of wall clock.

    python scripts/bench/bench_planner.py first_use     # CPU seconds of new processes with an empty cache of kernels
    python scripts/bench/bench_planner.py targets       # costs and proofs: some 15 minutes of a quiet machine
    python scripts/bench/bench_planner.py rate          # plans per CPU second of the annealing, once it is compiled
    python scripts/bench/bench_planner.py replicas [NETWORK.json] [--out=PLAN.json]
    python scripts/bench/bench_planner.py solvers NETWORK.json ... --out=DIR [--solvers=auto,random] [--write=PAGE.md]

All print one line a measurement. `targets` prints the limit beside the median of three seeds, and ends with exit code 1
where one is missed.

`replicas` compares unequal and equal numbers of replicas a stage by simulated seconds of a step, by default on 24
devices of three kinds. Each search gets the same seconds. The equal plans are the best of two searches: pipelines with
`fixed` wiring in any shape, with uneven layers, uneven shares and devices left out (`planner solve --stages auto`), and
equally many replicas of each stage with `swarm` wiring. --out gets the unequal plan.

`solvers` runs each solver on each network of stages x pipelines devices with equal budgets, on one core each, with some
seeds. It writes bench.md, bench.json and bench.png into --out, and with --write the section of a page between two
marks, as configs/networks/README.md has it.
"""

import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
import solver_page
from absl import flags
from solver_page import BenchRun, Settings

import planner
from jaxdt.cli import script_main
from jaxdt.run import network as networks
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.network import Network
from jaxdt.run.plan import to_json
from planner.api.by_step import workload_of
from planner.cost.compiled import generator
from planner.cost.reference import cost_of
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
from planner.search.base import check_solver
from planner.search.charges import NOTHING
from planner.search.incumbent import Budget, Incumbent
from planner.search.solve import solve
from planner.step_time.unequal import plan_of_sets, search_sets

STAGES = flags.DEFINE_integer("stages", 8, "solvers: stages; networks of another size are skipped.", 1)
PIPELINES = flags.DEFINE_integer("pipelines", 8, "solvers: pipelines.", 1)
C_DP = flags.DEFINE_float("c_dp_bytes", 650_000_000, "solvers: bytes of gradients of one stage.", 0.0)
C_PP = flags.DEFINE_float("c_pp_bytes", 471_249_220, "solvers: bytes of a pipeline over one boundary in a step.", 0.0)
SOLVERS = flags.DEFINE_list("solvers", "auto,types,evolve,kl,random", "solvers: their names.")
TIME_LIMIT_S = flags.DEFINE_float(
    "time_limit_s", None, "Of a run or search; solvers: 60, or none with --evaluations; replicas: 120.", 0.0
)
EVALUATIONS = flags.DEFINE_integer("evaluations", None, "solvers: plans to score in a run.", 1)
SEED = flags.DEFINE_integer("seed", 0, "replicas, solvers: the first seed.")
N_SEEDS = flags.DEFINE_integer("n_seeds", 1, "solvers: runs of each solver on each network.", 1)
JOBS = flags.DEFINE_integer("jobs", 1, "solvers: runs at the same time, each on one core.", 1)
MODEL = flags.DEFINE_string("model", "gpt3_1p3b", "replicas: a preset of the GPT family.")
GLOBAL_BATCH = flags.DEFINE_integer("global_batch", 512, "replicas: sequences of a step.", 1)
OUT = flags.DEFINE_string("out", None, "solvers: folder for bench.md, bench.json and bench.png; replicas: a plan file.")
WRITE = flags.DEFINE_string("write", None, "solvers: a page whose section of results is written, too.")

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = ROOT / "configs" / "networks"
C_DP_BYTES, C_PP_BYTES = 650_000_000, 471_249_220
SIZES = planner.ByteSizes(C_DP_BYTES, C_PP_BYTES)
WARM_UP_S = 1.0
# network -> (most seconds of cost, whether the plan must be proved, seconds of wall clock)
TARGETS = {
    "dtfm_case2_spot": (31.6345, True, 10.0),
    "dtfm_case5_worldwide": (49.2185, True, 10.0),
    "derived/derived_random10_seed2022": (63.3, False, 60.0),
    "derived/derived_random10_seed2023": (61.0, False, 60.0),
    "derived/derived_random10_seed2024": (64.9, False, 60.0),
    "derived/derived_case5_jitter_seed2022": (61.2, False, 60.0),
}
N_TARGET_SEEDS = 3
LARGE = 1024
FLOPS = {"A100": 312e12, "V100": 125e12, "T4": 65e12}  # dense, 16 bit, from the vendor's data sheets
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


def first_use() -> int:
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
    return 0


def targets() -> int:
    """Costs at equal limits of wall clock, the median of some seeds; exit code 1 where one is missed. The kernels are
    compiled before: `first_use` measures that."""
    case5 = planner.load_network(NETWORKS / "dtfm_case5_worldwide.json")
    planner.solve(case5, planner.Job(SIZES, n_stages=8, n_pipelines=8), planner.Stop(evaluations=50_000))
    met = True
    for name, (most_s, must_prove, time_s) in TARGETS.items():
        network = planner.load_network(NETWORKS / f"{name}.json")
        job = planner.Job(SIZES, n_stages=8, n_pipelines=8)
        results = [
            planner.solve(network, job, planner.Stop(time_s=time_s), seed=seed) for seed in range(N_TARGET_SEEDS)
        ]
        cost_s = statistics.median(result.score_s for result in results)
        n_proved = sum(result.proved for result in results)
        ok = cost_s <= most_s and (n_proved == N_TARGET_SEEDS or not must_prove)
        met &= ok
        costs = ", ".join(f"{result.score_s:.3f}" for result in results)
        print(f"{name}: {costs} in {time_s:.0f} s, {n_proved} proved; at most {most_s}: {'met' if ok else 'MISSED'}")
    started_s = time.monotonic()
    network = generate("random", LARGE, 0)
    job = planner.Job(SIZES, n_stages=32, n_pipelines=32)
    result = planner.solve(network, job, planner.Stop(time_s=50.0))
    elapsed_s = time.monotonic() - started_s
    print(f"{LARGE} devices: {result.score_s:.1f} s in {elapsed_s:.1f} s of wall clock, at most 60")
    return 0 if met and elapsed_s <= 60.0 else 1


def rate() -> int:
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
    return 0


def replicas(*paths: str) -> int:
    """Unequal against equal numbers of replicas: a row of each, and the unequal plan."""
    network = planner.load_network(paths[0] if paths else NETWORKS / "mixed24.json")
    run = planner.run_of_model(GPTConfig.of(MODEL.value), planner.StepOptions(global_batch=GLOBAL_BATCH.value))
    job = planner.Job(run, None, None, planner.profile_of_flops(run, network, FLOPS))
    time_s = 120.0 if TIME_LIMIT_S.value is None else TIME_LIMIT_S.value
    piped = planner.solve(network, job, planner.Stop(time_s=time_s), SEED.value)
    print(f"fixed wiring: {piped.score_s:.3f} s, {piped.plan.shape}", flush=True)
    workload = workload_of(job, network)
    for name in ("equal", "unequal"):
        sets = search_sets(workload, None, Incumbent(Budget(time_s)), SEED.value, name == "equal")[0]
        plan, layers = plan_of_sets(workload, sets), list(sets.stages)
        print(f"swarm wiring, {name} replicas: {sets.step_s:.3f} s, {plan.shape}, layers {layers}", flush=True)
        if OUT.value and name == "unequal":
            Path(OUT.value).write_text(json.dumps(to_json(plan)) + "\n")
    return 0


# ------------------------------------------------------------------------------------------------------------- solvers


@dataclass(frozen=True)
class BenchJob:
    """One run: a network file, the shape and sizes of Eq. 1-4, a solver, its budget and its seed."""

    path: str
    shape: tuple[int, int]
    c_dp_bytes: float
    c_pp_bytes: float
    solver: str
    budget: Budget
    seed: int


def measure(job: BenchJob) -> BenchRun:
    """The end of one run. Its cost is the reference cost of the plan, infinite if the plan uses a missing link."""
    network = networks.load(job.path)
    problem = problem_of(network, *job.shape, job.c_dp_bytes, job.c_pp_bytes)
    incumbent = Incumbent(job.budget)
    solution = solve(problem, incumbent, job.solver, job.seed)
    return BenchRun(
        network=name_of(network, job.path),
        solver=job.solver,
        seed=job.seed,
        cost_s=cost_of(network, solution.placement.tolist(), job.c_dp_bytes, job.c_pp_bytes).total_s,
        bound_s=solution.bound_s,
        proved=solution.proved,
        evaluations=solution.evaluations,
        time_s=solution.time_s,
        history=tuple(incumbent.history),
    )


def name_of(network: Network, path: str) -> str:
    return network.name or Path(path).stem


def jobs_of(paths: list[str], settings: Settings, solvers: list[str]) -> list[BenchJob]:
    """One job for each network of the right size, solver and seed; BadInput if no network has that size."""
    shape = settings.n_stages, settings.n_pipelines
    fitting = [path for path in paths if networks.load(path).n_devices == math.prod(shape)]
    if not fitting:
        raise BadInput(f"networks: none has {shape[0]} x {shape[1]} devices")
    budget = Budget(settings.time_s, settings.evaluations)
    sizes = settings.c_dp_bytes, settings.c_pp_bytes
    return [
        BenchJob(path, shape, *sizes, solver, budget, seed)
        for path in fitting
        for solver in solvers
        for seed in settings.seeds
    ]


def take_core(cores: "Queue[int]"):
    """Bind a new process to a core of its own, so that solvers with threads have no more processor than others. On
    systems without affinity nothing changes."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})


def run_all(jobs: list[BenchJob], n_at_once: int) -> Iterator[BenchRun]:
    """The runs as they end. The kernels of all solvers are compiled before the first one begins."""
    for job in {job.solver: job for job in jobs}.values():
        problem = problem_of(networks.load(job.path), *job.shape, job.c_dp_bytes, job.c_pp_bytes)
        solve(problem, Incumbent(Budget(WARM_UP_S, job.budget.evaluations)), job.solver, job.seed)
    context = multiprocessing.get_context("spawn")
    cores: Queue[int] = context.Queue()
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(n_at_once)
    for worker in range(n_at_once):
        cores.put(available[worker % len(available)])
    with ProcessPoolExecutor(n_at_once, context, take_core, (cores,)) as pool:
        for task in as_completed([pool.submit(measure, job) for job in jobs]):
            yield task.result()


def compare_solvers(*paths: str) -> int:
    """Write bench.md, bench.json and bench.png, and with --write the section of a page."""
    for solver in SOLVERS.value:
        check_solver("solvers", solver)
    if not OUT.value:
        raise BadInput("--out: missing, expected a folder for bench.md, bench.json and bench.png")
    out = Path(OUT.value)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is not a folder, expected one, or a name for a new one")
    if WRITE.value:
        solver_page.section_of(Path(WRITE.value))
    settings = Settings(
        n_stages=STAGES.value,
        n_pipelines=PIPELINES.value,
        c_dp_bytes=C_DP.value,
        c_pp_bytes=C_PP.value,
        time_s=60.0 if TIME_LIMIT_S.value is None and EVALUATIONS.value is None else TIME_LIMIT_S.value,
        evaluations=EVALUATIONS.value,
        seeds=range(SEED.value, SEED.value + N_SEEDS.value),
    )
    jobs = jobs_of(list(paths), settings, SOLVERS.value)
    runs: list[BenchRun] = []
    for run in run_all(jobs, JOBS.value):
        runs.append(run)
        cost = f"{run.cost_s:.3f} s" if math.isfinite(run.cost_s) else "no plan"
        print(f"{run.network} {run.solver} {run.seed}: {cost}", file=sys.stderr, flush=True)
    place = {(name_of(networks.load(job.path), job.path), job.solver, job.seed): i for i, job in enumerate(jobs)}
    runs.sort(key=lambda run: place[run.network, run.solver, run.seed])
    out.mkdir(parents=True, exist_ok=True)
    text = solver_page.markdown(runs, settings)
    (out / "bench.md").write_text(text)
    (out / "bench.json").write_text(solver_page.raw(runs))
    solver_page.draw(runs, out / "bench.png")
    if WRITE.value:
        solver_page.write_section(Path(WRITE.value), text)
    print(text, end="")
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "first_use": first_use,
    "targets": targets,
    "rate": rate,
    "replicas": replicas,
    "solvers": compare_solvers,
}


def main(command: str, *paths: str) -> int:
    if len(paths) > {"solvers": len(paths), "replicas": 1}.get(command, 0):
        raise BadInput(f"argument: got {paths[-1]!r}, expected flags only")
    return COMMANDS[command](*paths)


if __name__ == "__main__":
    script_main.run(main, COMMANDS, takes_words=True)
