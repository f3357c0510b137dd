"""`python -m planner solve --objective comm_cost`: the sizes from the flags, the search, re-cost, report, write."""

from argparse import Namespace
from dataclasses import replace

from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from jaxdt.spec.profile import RECOMPUTE, from_flops
from planner.commands.searching import DTYPE, REMAT, limits_of, refuse_missing, search, write
from planner.cost.reference import cost_of
from planner.model import sizes
from planner.model.plan_io import Planned, plan_of
from planner.model.problem import problem_of
from planner.report.text import Progress, table
from planner.search import layouts
from planner.search.incumbent import Board
from planner.search.portfolio import Solution, solve
from planner.step_time.tune import shallow
from planner.step_time.workload import Job, refuse_memory, refuse_too_small

DEFAULT_LAYERS = 24
STATES_PER_GRADIENT = 4


def workload_of(flags: Namespace) -> sizes.Workload:
    given = flags.c_dp_bytes is not None, flags.c_pp_bytes is not None
    if any(given) and flags.model:
        raise BadInput("--model: got a model and byte counts, expected one of them")
    if flags.model:
        model = sizes.model_of(flags.model, flags.sequence)
        dtype, microbatch_size = flags.dtype or DTYPE, flags.microbatch_size or 1
        return sizes.from_model(flags.stages, flags.pipelines, model, flags.global_batch, dtype, microbatch_size)
    if not all(given):
        raise BadInput("sizes: expected --c_dp_bytes and --c_pp_bytes, or --model")
    n_layers = flags.layers or max(DEFAULT_LAYERS, flags.stages)
    shares = sizes.microbatch_shares(flags.microbatches or 8 * flags.pipelines, flags.pipelines)
    return sizes.from_bytes(flags.stages, shares, flags.c_dp_bytes, flags.c_pp_bytes, n_layers)


def memory_job(flags: Namespace, network: Network, workload: sizes.Workload) -> Job | None:
    """What devices can hold, where the model is known and somebody's memory is limited; speeds do not matter here."""
    if workload.model is None or all(device.memory_bytes is None for device in network.devices):
        return None
    remat = flags.remat or REMAT
    sizes.check_choice("remat", remat, tuple(RECOMPUTE))
    flops = {device.kind: 1e12 for device in network.devices}
    how = dict(dtype=flags.dtype or DTYPE, remat=remat)
    profile = from_flops(workload.model, flags.microbatch_size or 1, flops, 1.0, **how)
    job = Job(network, profile, sum(workload.shares))
    refuse_too_small(job, len(workload.stages))
    return job


def refuse_small_devices(network: Network, workload: sizes.Workload):
    """With byte counts alone the layers cannot be cut to fit, and every device holds a stage: parameters, gradients and
    two moments are four times c_dp."""
    need = STATES_PER_GRADIENT * workload.c_dp_bytes
    for d, device in enumerate(network.devices):
        if device.memory_bytes is not None and device.memory_bytes < need:
            raise BadInput(
                f"{network.name}: devices[{d}].memory_bytes: {device.name} has {device.memory_bytes / 1e9:g} "
                f"GB, its stage needs {need / 1e9:g} GB, four times c_dp: parameters, gradients, two moments"
            )


def cut_for_memory(
    job: Job, workload: sizes.Workload, solution: Solution
) -> tuple[Solution, sizes.Workload, tuple[int, ...]]:
    """Cut the layers for the memory of every stage's smallest device, with the stages in this order or reversed (which
    costs the same), and with fewer forwards in flight if need be; these come third. A smaller c_dp lowers every cost by
    at most its own factor, and so the bound."""
    n_stages, share = len(solution.placement), workload.shares[0]
    usual = tuple(n_stages - s for s in range(n_stages))
    for depth in (usual, *shallow(n_stages, share)):
        for placement in (solution.placement, solution.placement[::-1]):
            stages = job.split(placement, depth)
            if stages is not None:
                recut = sizes.recut(workload, stages)
                kept = min(1.0, recut.c_dp_bytes / workload.c_dp_bytes)
                proved = solution.proved and recut.c_dp_bytes == workload.c_dp_bytes
                found = replace(solution, placement=placement, bound_s=solution.bound_s * kept, proved=proved)
                return found, recut, depth
    return refuse_memory(job, n_stages)


def run(flags: Namespace, network: Network) -> int:
    """Exit code 0, or BadInput."""
    workload = workload_of(flags)
    problem = problem_of(network, flags.stages, flags.pipelines, workload.c_dp_bytes, workload.c_pp_bytes)
    job = memory_job(flags, network, workload)
    if workload.model is None:
        refuse_small_devices(network, workload)
    board = Board(limits_of(flags.time_limit_s, flags.evaluations))
    solution = search(lambda: solve(problem, board, flags.solver, flags.seed), board, Progress())
    depth = None
    if job is not None:
        solution, workload, depth = cut_for_memory(job, workload, solution)
    how = {"objective": "comm_cost", "solver": flags.solver, "seed": flags.seed}
    plan = replace(plan_of(network, flags.network, workload, solution, how), in_flight=depth)
    refuse_missing(network, plan)
    block, random_s = layouts.block(problem).tolist(), layouts.mean_random(problem, flags.seed)
    print(table(_planned(network, workload, plan), block, random_s))
    write(plan, flags.out)
    return 0


def _planned(network: Network, workload: sizes.Workload, plan: Plan) -> Planned:
    byte_counts = workload.c_dp_bytes, workload.c_pp_bytes
    return Planned(plan, network, *byte_counts, cost_of(network, plan.placement, *byte_counts))
