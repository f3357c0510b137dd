"""`python -m planner solve --objective comm_cost`: sizes from the flags, the search, the reference cost, the report."""

import math
from argparse import Namespace
from dataclasses import dataclass, replace

from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.profile import RECOMPUTE, from_flops
from planner.commands.common import (
    DEFAULT_DTYPE,
    DEFAULT_REMAT,
    budget_of,
    read_network,
    refuse_missing_links,
    watching,
    write,
)
from planner.model import comm_workload
from planner.model.comm_workload import CommWorkload
from planner.model.problem import problem_of
from planner.model.result import Solution
from planner.report.plan_file import cost_plan, plan_of
from planner.report.tables import ProgressLine, cost_table
from planner.search import layouts
from planner.search.incumbent import Incumbent
from planner.search.solve import solve
from planner.step_time.tune import shallow_depths
from planner.step_time.workload import StepWorkload, refuse_memory, refuse_too_small

DEFAULT_LAYERS = 24
MICROBATCHES_PER_PIPELINE = 8
STATES_PER_GRADIENT = 4


def run(flags: Namespace) -> int:
    """Exit code 0, or BadInput."""
    network = read_network(flags)
    workload = workload_of(flags)
    problem = problem_of(network, flags.stages, flags.pipelines, workload.c_dp_bytes, workload.c_pp_bytes)
    memory = memory_workload(flags, network, workload)
    if workload.model is None:
        refuse_small_devices(network, workload)
    incumbent = Incumbent(budget_of(flags))
    with watching(incumbent, ProgressLine()):
        solution = solve(problem, incumbent, flags.solver, flags.seed)
    refuse_missing_links(network, solution.cost_s, solution.placement.shape, math.isinf(solution.bound_s))
    in_flight = None
    if memory is not None:
        fitted = fit_memory(memory, workload, solution)
        solution = fitted.solution
        workload = fitted.workload
        in_flight = fitted.in_flight
    facts = {"objective": "comm_cost", "solver": flags.solver, "seed": flags.seed}
    plan = replace(plan_of(network, flags.network, workload, solution, facts), in_flight=in_flight)
    costed = cost_plan(plan, network, workload.c_dp_bytes, workload.c_pp_bytes)
    print(cost_table(costed, layouts.block(problem).tolist(), layouts.mean_random(problem, flags.seed)))
    write(plan, flags.out)
    return 0


def workload_of(flags: Namespace) -> CommWorkload:
    """The byte counts of the flags, or of their model."""
    has_bytes = flags.c_dp_bytes is not None, flags.c_pp_bytes is not None
    if any(has_bytes) and flags.model:
        raise BadInput("--model: got a model and byte counts, expected one of them")
    if flags.model:
        return comm_workload.from_model(
            flags.stages,
            flags.pipelines,
            comm_workload.model_of(flags.model, flags.sequence),
            flags.global_batch,
            flags.dtype or DEFAULT_DTYPE,
            flags.microbatch_size or 1,
        )
    if not all(has_bytes):
        raise BadInput("sizes: expected --c_dp_bytes and --c_pp_bytes, or --model")
    n_layers = flags.layers or max(DEFAULT_LAYERS, flags.stages)
    n_microbatches = flags.microbatches or MICROBATCHES_PER_PIPELINE * flags.pipelines
    shares = comm_workload.microbatch_shares(n_microbatches, flags.pipelines)
    return comm_workload.from_bytes(flags.stages, shares, flags.c_dp_bytes, flags.c_pp_bytes, n_layers)


def memory_workload(flags: Namespace, network: Network, workload: CommWorkload) -> StepWorkload | None:
    """What devices can hold, where the model is known and some device's memory is limited. Its speeds mean nothing."""
    if workload.model is None or all(device.memory_bytes is None for device in network.devices):
        return None
    dtype = flags.dtype or DEFAULT_DTYPE
    remat = flags.remat or DEFAULT_REMAT
    comm_workload.check_choice("remat", remat, tuple(RECOMPUTE))
    flops = {device.kind: 1e12 for device in network.devices}
    profile = from_flops(workload.model, flags.microbatch_size or 1, flops, 1.0, dtype=dtype, remat=remat)
    memory = StepWorkload(network, profile, sum(workload.shares))
    refuse_too_small(memory, len(workload.stages))
    return memory


def refuse_small_devices(network: Network, workload: CommWorkload):
    """Raise BadInput for a device that cannot hold a stage's parameters, gradients and two moments, which are four
    times c_dp. With byte counts alone the layers cannot be cut to fit, and every device holds a stage."""
    need = STATES_PER_GRADIENT * workload.c_dp_bytes
    for d, device in enumerate(network.devices):
        if device.memory_bytes is not None and device.memory_bytes < need:
            raise BadInput(
                f"{network.name}: devices[{d}].memory_bytes: {device.name} has {device.memory_bytes / 1e9:g} "
                f"GB, its stage needs {need / 1e9:g} GB, four times c_dp: parameters, gradients, two moments"
            )


@dataclass(frozen=True)
class FittedSolution:
    """A solution whose stages fit their devices' memory, with their layers and the forwards in flight per stage."""

    solution: Solution
    workload: CommWorkload
    in_flight: tuple[int, ...]


def fit_memory(memory: StepWorkload, workload: CommWorkload, solution: Solution) -> FittedSolution:
    """Cut the layers for the memory of every stage's smallest device, with the stages in this order or reversed (which
    costs the same), and with fewer forwards in flight if need be. A smaller c_dp lowers every cost by at most its own
    factor, and so the bound."""
    n_stages = len(solution.placement)
    usual = tuple(n_stages - s for s in range(n_stages))
    for depth in (usual, *shallow_depths(n_stages, workload.shares[0])):
        for placement in (solution.placement, solution.placement[::-1]):
            stages = memory.split(placement, depth)
            if stages is not None:
                recut = comm_workload.recut(workload, stages)
                factor = min(1.0, recut.c_dp_bytes / workload.c_dp_bytes)
                proved = solution.proved and recut.c_dp_bytes == workload.c_dp_bytes
                fitted = replace(solution, placement=placement, bound_s=solution.bound_s * factor, proved=proved)
                return FittedSolution(fitted, recut, depth)
    return refuse_memory(memory, n_stages)
