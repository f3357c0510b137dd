"""A job by step time whose stages may have unequal numbers of replicas, under `swarm` wiring."""

import math
from dataclasses import replace

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.api.by_cost import refuse_missing_links
from planner.api.by_step import workload_of
from planner.api.job import STEP_TIME, Job
from planner.api.result import OnProgress, Result, ScoredStep
from planner.api.search_run import Search, running, statistics_of
from planner.cost.reference import cost_of
from planner.model.constraints import Constraints
from planner.report.plan_file import exchanges_found, problem_digest
from planner.search.incumbent import Incumbent
from planner.step_time.unequal import StageSets, plan_of_sets, search_sets
from planner.step_time.workload import MISSING_S, CommBytes, StepWorkload

N_FINALISTS = 5


def solve_unequal(
    network: Network, job: Job, search: Search, constraints: Constraints, on_progress: OnProgress | None
) -> Result:
    """See planner.api.solve."""
    workload = workload_of(job, network)
    if not constraints.empty:
        raise BadInput("constraints: expected none with --replicas unequal")
    with running(search.stop, on_progress, STEP_TIME, MISSING_S) as incumbent:
        found = search_sets(workload, job.n_stages, incumbent, search.seed)
    finalists = tuple(scored(workload, sets) for sets in found[:N_FINALISTS])
    best = finalists[0]
    plan = _plan(workload, found[0], best, incumbent, search)
    refuse_missing_links(network, best.step_s, (plan.n_stages, max(plan.n_replicas)), none_exists=False)
    return Result(
        plan=plan,
        network=network,
        objective=STEP_TIME,
        score_s=best.step_s,
        cost=best.cost,
        step_s=best.step_s,
        bound_s=0.0,
        gap=None,
        proved=False,
        statistics=statistics_of(incumbent, search.stop, search.solver, search.seed),
        history=tuple(incumbent.history),
        by_solver={name: tuple(history) for name, history in incumbent.by_solver.items()},
        finalists=finalists,
    )


def scored(workload: StepWorkload, sets: StageSets) -> ScoredStep:
    """Simulated sets beside their cost by Eq. 1-4 for unequal numbers (docs/planner.md)."""
    sizes = comm_bytes(workload, sets)
    cost = cost_of(workload.network, sets.rows, *sizes)
    return ScoredStep(f"{'+'.join(str(len(row)) for row in sets.rows)} replicas", sets.step_s, cost)


def comm_bytes(workload: StepWorkload, sets: StageSets) -> CommBytes:
    """The sizes of Eq. 1-4: gradients of the largest stage, and what one device of the stage with most replicas sends
    over a boundary."""
    share = math.ceil(workload.n_microbatches / max(map(len, sets.rows)))
    return workload.comm_bytes(sets.stages, (share,))


def _plan(workload: StepWorkload, sets: StageSets, best: ScoredStep, incumbent: Incumbent, search: Search) -> Plan:
    """The plan of the best sets, with the same facts as any plan by step time. Nothing is known of a bound."""
    network = workload.network
    sizes = comm_bytes(workload, sets)
    used = {d for row in sets.rows for d in row}
    left_out = [device.name for d, device in enumerate(network.devices) if d not in used]
    cost = best.cost
    found = {
        "network": network.name,
        "left_out": left_out,
        "c_dp_bytes": sizes.c_dp_bytes,
        "c_pp_bytes": sizes.c_pp_bytes,
        **exchanges_found(sizes.exchanges_per_step),
        "problem_digest": problem_digest(network, *sizes),
        "cost": {"total_s": cost.total_s, "datap_s": cost.datap_s, "pipelinep_s": cost.pipelinep_s},
        "bound_s": 0.0,
        "gap": None,
        "proved": False,
        **search.facts(STEP_TIME, Constraints()),
        "step_s": sets.step_s,
        "profile": workload.profile.source,
        "left_out_why": [f"{name}: the step found without it is shorter" for name in left_out],
        "step_s_with_all": None,
        "evaluations": incumbent.evaluations,
        "time_s": round(incumbent.elapsed_s, 3),
    }
    return replace(plan_of_sets(workload, sets), found=found)
