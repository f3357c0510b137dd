"""`planner.solve`."""

from jaxdt.run.network import Network
from planner.api.job import COMM_COST, Job
from planner.api.result import OnProgress, Result, Stop
from planner.model.constraints import Constraints
from planner.model.shape import check_n_devices
from planner.search.base import check_solver


def solve(
    network: Network,
    job: Job,
    stop: Stop | None = None,
    seed: int = 0,
    solver: str = "auto",
    on_progress: OnProgress | None = None,
    constraints: Constraints | None = None,
) -> Result:
    """The best plan that was found for a job on a network, and its gap to a proven bound.

    network      devices, one-way latencies [s] and bandwidths [1e9 bit/s] of directed links; 0 is a missing link
    job          the step to plan, its shape, and by its profile what is minimised: the communication cost of Eq. 1-4
                 (DT-FM, arXiv 2206.01288, Sec. 3) or the simulated seconds of a step
    stop         when the search ends; None: after 30 s
    seed         equal seeds give equal plans where the stop counts evaluations alone
    solver       a name of planner.search.base.SOLVERS
    on_progress  called with a Progress about ten times a second, from a thread of its own
    constraints  which device may sit where; solvers other than auto do not honour them, and are refused with them

    Raises BadInput, one line, for a job that the network cannot do, for constraints that contradict each other, and
    where no plan was found; BoundError, a defect of the planner, for a bound above the cost of a plan that exists. It
    prints nothing, keeps no state, and may run in any thread, and in several at a time. Its own threads end before it
    returns, but for an enumeration of at most 16 devices, or the compilation of another one, that was interrupted: that
    one ends by itself."""
    check_solver("solver", solver)
    if job.objective == COMM_COST and job.n_stages and job.n_pipelines:
        check_n_devices(network, job.n_stages, job.n_pipelines)
    from planner.api.search_run import Search, running, with_memory

    search = Search(stop or Stop(), solver, seed)
    constraints = constraints or Constraints()
    if job.unequal:
        from planner.api.unequal import solve_unequal

        return with_memory(solve_unequal(network, job, search, constraints, on_progress), job)
    if job.objective != COMM_COST:
        from planner.api.by_step import solve_by_step

        return with_memory(solve_by_step(network, job, search, constraints, on_progress), job)
    from planner.api import by_cost
    from planner.search.constrained import solve_constrained
    from planner.search.solve import solve as solve_problem

    cost_job = by_cost.cost_job(network, job)
    problem = cost_job.problem
    with running(search.stop, on_progress) as incumbent:
        if constraints.empty:
            solution = solve_problem(problem, incumbent, solver, seed)
        else:
            solution = solve_constrained(problem, network, constraints, incumbent, solver, seed)
    return with_memory(by_cost.cost_result(cost_job, solution, search, constraints, incumbent), job)
