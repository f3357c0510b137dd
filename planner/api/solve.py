"""`planner.solve`."""

from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from planner.api.job import COMM_COST, Job, Start
from planner.model.constraints import Constraints
from planner.model.shape import check_n_devices
from planner.model.stop import Stop
from planner.report.result import OnProgress, Result
from planner.search.base import check_solver


def solve(
    network: Network,
    job: Job,
    stop: Stop | None = None,
    seed: int = 0,
    solver: str = "auto",
    on_progress: OnProgress | None = None,
    constraints: Constraints | None = None,
    *,
    start: Start | None = None,
) -> Result:
    """The best plan that was found for a job on a network, and its gap to a proven bound.

    network      devices, one-way latencies [s] and bandwidths [1e9 bit/s] of directed links; 0 is a missing link
    job          the step to plan, its shape, and by its profile what is minimised: the communication cost of Eq. 1-4
                 (DT-FM, arXiv 2206.01288, Sec. 3), the simulated seconds of a step, or those of a pool's step
    stop         when the search ends; None: after 30 s, or for a pool, whose search knows no stop, when it has ended
    seed         equal seeds give equal plans where the stop counts evaluations alone, and for a pool
    solver       a name of planner.search.base.SOLVERS
    on_progress  called with a Progress about ten times a second, from a thread of its own
    constraints  which device may sit where; solvers other than auto do not honour them, and are refused with them
    start        a plan that runs: what its devices fetch for another plan is charged, devices may be left out, and the
                 result has the moves. The job has its number of stages; for auto alone

    Raises BadInput, one line, for a job that the network cannot do, for constraints that contradict each other, and
    where no plan was found; BoundError, a defect of the planner, for a bound above the cost of a plan that exists. It
    prints nothing, keeps no state, and may run in any thread, and in several at a time. Its own threads end before it
    returns, but for an enumeration of at most 16 devices, or the compilation of another one, that was interrupted: that
    one ends by itself."""
    if job.pool is not None:
        for name, given in (
            ("stop", stop),
            ("on_progress", on_progress),
            ("constraints", constraints),
            ("start", start),
        ):
            if given is not None:
                raise BadInput(f"{name}: got one for the job of a pool, whose search knows none")
        from planner.api.by_pool import solve_by_pool

        return solve_by_pool(network, job, seed, solver)
    check_solver("solver", solver)
    if start is not None:
        check_start(start, job)
    elif job.objective == COMM_COST and job.n_stages and job.n_pipelines:
        check_n_devices(network, job.n_stages, job.n_pipelines)
    from planner.api.search_run import Search

    constraints = constraints or Constraints()
    search = Search(network, job, stop or Stop(), seed, solver, on_progress, constraints, start)
    if job.objective == COMM_COST:
        from planner.api.by_cost import solve_by_cost

        return solve_by_cost(search)
    from planner.api.by_step import solve_by_step, solve_unequal

    return solve_unequal(search) if job.unequal else solve_by_step(search)


def check_start(start: Start, job: Job) -> None:
    """BadInput for a job that does not go on from a plan that runs."""
    if job.unequal or not job.price_rules.empty:
        raise BadInput("start: got unequal replicas or prices, which a search near a plan that runs does not know")
    if job.n_stages != start.plan.n_stages or not job.n_pipelines:
        got = f"{job.n_stages or 'auto'} and {job.n_pipelines or 'auto'}"
        raise BadInput(
            f"--stages, --pipelines: got {got}, expected the {start.plan.n_stages} stages of the plan that runs, and a "
            "number of pipelines"
        )
    if not 0 < start.horizon_steps < float("inf"):
        raise BadInput(f"--horizon_steps: got {start.horizon_steps}, expected a positive number")
