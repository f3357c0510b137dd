"""`python -m planner solve`: a job from the flags, `planner.solve`, tables, the files."""

from argparse import Namespace
from pathlib import Path

from jaxdt.run import network as networks
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from planner.api.job import COMM_COST
from planner.api.solve import solve
from planner.commands import solve_pool
from planner.commands.common import check_out, interruptible, write
from planner.commands.flags_job import job_of
from planner.model.constraints import load_constraints
from planner.model.stop import Stop
from planner.report.export import ENDINGS, exported
from planner.report.plan_file import cost_plan, sizes_of, write_text
from planner.report.result import Result
from planner.report.tables import ProgressLine, cost_table, step_table
from planner.search.base import POOL_SOLVERS


def run(flags: Namespace) -> int:
    """Exit code 0, or BadInput."""
    check_out(flags.out)
    if flags.solver in POOL_SOLVERS:
        return solve_pool.run(flags)
    for name in solve_pool.FLAGS:
        if getattr(flags, name) is not None:
            raise BadInput(
                f"--{name}: got {getattr(flags, name)} with --solver {flags.solver}, expected --solver cluster"
            )
    if flags.export and flags.replicas != "equal":
        raise BadInput(f"--export: got {flags.export} with --replicas {flags.replicas}, expected equal ones")
    stop = Stop(flags.time_limit_s, flags.evaluations)
    network = networks.load(flags.network).at_percentile(flags.percentile)
    job = job_of(flags, network)
    constraints = load_constraints(flags.constraints) if flags.constraints else None
    line = ProgressLine()
    with interruptible(stop):
        result = solve(network, job, stop, flags.seed, flags.solver, line.show, constraints)
    line.close()
    print(table(result))
    facts: dict[str, str | int] = {}
    if flags.profile and not result.plan.found.get("profile"):
        facts["profile"] = flags.profile
    if flags.percentile is not None:
        facts["percentile"] = flags.percentile
    write(result.plan, flags.out, flags.network, **facts)
    if flags.export:
        _export(result, job.work if isinstance(job.work, RunConfig) else None, flags)
    return 0


def _export(result: Result, run: RunConfig | None, flags: Namespace):
    """Write the settings of another trainer beside the plan, or print them where no plan is written."""
    text = exported(result.plan, run, flags.export)
    if not flags.out:
        print(text, end="")
        return
    out = Path(flags.out)
    path = out.with_name(out.stem + ENDINGS[flags.export])
    write_text(path, text, "export")
    print(f"wrote {path}")


def table(result: Result) -> str:
    """The plan's costs beside those of layouts without thought, or beside other simulated layouts."""
    if result.objective != COMM_COST:
        return step_table(result.plan, result.finalists, result.statistics.time_s)
    from planner.model.problem import problem_of  # numpy, which a refusal has not loaded
    from planner.search import layouts

    plan = result.plan
    costed = cost_plan(plan, result.network, sizes_of(plan))
    problem = problem_of(result.network, plan.n_stages, plan.n_pipelines, *costed.sizes)
    return cost_table(costed, layouts.block(problem).tolist(), layouts.mean_random(problem, result.statistics.seed))
