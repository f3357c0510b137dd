"""A job by communication cost: sizes, the search, layers that fit the devices' memory."""

import math
from dataclasses import replace

import numpy as np

from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.profile import from_flops
from planner.api.job import DEFAULT_LAYERS, MICROBATCHES_PER_PIPELINE, ByteSizes, Job
from planner.api.search_run import Search
from planner.api.start import seats_of, workload_near
from planner.model import comm_workload
from planner.model.comm_workload import CommWorkload
from planner.model.constraints import Rules, rules_of
from planner.model.hosts import room_bytes
from planner.model.problem import placement_s, problem_of
from planner.model.result import Solution
from planner.report.plan_file import solved
from planner.report.result import Result
from planner.search.seated import solve_seated
from planner.search.solve import solve
from planner.step_time.tune import shallow_depths
from planner.step_time.workload import StepWorkload, refuse_memory, refuse_too_small

STATES_PER_GRADIENT = 4


def solve_by_cost(search: Search) -> Result:
    """See planner.api.solve."""
    network, job, start = search.network, search.job, search.start
    workload = workload_of(job) if start is None else workload_near(start, job)
    n_stages, n_pipelines = shape = len(workload.stages), len(workload.shares)
    problem = problem_of(network, *shape, *workload.sizes, has_spares=start is not None)
    memory = memory_workload(job, network)  # what the devices can hold, None where nothing is limited
    if workload.model is None:
        refuse_small_devices(network, workload)
    with search.running() as incumbent:
        seats = seats_of(network, problem, search.constraints, start, job)
        if seats is None:
            solution = solve(problem, incumbent, search.solver, search.seed)
        else:
            solution = solve_seated(problem, seats, workload.stages, incumbent, search.solver, search.seed)
    search.refuse_missing_links(solution.cost_s, shape, math.isinf(solution.bound_s))
    before = start and start.plan
    schedule, codec, in_flight = "1f1b", ("none",) * (n_stages - 1), None
    if before is not None:
        schedule, codec, in_flight = before.schedule, _codec_of(before), before.in_flight
    elif isinstance(job.work, RunConfig):
        schedule, codec = job.work.plan.schedule, (job.work.codec,) * (n_stages - 1)
    if memory is not None and not (before and _still_fits(memory, before, solution.placement, workload.shares)):
        rules = rules_of(search.constraints, network, *shape)
        solution, workload, in_flight = fit_memory(memory, workload, solution, rules)
        in_flight = in_flight if before or schedule == "1f1b" else None
    plan = Plan(
        n_layers=workload.n_layers,
        stages=workload.stages,
        placement=tuple(tuple(row) for row in solution.placement.tolist()),
        shares=workload.shares,
        schedule=schedule,
        in_flight=in_flight,
        codec=codec,
    )
    facts = {"dtype": workload.dtype, **search.facts(incumbent)}
    plan = solved(plan, network, workload.sizes, bound_s=solution.bound_s, proved=solution.proved, **facts)
    near_s = placement_s(problem, seats.matched(problem, seats.near)) if seats else math.inf
    return search.result(incumbent, plan, seats=seats, near_s=near_s if near_s < problem.missing_s else math.inf)


def _still_fits(memory: StepWorkload, before: Plan, placement: np.ndarray, shares: tuple[int, ...]) -> bool:
    """Whether a placement's devices hold the layers of a plan that runs, with its forwards in flight."""
    depth = tuple(before.depth(s) for s in range(before.n_stages))
    return memory.fits(placement, before.stages, depth, shares)


def _codec_of(before: Plan) -> tuple[str, ...]:
    """The codecs of a plan that runs, where they do not differ by pipeline; else none."""
    same = not any("," in entry for entry in before.codec)
    return before.codec if same else ("none",) * (before.n_stages - 1)


def workload_of(job: Job) -> CommWorkload:
    """The sizes of Eq. 1-4 of a job whose shape is given."""
    assert job.n_stages is not None and job.n_pipelines is not None  # a job by cost has a shape
    work = job.work
    if isinstance(work, RunConfig):
        return comm_workload.from_run(job.n_stages, job.n_pipelines, work)
    n_layers = work.n_layers or max(DEFAULT_LAYERS, job.n_stages)
    n_microbatches = work.n_microbatches or MICROBATCHES_PER_PIPELINE * job.n_pipelines
    shares = comm_workload.microbatch_shares(n_microbatches, job.n_pipelines)
    return comm_workload.from_bytes(job.n_stages, shares, work.c_dp_bytes, work.c_pp_bytes, n_layers)


def memory_workload(job: Job, network: Network) -> StepWorkload | None:
    """A workload for the memory of devices, if the run is known and some device's memory is limited; else None. Its
    speeds mean nothing."""
    if isinstance(job.work, ByteSizes) or all(room == math.inf for room in room_bytes(network)):
        return None
    assert job.n_stages is not None
    run = job.work
    flops = {device.kind: 1e12 for device in network.devices}
    size, seq_len = run.train.microbatch_size, run.data.seq_len
    profile = from_flops(
        run.model, size, flops, 1.0, dtype=run.dtype, remat=run.remat, seq_len=seq_len, optimizer=run.optim.name
    )
    memory = StepWorkload(network, profile, run)
    refuse_too_small(memory, job.n_stages)
    return memory


def refuse_small_devices(network: Network, workload: CommWorkload):
    """Raise BadInput for a device that cannot hold a stage's parameters, gradients and two moments, which are four
    times c_dp. With byte counts alone the layers cannot be cut to fit, and every device holds a stage."""
    need = STATES_PER_GRADIENT * workload.sizes.c_dp_bytes
    for d, (device, room) in enumerate(zip(network.devices, room_bytes(network), strict=True)):
        if room < need:
            raise BadInput(
                f"{network.name}: devices[{d}].memory_bytes: {device.name} has {room / 1e9:g} "
                f"GB, its stage needs {need / 1e9:g} GB, four times c_dp: parameters, gradients, two moments"
            )


def fit_memory(
    memory: StepWorkload, workload: CommWorkload, solution: Solution, rules: Rules
) -> tuple[Solution, CommWorkload, tuple[int, ...]]:
    """The solution with its layers cut for the memory of every stage's smallest device, its workload, and the forwards
    in flight per stage. The stages are in this order or, if it is allowed, reversed (which costs the same); fewer
    forwards are in flight if need be. A smaller c_dp lowers every cost by at most its own factor, and so the bound."""
    both = (solution.placement, solution.placement[::-1])
    directions = [placement for placement in both if not rules.violated(placement.tolist())]
    n_stages = len(solution.placement)
    usual = tuple(n_stages - s for s in range(n_stages))
    for depth in (usual, *shallow_depths(n_stages, workload.shares[0])):
        for placement in directions:
            stages = memory.split(placement, depth)
            if stages is not None:
                recut = comm_workload.recut(workload, stages)
                factor = recut.sizes.c_dp_bytes / workload.sizes.c_dp_bytes
                bound_s, proved = solution.bound_s * min(1.0, factor), solution.proved and factor == 1.0
                return replace(solution, placement=placement, bound_s=bound_s, proved=proved), recut, depth
    return refuse_memory(memory, n_stages)
