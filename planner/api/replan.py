"""`planner.replan`: a plan for a network that has changed, near the plan that runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from planner.api.job import HORIZON_STEPS, ByteSizes, Job, Start
from planner.api.solve import solve
from planner.model.change import Change, changed
from planner.model.constraints import Constraints
from planner.model.stop import Stop
from planner.report.pool_plan import check_network
from planner.report.result import Mended, Result

if TYPE_CHECKING:
    from planner.model.moves import Move

DEFAULT_TIME_S = 1.75  # of the search; reading, matching and (by step time) one simulation come to it


@dataclass(frozen=True, eq=False)
class Replan:
    """A plan for the changed network, and how a run gets there.

    result        the plan, as `solve` gives it; plan.found["replan"] holds the numbers below
    score_s       what was minimised: result.score_s + move_s / horizon_steps
    moves         what each device fetches before it goes on, the longest first (planner.model.moves.Move)
    moved_bytes   of all of them
    move_s        seconds until the last one is done; links are taken as independent
    mended        the old plan with its gaps filled and nothing else changed, for comparison
    """

    result: Result
    score_s: float
    moves: tuple[Move, ...]
    moved_bytes: float
    move_s: float
    horizon_steps: float
    mended: Mended


def replan(
    plan: Plan,
    network: Network,
    change: Change,
    job: Job | None = None,
    stop: Stop | None = None,
    horizon_steps: float = HORIZON_STEPS,
    constraints: Constraints | None = None,
) -> Replan:
    """A plan for a network from which devices left or to which some came, found from the plan that runs.

    plan           runs on `network`, the network before the change
    job            the step, as for `solve`, with the shape that is wanted; None (for a plan by communication cost):
                   the plan's own sizes. A shape of None keeps the plan's stages and takes as many pipelines as there
                   are devices for; devices beyond that are left out
    stop           None: after 1.75 s
    horizon_steps  steps over which the seconds of moving have to pay off: the search minimises seconds of a step (or
                   of communication, for a job without a profile) + seconds of moving / horizon_steps
    constraints    as for `solve`; those about devices that left are dropped

    Raises BadInput as `solve` does. Prints nothing; safe in a thread."""
    check_network(plan, network)
    if plan.roles:
        raise BadInput(f"plan.roles: got {', '.join(plan.roles.used)}, which `replan` does not know, expected none")
    if job is not None and (job.pool is not None or not job.price_rules.empty):
        got = "prices" if job.pool is None else "the job of a pool"
        raise BadInput(f"--objective: got {got}, which `replan` does not know, expected step_time")
    after = changed(network, change)
    job = _shaped(job or _job_of(plan), plan, after)
    gone = set(plan.devices) - {device.name for device in after.devices}
    constraints = (constraints or Constraints()).without(sorted(gone))
    start = Start(plan, horizon_steps)
    result = solve(after, job, stop or Stop(time_s=DEFAULT_TIME_S), constraints=constraints, start=start)
    facts = result.plan.found["replan"]
    assert result.mended is not None  # a plan runs
    return Replan(
        result, facts["score_s"], result.moves, facts["moved_bytes"], facts["move_s"], horizon_steps, result.mended
    )


def _job_of(plan: Plan) -> Job:
    """The job of a plan by communication cost, in the plan's own sizes."""
    if "step_s" in plan.found or "c_dp_bytes" not in plan.found:
        raise BadInput("plan: was not made by communication cost, expected the job too: a model or config, and speeds")
    work = ByteSizes(plan.found["c_dp_bytes"], plan.found["c_pp_bytes"], plan.n_layers, plan.n_microbatches)
    return Job(work, plan.n_stages, plan.n_pipelines)


def _shaped(job: Job, plan: Plan, network: Network) -> Job:
    """The job with the plan's number of stages and as many pipelines as there are devices (and microbatches) for."""
    n_stages = plan.n_stages
    n_microbatches = job.work.plan.microbatches if isinstance(job.work, RunConfig) else job.work.n_microbatches
    n_pipelines = min(network.n_devices // n_stages, n_microbatches or plan.n_microbatches)
    if n_pipelines < 1:
        raise BadInput(
            f"--without: {network.n_devices} devices are left for {n_stages} stages, expected at least one for each; "
            f"`solve` makes a plan of fewer stages"
        )
    return Job(job.work, n_stages, n_pipelines, job.profile)
