"""`python -m planner solve`: a job from the flags, `planner.solve`, tables, the files."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from jaxdt.run import network as networks
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, require_writable
from planner.api.job import COMM_COST, STEP_TIME
from planner.api.solve import solve
from planner.commands.common import interruptible, write
from planner.commands.flags_job import job_of
from planner.model.constraints import load_constraints
from planner.model.pool import PoolOptions
from planner.model.stop import Stop
from planner.report.export import ENDINGS, exported
from planner.report.plan_file import cost_plan, sizes_of, write_text
from planner.report.result import Result
from planner.report.tables import ProgressLine, cost_table, step_table
from planner.search.base import POOL_SOLVERS

OF_POOLS = ("eq3", "stop", "minibatches")  # flags of their solvers alone
OF_OTHERS = ("export", "pipelines", "objective", "time_limit_s", "evaluations", "constraints", "budget_per_hour")


def run(flags: Namespace) -> int:
    """Exit code 0, or BadInput."""
    require_writable("--out", flags.out)
    is_pool = flags.solver in POOL_SOLVERS
    _check_flags(flags, is_pool)
    stop = Stop(flags.time_limit_s, flags.evaluations)
    network = networks.load(flags.network).at_percentile(flags.percentile)
    if is_pool:
        flags.stages, flags.pipelines, flags.objective = flags.stages or "auto", "auto", STEP_TIME
        given = {"eq3": flags.eq3, "stop": flags.stop, "n_minibatches": flags.minibatches}
        options = PoolOptions(**{name: value for name, value in given.items() if value is not None})
        job = replace(job_of(flags, network), pool=options)
        result = solve(network, job, seed=flags.seed, solver=flags.solver)
    else:
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


def _check_flags(flags: Namespace, is_pool: bool):
    """BadInput for flags that this solver does not read."""
    with_solver = f"with --solver {flags.solver}"
    for name in OF_OTHERS if is_pool else OF_POOLS:
        if getattr(flags, name) is not None:
            expected = "none" if is_pool else f"--solver {next(iter(POOL_SOLVERS))}"
            raise BadInput(f"--{name}: got {getattr(flags, name)} {with_solver}, expected {expected}")
    if is_pool and flags.replicas != "equal":
        raise BadInput(f"--replicas: got {flags.replicas} {with_solver}, expected none")
    if flags.export and flags.replicas != "equal":
        raise BadInput(f"--export: got {flags.export} with --replicas {flags.replicas}, expected equal ones")


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
    """The plan's costs beside those of layouts without thought, or beside other simulated layouts; of a pool, what
    `explain` says."""
    if result.levels:
        from planner.report.explain import explain

        return str(explain(result.plan, result.network))
    if result.objective != COMM_COST:
        return step_table(result.plan, result.finalists, result.statistics.time_s)
    from planner.model.problem import problem_of  # numpy, which a refusal has not loaded
    from planner.search import layouts

    plan = result.plan
    costed = cost_plan(plan, result.network, sizes_of(plan))
    problem = problem_of(result.network, plan.n_stages, plan.n_pipelines, *costed.sizes)
    return cost_table(costed, layouts.block(problem).tolist(), layouts.mean_random(problem, result.statistics.seed))
