"""`planner.unchanged_s`."""

from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.api.job import Job
from planner.model.change import Change, changed


def unchanged_s(plan: Plan, network: Network, change: Change, job: Job | None = None) -> float | None:
    """The cost of the plan that runs after a change, if nothing is planned anew: seconds of a step for a job with a
    profile, else seconds of Eq. 1-4 with the plan's own sizes. Replicas that left leave their microbatches to the
    others of their stage, whichever is free, as under `swarm` wiring; devices that came do nothing. None if a stage has
    no replica and the run stands still; infinite over a missing link."""
    after = changed(network, change)
    index = {device.name: d for d, device in enumerate(after.devices)}
    names = [[plan.devices[d] for d in row] for row in plan.placement]
    rows = tuple(tuple(index[name] for name in row if name in index) for row in names)
    if not all(rows):
        return None
    if job is not None and job.profile is not None:
        return _step_s(plan, rows, after, job)
    from planner.cost.reference import cost_of
    from planner.report.plan_file import sizes_of

    largest = max(map(len, rows))
    sizes = sizes_of(plan)
    sizes = sizes._replace(c_pp_bytes=sizes.c_pp_bytes * len(plan.placement[0]) / largest)
    return cost_of(after, rows, *sizes).total_s


def _step_s(plan: Plan, rows: tuple[tuple[int, ...], ...], network: Network, job: Job) -> float:
    """Simulated seconds of a step: in the plan's pipelines if they are whole, else with any replica of a stage."""
    import numpy as np

    from planner.api.by_step import workload_of
    from planner.step_time import simulate, unequal
    from planner.step_time.tune import layout_of

    workload = workload_of(job, network)
    if not plan.is_even or any(len(row) < plan.n_pipelines for row in rows):
        return unequal.simulated_s(workload, unequal.StageSets(rows, plan.stages, 0.0))
    depth = tuple(plan.depth(s) for s in range(plan.n_stages))
    return simulate.simulated_s(workload, layout_of(workload, np.array(rows), plan.stages, plan.shares, depth))
