"""`python -m planner solve --objective step_time`: the job from the flags, the search, what it prints and writes."""

from argparse import Namespace
from dataclasses import replace

from jaxdt.spec import profile as profiles
from jaxdt.spec.errors import BadInput
from jaxdt.spec.network import Network
from jaxdt.spec.plan import Plan
from jaxdt.spec.profile import RECOMPUTE, Profile, from_flops
from jaxdt.spec.sizes import DTYPE_BYTES
from planner.commands.searching import DTYPE, REMAT, limits_of, refuse_missing, search, write
from planner.cost.reference import cost_of
from planner.model import sizes
from planner.model.plan_io import plan_of
from planner.model.problem import problem_of
from planner.model.sizes import Workload
from planner.report.text import Progress, step_table
from planner.search.incumbent import Board
from planner.step_time.search import Finalist, Outcome, bytes_of, search_step, sizes_of_shape
from planner.step_time.shapes import reasons, search_shapes, without_spares
from planner.step_time.simulate import plan_of_layout
from planner.step_time.workload import Job, refuse_too_small


def job_of(flags: Namespace, network: Network) -> Job:
    """The step that the flags describe; BadInput where they contradict each other."""
    if flags.c_dp_bytes is not None or flags.c_pp_bytes is not None:
        raise BadInput("--c_dp_bytes, --c_pp_bytes: step_time derives the sizes, expected --model or --profile instead")
    profile = _profile(flags, network)
    n_microbatches = sizes.n_microbatches(flags.global_batch, profile.microbatch_size)
    for device in network.devices:
        profile.kind(device.kind)
    return Job(network, profile, n_microbatches, flags.codec, flags.schedule)


def _profile(flags: Namespace, network: Network) -> Profile:
    if flags.profile and flags.flops:
        raise BadInput("--flops: got a profile and FLOP/s, expected one of them")
    if flags.profile:
        return _checked(flags, profiles.load(flags.profile))
    if not flags.model:
        raise BadInput("--model: missing, step_time needs it to know what a stage computes and holds")
    if not flags.flops:
        raise BadInput("--profile: missing, step_time needs it or --flops to know how fast devices are")
    dtype, remat = flags.dtype or DTYPE, flags.remat or REMAT
    sizes.check_choice("dtype", dtype, tuple(DTYPE_BYTES))
    sizes.check_choice("remat", remat, tuple(RECOMPUTE))
    model = sizes.model_of(flags.model, flags.sequence)
    speeds = _speeds(flags.flops, network)
    return from_flops(model, flags.microbatch_size or 1, speeds, flags.efficiency, dtype=dtype, remat=remat)


def _checked(flags: Namespace, profile: Profile) -> Profile:
    """A measured profile holds for what it was measured with; flags may repeat that, not change it."""
    if flags.model and sizes.model_of(flags.model, flags.sequence) != profile.model:
        raise BadInput(f"--model: differs from the model of {flags.profile}, expected the profile's (or no --model)")
    for name in ("microbatch_size", "dtype", "remat"):
        given, measured = getattr(flags, name), getattr(profile, name)
        if given is not None and given != measured:
            raise BadInput(f"--{name}: got {given}, expected the {measured} of {flags.profile}")
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


def run(flags: Namespace, network: Network) -> int:
    if flags.objective == "comm_cost":
        raise BadInput("--objective: got comm_cost with auto, expected step_time: Eq. 1-4 do not compare shapes")
    job = job_of(flags, network)
    n_stages, n_pipelines = (None if n in (None, "auto") else n for n in (flags.stages, flags.pipelines))
    board = Board(limits_of(flags.time_limit_s, flags.evaluations))
    if n_stages and n_pipelines:
        _check_shape(job, n_stages, n_pipelines)
        work = lambda: search_step(job, n_stages, board, flags.solver, flags.seed)  # noqa: E731
    else:
        work = lambda: search_shapes(job, n_stages, n_pipelines, board, flags.solver, flags.seed)  # noqa: E731
    outcome = search(work, board, Progress())
    plan = plan_file(flags, job, outcome, board)
    refuse_missing(network, plan)
    print(step_table(plan, [(f.name, f.step_s, *_cost(job, f)) for f in outcome.finalists], board.elapsed_s))
    write(plan, flags.out)
    return 0


def _check_shape(job: Job, n_stages: int, n_pipelines: int):
    sizes.microbatch_shares(job.n_microbatches, n_pipelines)
    problem_of(job.network, n_stages, n_pipelines, *sizes_of_shape(job, n_stages, n_pipelines))
    refuse_too_small(job, n_stages)


def _workload(job: Job, finalist: Finalist) -> Workload:
    layout = finalist.layout
    byte_counts = bytes_of(job, layout.stages, layout.shares)
    return Workload(job.n_layers, layout.stages, *byte_counts, layout.shares, job.profile.model)


def _cost(job: Job, finalist: Finalist) -> tuple[float, float, float]:
    """(total, data-parallel, pipeline) by Eq. 1-4 with the sizes of the finalist's own layers and shares."""
    workload = _workload(job, finalist)
    cost = cost_of(job.network, finalist.layout.placement.tolist(), workload.c_dp_bytes, workload.c_pp_bytes)
    return cost.total_s, cost.datap_s, cost.pipelinep_s


def plan_file(flags: Namespace, job: Job, outcome: Outcome, board: Board) -> Plan:
    """The best finalist's plan. The bound of Eq. 1-4 holds for it only if it uses the devices that were searched, and
    shrinks with its sizes."""
    best = outcome.finalists[0]
    layout, workload = best.layout, _workload(job, best)
    same = sorted(layout.placement.ravel()) == sorted(outcome.devices)
    same = same and layout.shape == outcome.by_cost.placement.shape
    kept = min(1.0, workload.c_dp_bytes / outcome.sizes[0], workload.c_pp_bytes / outcome.sizes[1]) if same else 0.0
    solution = replace(
        outcome.by_cost,
        placement=layout.placement,
        bound_s=outcome.by_cost.bound_s * kept,
        proved=False,
        evaluations=board.evaluations,
        time_s=board.elapsed_s,
    )
    everybody_s = without_spares(outcome, job.network.n_devices)
    how = {
        "objective": "step_time",
        "solver": flags.solver,
        "seed": flags.seed,
        "step_s": best.step_s,
        "profile": job.profile.source or flags.profile,
        "left_out_why": reasons(job, layout),
        "step_s_with_all": everybody_s if len(layout.spare) else None,
    }
    plan = plan_of(job.network, flags.network, workload, solution, how)
    run_as = plan_of_layout(job, layout)
    return replace(plan, schedule=run_as.schedule, in_flight=run_as.in_flight, codec=run_as.codec)
