"""A job by communication cost: sizes, the search, layers that fit the devices' memory, the reference cost."""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.profile import from_flops
from planner.api.job import COMM_COST, DEFAULT_LAYERS, MICROBATCHES_PER_PIPELINE, ByteSizes, Job, Start
from planner.api.result import OnProgress, Result
from planner.api.search_run import Search, running, statistics_of
from planner.api.start import seats_of, with_moves, workload_near
from planner.cost.reference import cost_of
from planner.model import comm_workload
from planner.model.comm_workload import CommWorkload
from planner.model.constraints import Constraints, Rules, rules_of
from planner.model.hosts import room_bytes
from planner.model.problem import placement_s, problem_of, problem_with_spares
from planner.model.result import Solution
from planner.report.plan_file import plan_of
from planner.search.seated import solve_seated
from planner.search.solve import solve
from planner.step_time.tune import shallow_depths
from planner.step_time.workload import StepWorkload, refuse_memory, refuse_too_small

STATES_PER_GRADIENT = 4


def solve_by_cost(
    network: Network,
    job: Job,
    search: Search,
    constraints: Constraints,
    on_progress: OnProgress | None,
    start: Start | None,
) -> Result:
    """See planner.api.solve."""
    workload = workload_of(job) if start is None else workload_near(start, job)
    n_stages, n_pipelines = len(workload.stages), len(workload.shares)
    sizes = workload.c_dp_bytes, workload.c_pp_bytes, workload.exchanges_per_step
    problem = (problem_of if start is None else problem_with_spares)(network, n_stages, n_pipelines, *sizes)
    memory = memory_workload(job, network)  # what the devices can hold, None where nothing is limited
    if workload.model is None:
        refuse_small_devices(network, workload)
    with running(search.stop, on_progress) as incumbent:
        seats = seats_of(network, problem, constraints, start, job)
        if seats is None:
            solution = solve(problem, incumbent, search.solver, search.seed)
        else:
            solution = solve_seated(problem, seats, workload.stages, incumbent, search.solver, search.seed)
    refuse_missing_links(network, solution.cost_s, (n_stages, n_pipelines), math.isinf(solution.bound_s))
    before = start and start.plan
    in_flight = before and before.in_flight
    if memory is not None and not (before and _still_fits(memory, before, solution.placement, workload.shares)):
        fitted = fit_memory(memory, workload, solution, rules_of(constraints, network, n_stages, n_pipelines))
        solution, workload, in_flight = fitted.solution, fitted.workload, fitted.in_flight
    facts = search.facts(COMM_COST, constraints)
    plan = replace(plan_of(network, workload, solution, facts), in_flight=in_flight)
    if before is not None:
        plan = replace(plan, schedule=before.schedule, codec=_codec_of(before))
    elif isinstance(job.work, RunConfig):
        schedule = job.work.plan.schedule
        in_flight = in_flight if schedule == "1f1b" else None
        plan = replace(plan, schedule=schedule, in_flight=in_flight, codec=(job.work.codec,) * (n_stages - 1))
    cost = cost_of(network, plan.placement, workload.c_dp_bytes, workload.c_pp_bytes, workload.exchanges_per_step)
    result = Result(
        plan=plan,
        network=network,
        objective=COMM_COST,
        score_s=cost.total_s,
        cost=cost,
        step_s=None,
        bound_s=plan.found["bound_s"],
        gap=plan.found["gap"],
        proved=solution.proved,
        statistics=statistics_of(incumbent, search.stop, search.solver, search.seed),
        history=tuple(solution.history),
        by_solver={name: tuple(history) for name, history in solution.by_solver.items()},
    )
    near_s = placement_s(problem, seats.matched(problem, seats.near)) if seats else math.inf
    return with_moves(result, seats, near_s if near_s < problem.missing_s else math.inf)


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
    profile = from_flops(run.model, size, flops, 1.0, dtype=run.dtype, remat=run.remat, seq_len=seq_len)
    memory = StepWorkload.of_run(network, profile, run)
    refuse_too_small(memory, job.n_stages)
    return memory


def refuse_small_devices(network: Network, workload: CommWorkload):
    """Raise BadInput for a device that cannot hold a stage's parameters, gradients and two moments, which are four
    times c_dp. With byte counts alone the layers cannot be cut to fit, and every device holds a stage."""
    need = STATES_PER_GRADIENT * workload.c_dp_bytes
    for d, (device, room) in enumerate(zip(network.devices, room_bytes(network), strict=True)):
        if room < need:
            raise BadInput(
                f"{network.name}: devices[{d}].memory_bytes: {device.name} has {room / 1e9:g} "
                f"GB, its stage needs {need / 1e9:g} GB, four times c_dp: parameters, gradients, two moments"
            )


def refuse_missing_links(network: Network, cost_s: float, shape: tuple[int, int], none_exists: bool):
    """Raise BadInput where the plan found uses a link that does not exist, so that its cost is infinite; none_exists if
    it is proved that every plan of this shape (stages, pipelines) does."""
    if not math.isfinite(cost_s):
        found = "there is no plan (proved)" if none_exists else "found no plan"
        raise BadInput(
            f"{network.name or 'network'}: bandwidth_gbps: {found} of {shape[0]} stages x {shape[1]} pipelines that "
            f"avoids the links of zero bandwidth"
        )


@dataclass(frozen=True)
class FittedSolution:
    """A solution whose stages fit their devices' memory, with their layers and the forwards in flight per stage."""

    solution: Solution
    workload: CommWorkload
    in_flight: tuple[int, ...]


def fit_memory(memory: StepWorkload, workload: CommWorkload, solution: Solution, rules: Rules) -> FittedSolution:
    """Cut the layers for the memory of every stage's smallest device, with the stages in this order or, if it is
    allowed, reversed (which costs the same), and with fewer forwards in flight if need be. A smaller c_dp lowers every
    cost by at most its own factor, and so the bound."""
    both = (solution.placement, solution.placement[::-1])
    directions = [placement for placement in both if not rules.violated(placement.tolist())]
    n_stages = len(solution.placement)
    usual = tuple(n_stages - s for s in range(n_stages))
    for depth in (usual, *shallow_depths(n_stages, workload.shares[0])):
        for placement in directions:
            stages = memory.split(placement, depth)
            if stages is not None:
                recut = comm_workload.recut(workload, stages)
                factor = min(1.0, recut.c_dp_bytes / workload.c_dp_bytes)
                proved = solution.proved and recut.c_dp_bytes == workload.c_dp_bytes
                fitted = replace(solution, placement=placement, bound_s=solution.bound_s * factor, proved=proved)
                return FittedSolution(fitted, recut, depth)
    return refuse_memory(memory, n_stages)
