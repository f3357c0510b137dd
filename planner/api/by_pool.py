"""A job of a pool: the plan with servers among the reliable devices and the others as workers."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from jaxdt.run import codec as codecs
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, require_one_of
from jaxdt.run.memory import (
    FLOAT_BYTES,
    MemoryOptions,
    input_bytes,
    residual_bytes,
    stage_memory,
    state_bytes,
    working_bytes,
)
from jaxdt.run.model_facts import NO_MOMENTS
from jaxdt.run.network import Network
from jaxdt.run.work import WorkKind
from planner.api.job import Job
from planner.model.pool import EQ3, STOPS, PoolOptions, PoolStage, by_name, minibatches_of
from planner.model.pool_problem import PoolProblem
from planner.report.pool_plan import POOL, LevelScore, costed_pool, facts_of, finite, plan_of_pool
from planner.report.result import Result, Statistics
from planner.search.base import POOL_SOLVERS
from planner.search.pool.levels import Found, Level, search, step_of
from planner.step_time.workload import StepWorkload

DEFAULT = "cluster"  # for "auto"
LEASED_UNITS = 2  # that a worker holds at a time, so that it need not wait for the next one


@dataclass(frozen=True, eq=False)
class RunWork:
    """The cost of a stage of a run: seconds by the profile, memory by the run's own rule
    (planner.model.pool_problem.StageWork). A worker holds parameters, an accumulator and the tensors of its leases, no
    optimizer state."""

    workload: StepWorkload

    def unit_s(self, device: int, lo: int, hi: int) -> tuple[float, float]:
        workload = self.workload
        seconds = workload.seconds(workload.kinds[workload.kind_of[device]], lo, hi)
        return seconds[WorkKind.FORWARD], seconds[WorkKind.BACKWARD]

    def server_bytes(self, lo: int, hi: int, n_in_flight: int) -> float:
        run = self.workload.run
        owes = run.sync.codec != codecs.NONE
        options = MemoryOptions(run.dtype, run.remat, run.optim.moments, run.sync.delay, owes=owes)
        on_accelerators = self.workload.on_accelerators
        shape = run.microbatch_shape
        memory = stage_memory(run.model, lo, hi, shape, n_in_flight, options, on_accelerator=on_accelerators)
        return memory.on_device if on_accelerators else memory.total

    def worker_bytes(self, lo: int, hi: int) -> float:
        run = self.workload.run
        model, shape, dtype = run.model, run.microbatch_shape, run.dtype
        leased_bytes = residual_bytes(model, lo, hi, shape, dtype, run.remat) + input_bytes(model, lo, shape, dtype)
        held_bytes = state_bytes(model, lo, hi, dtype, NO_MOMENTS) + working_bytes(model, lo, hi, shape, dtype)
        owes = run.sync.codec != codecs.NONE and not self.workload.on_accelerators  # there the host holds it
        n_owed = owes * (1 + run.sync.delay)  # a vector of what codecs lost for each step that is under way
        return held_bytes + LEASED_UNITS * leased_bytes + n_owed * FLOAT_BYTES * model.facts.stage_trained(lo, hi)


def solve_by_pool(network: Network, job: Job, seed: int, solver: str) -> Result:
    """See planner.api.solve. `seed`: of the annealing beyond 10 stages; up to 10 nothing is drawn. BadInput where the
    reliable devices are too few or too small."""
    began_s, options = time.monotonic(), job.pool
    assert options is not None  # this is the job of a pool
    require_one_of("--solver", solver, ("auto", *POOL_SOLVERS))
    solver = DEFAULT if solver == "auto" else solver
    require_one_of("--eq3", options.eq3, EQ3)
    require_one_of("--stop", options.stop, STOPS)
    problem, run = problem_of_job(network, job, options)
    check_stages(problem, job.n_stages)
    found = search(problem, options, job.n_stages, seed)
    level = found.chosen
    if level.staged is None or level.cost is None:
        refuse_memory(problem, found)
    if math.isinf(level.cost.total_s):
        refuse_links(problem, level)
    assert job.profile is not None  # problem_of_job has refused others
    stages = tuple(_renumbered(stage, problem.index) for stage in level.staged.stages)
    step = step_of(problem, level.staged.stages)
    step = replace(step, unit_s={problem.index[d]: seconds for d, seconds in step.unit_s.items()})
    levels = tuple(score_of(one) for one in found.levels)
    left_out = [(problem.network.devices[d].name, why) for d, why in level.staged.left_out]
    told = {
        "network": network.name,
        "solver": solver,
        "seed": seed,
        "profile": job.profile.source,
        "dtype": run.dtype,
        "left_out": [name for name, _ in left_out],
        "left_out_why": [f"{name} {why}" for name, why in left_out],
        POOL: facts_of(network, stages, step, eq3=options.eq3, stop=options.stop, path_s=level.path_s, levels=levels),
    }
    plan = plan_of_pool(network, stages, problem.n_units, run.codec, told)
    cost = costed_pool(plan, network).cost
    statistics = Statistics(len(levels), time.monotonic() - began_s, solver, seed, interrupted=False)
    return Result(plan, network, job.objective, cost.total_s, cost, statistics, levels=levels)


def problem_of_job(network: Network, job: Job, options: PoolOptions) -> tuple[PoolProblem, RunConfig]:
    """The problem of a job and its run; BadInput for a job without a profile, or a network without reliable devices."""
    if job.profile is None or not isinstance(job.work, RunConfig):
        raise BadInput("--profile: got a job by communication cost, expected one with a profile: Eq. 1 needs seconds")
    if job.n_pipelines or job.unequal or not job.price_rules.empty:
        got = "a number of pipelines, unequal replicas or prices"
        raise BadInput(f"--solver: got a job with {got}, which a pool's plan does not know")
    if all(device.disconnect_prob is not None for device in network.devices):
        raise BadInput(
            f"{network.name or 'network'}: devices: all {network.n_devices} have a disconnect_prob, expected at least "
            f"one reliable device for each stage, to be its server"
        )
    named, index = by_name(network)
    workload = StepWorkload(named, job.profile, job.work)
    n_units = job.work.plan.microbatches
    n_minibatches = minibatches_of(options, n_units, network.n_devices)
    problem = PoolProblem(
        network=named,
        index=index,
        room_bytes=tuple(workload.memory_bytes),
        work=RunWork(workload),
        cuts=tuple(workload.cuts),
        unit_bytes=float(workload.boundary_bytes),
        n_units=n_units,
        n_minibatches=n_minibatches,
    )
    return problem, job.work


def check_stages(problem: PoolProblem, n_stages: int | None) -> None:
    """BadInput for more stages than there are reliable devices, or layers."""
    n_reliable, n_layers = int(problem.reliable.sum()), len(problem.cuts) - 1
    if n_stages is not None and n_stages > n_reliable:
        raise BadInput(
            f"--stages: got {n_stages}, expected at most {n_reliable}, the devices without a disconnect_prob: each "
            f"stage needs a server"
        )
    if n_stages is not None and n_stages > n_layers:
        raise BadInput(f"--stages: got {n_stages}, expected at most {n_layers}, one a layer or shared block")


def refuse_memory(problem: PoolProblem, found: Found) -> NoReturn:
    """BadInput where the reliable devices can hold no cut into the stages that were looked at."""
    rooms = [problem.room_bytes[d] for d in range(len(problem.reliable)) if problem.reliable[d]]
    n_stages = found.levels[-1].n_stages
    sought = str(n_stages) if found.chosen.n_stages == n_stages else f"1 to {n_stages}"
    lo, hi = problem.cuts[:2]
    least = problem.work.server_bytes(lo, hi, n_stages)
    raise BadInput(
        f"memory_bytes: found no split of {problem.cuts[-1]} layers over {sought} stages that "
        f"fits reliable devices with {min(rooms) / 1e9:.2f} to {max(rooms) / 1e9:.2f} GB; a server of the first "
        f"layer alone needs {least / 1e9:.2f} GB"
    )


def refuse_links(problem: PoolProblem, level: Level) -> NoReturn:
    """BadInput where devices of the best plan have no link that they need."""
    raise BadInput(
        f"{problem.network.name or 'network'}: bandwidth_gbps: found no plan ({level.n_stages} stages) that "
        f"avoids the links of zero bandwidth"
    )


def score_of(level: Level) -> LevelScore:
    step_s = None if level.cost is None else finite(level.cost.total_s)
    return LevelScore(level.n_stages, finite(level.search_s), step_s)


def _renumbered(stage: PoolStage, index: Sequence[int]) -> PoolStage:
    """The stage with the devices of the network as it was given."""
    front, back, workers = (
        tuple(sorted(index[d] for d in devices)) for devices in (stage.front, stage.back, stage.workers)
    )
    return PoolStage(stage.lo, stage.hi, front, back, workers, {index[d]: n for d, n in stage.units.items()})
