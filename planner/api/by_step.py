"""A job by step time: the workload, the search of one shape or of all, or of stages with unequal numbers of replicas
under `swarm` wiring; the plan of the best finalist."""

import math
from dataclasses import asdict
from typing import Any

from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.api.job import Job
from planner.api.search_run import Search
from planner.api.start import seats_of
from planner.cost.reference import cost_of
from planner.model import comm_workload
from planner.model.comm_workload import CommBytes
from planner.model.constraints import Constraints
from planner.model.prices import has_prices
from planner.model.problem import Problem, problem_of
from planner.report.plan_file import solved
from planner.report.result import Result, ScoredStep
from planner.step_time.search import Finalist, StepSolution, search_step
from planner.step_time.shapes import reasons, search_shapes, step_s_with_all
from planner.step_time.simulate import plan_of_layout
from planner.step_time.tune import kept, price_of
from planner.step_time.unequal import StageSets, plan_of_sets, search_sets
from planner.step_time.workload import MISSING_S, StepWorkload, refuse_too_small

N_FINALISTS = 5  # of unequal replicas


def solve_by_step(search: Search) -> Result:
    """See planner.api.solve."""
    network, job, start = search.network, search.job, search.start
    workload = workload_of(job, network)
    check_prices(network, job, search.constraints)
    shape = n_stages, n_pipelines = job.n_stages, job.n_pipelines
    problem = None  # of the shape, if it is given and all devices are used, or those that are left of a plan that runs
    if n_stages and n_pipelines and job.price_rules.empty:
        problem = problem_of_shape(workload, n_stages, n_pipelines, has_spares=start is not None)
    seats = None
    with search.running(MISSING_S) as incumbent:
        if problem:
            seats = seats_of(network, problem, search.constraints, start, job)
            solution = search_step(workload, problem.n_stages, incumbent, search.solver, search.seed, seats)
        elif not search.constraints.empty:
            raise BadInput("constraints: expected numbers of --stages and --pipelines with them, not auto")
        else:
            solution = search_shapes(workload, *shape, incumbent, search.solver, search.seed)
    finalists = tuple(scored(workload, finalist) for finalist in solution.finalists)
    plan = plan_of_step(workload, solution, search.facts(incumbent))
    none_exists = math.isinf(plan.found["bound_s"]) and None not in shape
    cost_s = finalists[0].cost.total_s + finalists[0].step_s
    search.refuse_missing_links(cost_s, (plan.n_stages, plan.n_pipelines), none_exists)
    near = kept(workload, seats.before, seats.near) if seats and seats.before else None
    return search.result(incumbent, plan, finalists, seats, math.inf if near is None else near.step_s)


def solve_unequal(search: Search) -> Result:
    """See planner.api.solve: stages may have replicas of their own number. Nothing is known of a bound."""
    network, job = search.network, search.job
    workload = workload_of(job, network)
    if not search.constraints.empty:
        raise BadInput("constraints: expected none with --replicas unequal")
    with search.running(MISSING_S) as incumbent:
        found = search_sets(workload, job.n_stages, incumbent, search.seed)
    finalists = tuple(scored_sets(workload, sets) for sets in found[:N_FINALISTS])
    plan, best = plan_of_sets(workload, found[0]), finalists[0]
    search.refuse_missing_links(best.step_s, (plan.n_stages, max(plan.n_replicas)))
    left_out = [device.name for d, device in enumerate(network.devices) if d not in plan.peers]
    facts = {
        **step_facts(workload, best.step_s),
        "left_out_why": [f"{name}: the step found without it is shorter" for name in left_out],
        "step_s_with_all": None,
        **search.facts(incumbent),
    }
    return search.result(incumbent, solved(plan, network, sizes_of_sets(workload, found[0]), **facts), finalists)


def workload_of(job: Job, network: Network) -> StepWorkload:
    """The step of a job on a network; BadInput for a kind of device without seconds."""
    assert job.profile is not None and isinstance(job.work, RunConfig)  # a job by step time has both
    for device in network.devices:
        job.profile.kind(device.kind)
    return StepWorkload(network, job.profile, job.work, job.price_rules)


