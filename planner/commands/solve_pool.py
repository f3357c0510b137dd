"""`python -m planner solve --solver cluster`: a job from the flags, `planner.solve_pool`, the text of `explain`, the
file."""

from argparse import Namespace

from jaxdt.run import network as networks
from jaxdt.run.errors import BadInput
from planner.api.job import STEP_TIME
from planner.commands.common import write
from planner.commands.flags_job import job_of
from planner.model.pool import PoolOptions

FLAGS = ("eq3", "stop", "minibatches")  # of this solver alone
OF_OTHERS = ("export", "pipelines", "objective", "time_limit_s", "evaluations", "constraints", "budget_per_hour")
AUTO = "auto"


def run(flags: Namespace) -> int:
    """Exit code 0, or BadInput."""
    for name in OF_OTHERS:
        if getattr(flags, name) is not None:
            raise BadInput(f"--{name}: got {getattr(flags, name)} with --solver {flags.solver}, expected none")
    if flags.replicas != "equal":
        raise BadInput(f"--replicas: got {flags.replicas} with --solver {flags.solver}, expected none")
    network = networks.load(flags.network).at_percentile(flags.percentile)
    flags.stages, flags.pipelines, flags.objective = flags.stages or AUTO, AUTO, STEP_TIME
    job = job_of(flags, network)
    given = {"eq3": flags.eq3, "stop": flags.stop, "n_minibatches": flags.minibatches}
    options = PoolOptions(**{name: value for name, value in given.items() if value is not None})
    from planner.api.pool import solve_pool  # with its solver's libraries, which a refusal has not loaded
    from planner.report import pool_explain
    from planner.report.pool_plan import costed_pool

    result = solve_pool(network, job, options, flags.seed, flags.solver)
    print(pool_explain.text(costed_pool(result.plan, network)))
    facts = {} if flags.percentile is None else {"percentile": flags.percentile}
    write(result.plan, flags.out, flags.network, **facts)
    return 0
