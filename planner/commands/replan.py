"""`python -m planner replan`: a plan for a network that has changed, what moves where, and how long that takes.

With --run_dir the plan that runs, the devices that are left and their speeds are those of a run's folder."""

import json
import math
from argparse import Namespace
from dataclasses import replace

from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput, require_writable
from planner.api.job import Job
from planner.api.replan import DEFAULT_TIME_S, Replan, replan
from planner.api.unchanged import unchanged_s
from planner.commands.common import interruptible, write
from planner.commands.flags_job import BYTES, OF_THE_CONFIG, job_of
from planner.commands.run_folder import RunToReplan, read
from planner.model.change import Change, changed
from planner.model.constraints import load_constraints
from planner.model.stop import Stop
from planner.report.plan_file import network_file_of, percentile_of, write_text
from planner.report.result import Mended
from planner.report.tables import NONE, line, seconds

N_SHOWN = 12
WIDTHS = (20, 12, 14, 12, 14)
GAIN_FRAC_MIN = 0.01  # the simulator is no more exact than that
OF_THE_RUN = {"plan": "--from", "added": "--with"}
OF_THE_RUN |= {
    name: f"--{name}" for name in ("without", "config", "profile", "flops", "objective", *OF_THE_CONFIG, *BYTES)
}


def run(flags: Namespace) -> int:
    """Exit code 0, or BadInput."""
    require_writable("--out", flags.out)
    require_writable("--out_network", flags.out_network)
    if flags.out and not flags.out_network:
        raise BadInput("--out_network: missing, expected a file for the changed network, which the plan of --out names")
    run_to_replan = _run_to_replan(flags)
    if run_to_replan:
        plan, whole, change = run_to_replan.plan, run_to_replan.network, Change(run_to_replan.without)
    else:
        plan = plans.load(flags.plan)
        whole = networks.load(flags.network or network_file_of(plan, flags.plan))
        without = tuple(name for name in (flags.without or "").split(",") if name)
        change = Change(without, networks.load(flags.added) if flags.added else None)
    percentile = percentile_of(plan, flags.percentile)
    network = whole.at_percentile(percentile)
    at = replace(change, added=change.added and change.added.at_percentile(percentile))
    constraints = load_constraints(flags.constraints) if flags.constraints else None
    time_s = DEFAULT_TIME_S if flags.time_limit_s is None and flags.evaluations is None else flags.time_limit_s
    stop = Stop(time_s, flags.evaluations)
    job = run_to_replan.job if run_to_replan else _job(flags, plan, network)
    with interruptible(stop):
        found = replan(plan, network, at, job, stop, flags.horizon_steps, constraints)
    print(table(found))
    if flags.unchanged or run_to_replan:
        found = _with_unchanged(found, unchanged_s(plan, network, at, job))
    if flags.out:
        after = json.dumps(networks.to_json(changed(whole, change))) + "\n"
        write_text(flags.out_network, after, "out_network")
        print(f"wrote {flags.out_network}")
        facts = {} if percentile is None else {"percentile": percentile}
        write(found.result.plan, flags.out, flags.out_network, **facts)
    if run_to_replan:
        print(_how_to_take(flags, found, run_to_replan))
    return 0


def _run_to_replan(flags: Namespace) -> RunToReplan | None:
    """The run of --run_dir, which says what other flags say without it; None for --from."""
    if not flags.run_dir:
        if not flags.plan:
            raise BadInput("--from: missing, expected the plan.json of the plan that runs, or --run_dir of a run")
        return None
    for name, flag in OF_THE_RUN.items():
        if getattr(flags, name) is not None:
            raise BadInput(f"{flag}: got {getattr(flags, name)} with --run_dir, expected the run's folder to say that")
    return read(flags.run_dir, flags.network)


def _how_to_take(flags: Namespace, found: Replan, run_to_replan: RunToReplan) -> str:
    """The command that takes the plan; or the reason why there is none."""
    facts = found.result.plan.found
    step_s, now_s = facts["step_s"], facts["replan"]["unchanged_s"]
    if now_s is not None and step_s >= (1 - GAIN_FRAC_MIN) * now_s:
        return "no better plan of these members was found"
    if not flags.out:
        return "a better plan of these members: --out=plan.json and --out_network=network.json write it"
    gain = "" if now_s is None else f" ({step_s / now_s - 1:+.0%})"
    command = run_to_replan.command(found.result.plan, flags.out, flags.out_network, now_s is not None)
    return f"to take this plan{gain}: {command}"


def _job(flags: Namespace, plan: plans.Plan, network: networks.Network) -> Job | None:
    """The job of the flags, in the plan's shape; None where no flag describes one."""
    if not (flags.model or flags.model_config or flags.config or flags.profile or flags.c_dp_bytes is not None):
        return None
    flags.stages, flags.pipelines = plan.n_stages, plan.n_pipelines
    flags.objective = flags.objective or plan.found.get("objective")
    flags.budget_per_hour = None
    return job_of(flags, network)


def _with_unchanged(found: Replan, without_s: float | None) -> Replan:
    """Say what it costs to go on without a new plan, and write it down in the plan."""
    shown = "stands still: a stage has no device" if without_s is None else f"{seconds(without_s)} s"
    print(f"without a new plan: {shown}")
    finite = without_s if without_s is not None and math.isfinite(without_s) else None
    plan = found.result.plan
    facts = plan.found["replan"] | {"unchanged_s": finite}
    return replace(found, result=replace(found.result, plan=replace(plan, found=plan.found | {"replan": facts})))


def _row(name: str, alone_s: float, moving: Replan | Mended) -> str:
    """A plan's seconds without its moves and with them, and the moves."""
    moves = f"{moving.move_s:.2f}", f"{moving.moved_bytes / 1e9:.3f}"
    return line(WIDTHS, name, seconds(alone_s), seconds(moving.score_s), *moves)


def table(found: Replan) -> str:
    """A table of the scores of the new plan and of the old one with its gaps filled, and of the moves."""
    result, mended = found.result, found.mended
    plan = result.plan
    what = "step" if result.step_s is not None else "cost"
    lines = [
        f"{plan.n_stages} stages x {plan.n_pipelines} pipelines on {result.network.name}, "
        f"moves charged to {found.horizon_steps:g} steps",
        line(WIDTHS, "seconds", what, "with moves", "to move", "GB to move"),
        _row("plan", result.score_s, found),
        _row("old plan, mended", mended.score_s - mended.move_s / found.horizon_steps, mended),
    ]
    if plan.found["left_out"]:
        lines.append(f"left out: {', '.join(plan.found['left_out'])}")
    lines.append(f"{len(found.moves)} of {len(plan.peers)} devices fetch state" + (":" if found.moves else ""))
    for move in found.moves[:N_SHOWN]:
        before = NONE if move.from_stage is None else str(move.from_stage)
        layers = ", ".join(f"{lo}..{hi - 1}" for lo, hi in move.layers)
        lines.append(
            f"  {move.device}: stage {before} -> {move.to_stage}, layers {layers}, {move.n_bytes / 1e9:.3f} GB from "
            f"{', '.join(move.sources)}: {move.time_s:.2f} s"
        )
    if len(found.moves) > N_SHOWN:
        lines.append(f"  and {len(found.moves) - N_SHOWN} more")
    return "\n".join(lines)