def check_prices(network: Network, job: Job, constraints: Constraints):
    """Raise BadInput where prices are to decide and there are none, or constraints besides."""
    if job.price_rules.empty:
        return
    flag = "--objective" if job.price_rules.is_minimised else "--budget_per_hour"
    if not has_prices(network):
        raise BadInput(f"{flag}: {network.name or 'the network'} has no price_per_hour and no egress_per_gb")
    if not constraints.empty:
        raise BadInput(f"{flag}: got constraints as well, expected one of them")


def problem_of_shape(workload: StepWorkload, n_stages: int, n_pipelines: int, has_spares: bool) -> Problem:
    """A shape's problem by Eq. 1-4, with layers cut evenly; BadInput for one that cannot be planned."""
    comm_workload.microbatch_shares(workload.n_microbatches, n_pipelines)
    sizes = workload.even_comm_bytes(n_stages, n_pipelines)
    refuse_too_small(workload, n_stages)
    return problem_of(workload.network, n_stages, n_pipelines, *sizes, has_spares=has_spares)


def scored(workload: StepWorkload, finalist: Finalist) -> ScoredStep:
    """A finalist beside its cost by Eq. 1-4, with the sizes of its own layers and shares."""
    layout = finalist.layout
    sizes = workload.comm_bytes(layout.stages, layout.shares)
    cost = cost_of(workload.network, layout.placement.tolist(), *sizes)
    price = price_of(workload, layout, finalist.step_s) if has_prices(workload.network) else None
    return ScoredStep(finalist.name, finalist.step_s, cost, price)


def sizes_of_sets(workload: StepWorkload, sets: StageSets) -> CommBytes:
    """The sizes of Eq. 1-4 for unequal numbers: gradients of the largest stage, and what one device of the stage with
    most replicas sends over a boundary."""
    share = math.ceil(workload.n_microbatches / max(map(len, sets.rows)))
    return workload.comm_bytes(sets.stages, (share,))


def scored_sets(workload: StepWorkload, sets: StageSets) -> ScoredStep:
    """Simulated sets beside their cost by Eq. 1-4 for unequal numbers (planner.cost.reference)."""
    cost = cost_of(workload.network, sets.rows, *sizes_of_sets(workload, sets))
    return ScoredStep(f"{'+'.join(str(len(row)) for row in sets.rows)} replicas", sets.step_s, cost)


def step_facts(workload: StepWorkload, step_s: float) -> dict[str, Any]:
    """The facts of any plan by step time."""
    return {"step_s": step_s, "profile": workload.profile.source, "dtype": workload.profile.dtype}


def plan_of_step(workload: StepWorkload, solution: StepSolution, search_facts: dict[str, Any]) -> Plan:
    """The best finalist's plan. The bound of Eq. 1-4 holds for it only if it uses the devices that were searched, and
    shrinks with its sizes."""
    best, by_cost = solution.finalists[0], solution.by_cost
    layout = best.layout
    sizes = workload.comm_bytes(layout.stages, layout.shares)
    bound_s = 0.0
    if by_cost and sorted(layout.placement.ravel()) == sorted(by_cost.devices) and layout.shape == by_cost.shape:
        ratios = sizes.c_dp_bytes / by_cost.sizes.c_dp_bytes, sizes.c_pp_bytes / by_cost.sizes.c_pp_bytes
        bound_s = by_cost.solution.bound_s * min(1.0, *ratios)
    with_all_s = step_s_with_all(solution, workload.network.n_devices)
    facts = {
        **step_facts(workload, best.step_s),
        "left_out_why": reasons(workload, layout),
        "step_s_with_all": with_all_s if len(layout.spare) else None,
        "simple_step_s": solution.simple and solution.simple.step_s,
        "not_tried": solution.not_tried,
        **search_facts,
    }
    if has_prices(workload.network):
        facts["price"] = asdict(price_of(workload, layout, best.step_s))
    if workload.price_rules.budget_per_hour is not None:
        facts["budget_per_hour"] = workload.price_rules.budget_per_hour
    return solved(plan_of_layout(workload, layout), workload.network, sizes, bound_s=bound_s, **facts)
