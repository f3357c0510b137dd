"""`python -m planner solve --objective step_time`: the step from the flags, the search, the report."""

import math
from argparse import Namespace
from dataclasses import replace

from jaxdt.spec import profile as profiles
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from jaxdt.spec.profile import RECOMPUTE, Profile, from_flops
from jaxdt.spec.sizes import DTYPE_BYTES
from planner.commands.common import (
    DEFAULT_DTYPE,
    DEFAULT_REMAT,
    budget_of,
    read_network,
    refuse_missing_links,
    watching,
    write,
)
from planner.cost.reference import cost_of
from planner.model import comm_workload
from planner.model.comm_workload import CommWorkload
from planner.model.problem import problem_of
from planner.report.plan_file import plan_of
from planner.report.tables import ProgressLine, StepRow, step_table
from planner.search.incumbent import Incumbent
from planner.step_time.search import Finalist, StepSolution, search_step
from planner.step_time.shapes import reasons, search_shapes, step_s_with_all
from planner.step_time.simulate import plan_of_layout
from planner.step_time.workload import MISSING_S, StepWorkload, refuse_too_small


def run(flags: Namespace) -> int:
    """Exit code 0, or BadInput."""
    network = read_network(flags)
    if flags.objective == "comm_cost":
        raise BadInput("--objective: got comm_cost with auto, expected step_time: Eq. 1-4 do not compare shapes")
    workload = workload_of(flags, network)
    n_stages, n_pipelines = (None if n in (None, "auto") else n for n in (flags.stages, flags.pipelines))
    incumbent = Incumbent(budget_of(flags), missing_s=MISSING_S)
    if n_stages and n_pipelines:
        check_shape(workload, n_stages, n_pipelines)
    with watching(incumbent, ProgressLine()):
        if n_stages and n_pipelines:
            solution = search_step(workload, n_stages, incumbent, flags.solver, flags.seed)
        else:
            solution = search_shapes(workload, n_stages, n_pipelines, incumbent, flags.solver, flags.seed)
    plan = plan_of_step(flags, workload, solution, incumbent)
    cost_s = plan.found["cost"]["total_s"] + plan.found["step_s"]
    shape = (plan.n_stages, plan.n_pipelines)
    none_exists = math.isinf(plan.found["bound_s"]) and None not in (n_stages, n_pipelines)
    refuse_missing_links(network, cost_s, shape, none_exists)
    print(step_table(plan, [step_row(workload, finalist) for finalist in solution.finalists], incumbent.elapsed_s))
    write(plan, flags.out)
    return 0


def workload_of(flags: Namespace, network: Network) -> StepWorkload:
    """The step that the flags describe; BadInput where they contradict each other."""
    if flags.c_dp_bytes is not None or flags.c_pp_bytes is not None:
        raise BadInput("--c_dp_bytes, --c_pp_bytes: step_time derives the sizes, expected --model or --profile instead")
    profile = profile_of(flags, network)
    n_microbatches = comm_workload.n_microbatches(flags.global_batch, profile.microbatch_size)
    for device in network.devices:
        profile.kind(device.kind)
    return StepWorkload(network, profile, n_microbatches, flags.codec, flags.schedule)


def profile_of(flags: Namespace, network: Network) -> Profile:
    if flags.profile and flags.flops:
        raise BadInput("--flops: got a profile and FLOP/s, expected one of them")
    if flags.profile:
        return _check_profile(flags, profiles.load(flags.profile))
    if not flags.model:
        raise BadInput("--model: missing, step_time needs it to know what a stage computes and holds")
    if not flags.flops:
        raise BadInput("--profile: missing, step_time needs it or --flops to know how fast devices are")
    dtype = flags.dtype or DEFAULT_DTYPE
    remat = flags.remat or DEFAULT_REMAT
    comm_workload.check_choice("dtype", dtype, tuple(DTYPE_BYTES))
    comm_workload.check_choice("remat", remat, tuple(RECOMPUTE))
    model = comm_workload.model_of(flags.model, flags.sequence)
    speeds = _speeds(flags.flops, network)
    return from_flops(model, flags.microbatch_size or 1, speeds, flags.efficiency, dtype=dtype, remat=remat)


