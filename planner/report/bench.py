"""`python -m planner bench`: solvers over networks with equal budgets on one core each, some seeds each."""

import contextlib
import math
import multiprocessing
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

from jaxdt.run import network as networks
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.cost.reference import cost_of
from planner.model.problem import problem_of
from planner.report import bench_page
from planner.report.bench_page import BenchRun
from planner.search.base import check_solver
from planner.search.incumbent import Budget, Incumbent
from planner.search.solve import solve

WARM_UP_S = 1.0


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
    solution = solve(problem, Incumbent(job.budget), job.solver, job.seed)
    return BenchRun(
        network=name_of(network, job.path),
        solver=job.solver,
        seed=job.seed,
        cost_s=cost_of(network, solution.placement.tolist(), job.c_dp_bytes, job.c_pp_bytes).total_s,
        bound_s=solution.bound_s,
        proved=solution.proved,
        evaluations=solution.evaluations,
        time_s=solution.time_s,
        history=tuple(solution.history),
    )


def name_of(network: Network, path: str) -> str:
    return network.name or Path(path).stem


def jobs_of(flags: Namespace) -> list[BenchJob]:
    """One job for each network of the right size, solver and seed; BadInput if no network has that size."""
    shape = flags.stages, flags.pipelines
    paths = [path for path in flags.networks if networks.load(path).n_devices == shape[0] * shape[1]]
    if not paths:
        raise BadInput(f"networks: none has {shape[0]} x {shape[1]} devices")
    time_s = flags.time_limit_s if flags.time_limit_s is not None or flags.evaluations is not None else 60.0
    budget = Budget(time_s, flags.evaluations)
    sizes = flags.c_dp_bytes, flags.c_pp_bytes
    seeds = range(flags.seed, flags.seed + flags.n_seeds)
    solvers = flags.solvers.split(",")
    return [
        BenchJob(path, shape, *sizes, solver, budget, seed) for path in paths for solver in solvers for seed in seeds
    ]


@contextlib.contextmanager
def one_core(core: int | None = None) -> Iterator[None]:
    """Run the body on one core (by default the first that this process may use), so that solvers with threads have no
    more processor than others. On systems without affinity nothing changes."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed) if core is None else core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def take_core(cores: "Queue[int]"):
    """Bind a new worker process to a core of its own."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})


def run_all(jobs: list[BenchJob], n_at_once: int) -> Iterator[BenchRun]:
    """The runs as they end. The kernels of all solvers are compiled before the first one begins."""
    for job in {job.solver: job for job in jobs}.values():
        solve_briefly(job)
    if n_at_once == 1:
        with one_core():
            yield from map(measure, jobs)
        return
    context = multiprocessing.get_context("spawn")
    cores: Queue[int] = context.Queue()
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(n_at_once)
    for worker in range(n_at_once):
        cores.put(available[worker % len(available)])
    with ProcessPoolExecutor(n_at_once, context, take_core, (cores,)) as pool:
        for task in as_completed([pool.submit(measure, job) for job in jobs]):
            yield task.result()


def solve_briefly(job: BenchJob):
    """Run a solver for a moment, so that its kernels are in the cache on disk."""
    problem = problem_of(networks.load(job.path), *job.shape, job.c_dp_bytes, job.c_pp_bytes)
    solve(problem, Incumbent(Budget(WARM_UP_S, job.budget.evaluations)), job.solver, job.seed)


def run(flags: Namespace) -> int:
    """The command: writes bench.md, bench.json and bench.png, and with --write the section of a page."""
    for solver in flags.solvers.split(","):
        check_solver("solvers", solver)
    for name in ("n_seeds", "jobs"):
        if getattr(flags, name) < 1:
            raise BadInput(f"--{name}: got {getattr(flags, name)}, expected an integer >= 1")
    out = Path(flags.out)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out: {out} is not a folder, expected one, or a name for a new one")
    if flags.write:
        bench_page.section_of(Path(flags.write))
    jobs = jobs_of(flags)
    runs = []
    for run in run_all(jobs, flags.jobs):
        runs.append(run)
        cost = f"{run.cost_s:.3f} s" if math.isfinite(run.cost_s) else "no plan"
        print(f"{run.network} {run.solver} {run.seed}: {cost}", file=sys.stderr, flush=True)
    place = {(name_of(networks.load(job.path), job.path), job.solver, job.seed): i for i, job in enumerate(jobs)}
    runs.sort(key=lambda run: place[run.network, run.solver, run.seed])
    out.mkdir(parents=True, exist_ok=True)
    text = bench_page.markdown(runs, flags)
    (out / "bench.md").write_text(text)
    (out / "bench.json").write_text(bench_page.raw(runs))
    bench_page.draw(runs, out / "bench.png")
    if flags.write:
        bench_page.write_section(Path(flags.write), text)
    print(text, end="")
    return 0
