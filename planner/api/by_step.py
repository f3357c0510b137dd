"""A job by step time: the workload, the search of one shape or of all, the plan of the best finalist."""

import math
from dataclasses import asdict, replace

from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.api.by_cost import refuse_missing_links
from planner.api.job import Job, Start
from planner.api.result import OnProgress, Result, ScoredStep
from planner.api.search_run import Search, running, statistics_of
from planner.api.start import seats_of, with_moves
from planner.cost.reference import cost_of
from planner.model import comm_workload
from planner.model.comm_workload import CommWorkload
from planner.model.constraints import Constraints
from planner.model.prices import has_prices
from planner.model.problem import Problem, problem_of, problem_with_spares
from planner.report.plan_file import plan_of
from planner.search.incumbent import Incumbent
from planner.step_time.search import Finalist, StepSolution, search_step, unsearched
from planner.step_time.shapes import reasons, search_shapes, step_s_with_all
from planner.step_time.simulate import plan_of_layout
from planner.step_time.tune import kept, price_of
from planner.step_time.workload import MISSING_S, StepWorkload, refuse_too_small


def solve_by_step(
    network: Network,
    job: Job,
    search: Search,
    constraints: Constraints,
    on_progress: OnProgress | None,
    start: Start | None,
) -> Result:
    """See planner.api.solve."""
    stop, solver, seed = search.stop, search.solver, search.seed
    workload = workload_of(job, network)
    check_prices(network, job, constraints)
    n_stages, n_pipelines = job.n_stages, job.n_pipelines
    problem = None  # of the shape, if it is given and all devices are used, or those that are left of a plan that runs
    if n_stages and n_pipelines and job.price_rules.empty:
        problem = problem_of_shape(workload, n_stages, n_pipelines, has_spares=start is not None)
    seats = None
    with running(stop, on_progress, job.objective, MISSING_S) as incumbent:
        if problem:
            seats = seats_of(network, problem, constraints, start, job)
            solution = search_step(workload, problem.n_stages, incumbent, solver, seed, seats)
        elif not constraints.empty:
            raise BadInput("constraints: expected numbers of --stages and --pipelines with them, not auto")
        else:
            solution = search_shapes(workload, n_stages, n_pipelines, incumbent, solver, seed)
    plan = plan_of_step(workload, solution, incumbent, search.facts(job.objective, constraints))
    finalists = tuple(scored(workload, finalist) for finalist in solution.finalists)
    best = finalists[0]
    none_exists = math.isinf(plan.found["bound_s"]) and None not in (n_stages, n_pipelines)
    refuse_missing_links(network, best.cost.total_s + best.step_s, (plan.n_stages, plan.n_pipelines), none_exists)
    result = Result(
        plan=plan,
        network=network,
        objective=job.objective,
        score_s=best.step_s,
        cost=best.cost,
        step_s=best.step_s,
        bound_s=plan.found["bound_s"],
        gap=plan.found["gap"],
        proved=False,
        statistics=statistics_of(incumbent, stop, solver, seed),
        history=tuple(incumbent.history),
        by_solver={name: tuple(history) for name, history in incumbent.by_solver.items()},
        finalists=finalists,
        price=best.price,
    )
    near = kept(workload, seats.before, seats.near) if seats and seats.before else None
    return with_moves(result, seats, math.inf if near is None else near.step_s)


def workload_of(job: Job, network: Network) -> StepWorkload:
    """The step of a job on a network; BadInput for a kind of device without seconds."""
    assert job.profile is not None and isinstance(job.work, RunConfig)  # a job by step time has both
    for device in network.devices:
        job.profile.kind(device.kind)
    return StepWorkload.of_run(network, job.profile, job.work, job.price_rules)


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
    return (problem_with_spares if has_spares else problem_of)(workload.network, n_stages, n_pipelines, *sizes)


def scored(workload: StepWorkload, finalist: Finalist) -> ScoredStep:
    """A finalist beside its cost by Eq. 1-4, with the sizes of its own layers and shares."""
    layout = finalist.layout
    sizes = workload.comm_bytes(layout.stages, layout.shares)
    cost = cost_of(workload.network, layout.placement.tolist(), *sizes)
    price = price_of(workload, layout, finalist.step_s) if has_prices(workload.network) else None
    return ScoredStep(finalist.name, finalist.step_s, cost, price)


def plan_of_step(workload: StepWorkload, solution: StepSolution, incumbent: Incumbent, facts: dict) -> Plan:
    """The best finalist's plan. The bound of Eq. 1-4 holds for it only if it uses the devices that were searched, and
    shrinks with its sizes."""
    best = solution.finalists[0]
    layout = best.layout
    by_cost = solution.by_cost or unsearched(workload, layout)
    sizes = workload.comm_bytes(layout.stages, layout.shares)
    same_devices = sorted(layout.placement.ravel()) == sorted(by_cost.devices)
    factor = 0.0
    if same_devices and layout.shape == by_cost.solution.placement.shape:
        searched = by_cost.sizes
        factor = min(1.0, sizes.c_dp_bytes / searched.c_dp_bytes, sizes.c_pp_bytes / searched.c_pp_bytes)
    emitted = replace(
        by_cost.solution,
        placement=layout.placement,
        bound_s=by_cost.solution.bound_s * factor if factor else 0.0,
        proved=False,
        evaluations=incumbent.evaluations,
        time_s=incumbent.elapsed_s,
    )
    with_all_s = step_s_with_all(solution, workload.network.n_devices)
    facts = {
        **facts,
        "step_s": best.step_s,
        "profile": workload.profile.source,
        "left_out_why": reasons(workload, layout),
        "step_s_with_all": with_all_s if len(layout.spare) else None,
        "simple_step_s": solution.simple and solution.simple.step_s,
        "not_tried": solution.not_tried,
    }
    if has_prices(workload.network):
        facts["price"] = asdict(price_of(workload, layout, best.step_s))
    if workload.price_rules.budget_per_hour is not None:
        facts["budget_per_hour"] = workload.price_rules.budget_per_hour
    comm = CommWorkload(
        n_layers=workload.n_layers,
        stages=layout.stages,
        c_dp_bytes=sizes.c_dp_bytes,
        c_pp_bytes=sizes.c_pp_bytes,
        shares=layout.shares,
        model=workload.profile.model,
        dtype=workload.profile.dtype,
        exchanges_per_step=sizes.exchanges_per_step,
    )
    plan = plan_of(workload.network, comm, emitted, facts)
    step_plan = plan_of_layout(workload, layout)
    return replace(plan, schedule=step_plan.schedule, in_flight=step_plan.in_flight, codec=step_plan.codec)