def _check_profile(flags: Namespace, profile: Profile) -> Profile:
    """The profile, or BadInput where flags differ from the settings with which it was measured."""
    if flags.model and comm_workload.model_of(flags.model, flags.sequence) != profile.model:
        raise BadInput(f"--model: differs from the model of {flags.profile}, expected the profile's (or no --model)")
    for name in ("microbatch_size", "dtype", "remat"):
        value = getattr(flags, name)
        measured = getattr(profile, name)
        if value is not None and value != measured:
            raise BadInput(f"--{name}: got {value}, expected the {measured} of {flags.profile}")
    return profile


def _speeds(text: str, network: Network) -> dict[str, float]:
    """FLOP/s of every kind of device: one number for all, or KIND=FLOPS pairs."""
    kinds = sorted({device.kind for device in network.devices})
    if "=" not in text:
        return dict.fromkeys(kinds, _number(text, text))
    pairs = [pair.partition("=") for pair in text.split(",")]
    speeds = {kind: _number(value, text) for kind, _, value in pairs}
    missing = [kind for kind in kinds if kind not in speeds]
    if missing:
        raise BadInput(f"--flops: no FLOP/s for the kind {missing[0]!r}, expected one for each of {', '.join(kinds)}")
    return speeds


def _number(value: str, text: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise BadInput(f"--flops: got {text!r}, expected a number, or KIND=NUMBER pairs separated by commas") from None


def check_shape(workload: StepWorkload, n_stages: int, n_pipelines: int):
    """Raise BadInput for a shape that cannot be planned."""
    comm_workload.microbatch_shares(workload.n_microbatches, n_pipelines)
    sizes = workload.even_comm_bytes(n_stages, n_pipelines)
    problem_of(workload.network, n_stages, n_pipelines, sizes.c_dp_bytes, sizes.c_pp_bytes)
    refuse_too_small(workload, n_stages)


def step_row(workload: StepWorkload, finalist: Finalist) -> StepRow:
    """A finalist beside its cost by Eq. 1-4, with the sizes of its own layers and shares."""
    layout = finalist.layout
    sizes = workload.comm_bytes(layout.stages, layout.shares)
    cost = cost_of(workload.network, layout.placement.tolist(), sizes.c_dp_bytes, sizes.c_pp_bytes)
    return StepRow(finalist.name, finalist.step_s, cost)


def plan_of_step(flags: Namespace, workload: StepWorkload, solution: StepSolution, incumbent: Incumbent) -> Plan:
    """The best finalist's plan. The bound of Eq. 1-4 holds for it only if it uses the devices that were searched, and
    shrinks with its sizes."""
    best = solution.finalists[0]
    layout = best.layout
    by_cost = solution.by_cost
    sizes = workload.comm_bytes(layout.stages, layout.shares)
    same_devices = sorted(layout.placement.ravel()) == sorted(by_cost.devices)
    factor = 0.0
    if same_devices and layout.shape == by_cost.solution.placement.shape:
        searched = by_cost.sizes
        factor = min(1.0, sizes.c_dp_bytes / searched.c_dp_bytes, sizes.c_pp_bytes / searched.c_pp_bytes)
    emitted = replace(
        by_cost.solution,
        placement=layout.placement,
        bound_s=by_cost.solution.bound_s * factor if factor else 0.0,
        proved=False,
        evaluations=incumbent.evaluations,
        time_s=incumbent.elapsed_s,
    )
    with_all_s = step_s_with_all(solution, workload.network.n_devices)
    facts = {
        "objective": "step_time",
        "solver": flags.solver,
        "seed": flags.seed,
        "step_s": best.step_s,
        "profile": workload.profile.source or flags.profile,
        "left_out_why": reasons(workload, layout),
        "step_s_with_all": with_all_s if len(layout.spare) else None,
    }
    comm = CommWorkload(
        n_layers=workload.n_layers,
        stages=layout.stages,
        c_dp_bytes=sizes.c_dp_bytes,
        c_pp_bytes=sizes.c_pp_bytes,
        shares=layout.shares,
        model=workload.profile.model,
    )
    plan = plan_of(workload.network, flags.network, comm, emitted, facts)
    step_plan = plan_of_layout(workload, layout)
    return replace(plan, schedule=step_plan.schedule, in_flight=step_plan.in_flight, codec=step_plan.codec)
