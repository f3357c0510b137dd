"""`python -m planner solve`: read, search, re-cost, report, write."""

import json
import math
import sys
import threading
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from jaxdt.core import network as networks
from jaxdt.core import plan as plans
from jaxdt.core.errors import BadInput
from jaxdt.core.network import Network
from jaxdt.core.plan import Plan
from planner import layers, layouts, sizes
from planner.board import Board, Limits
from planner.plan_file import Planned, plan_of
from planner.problem import Problem, asymmetric_links, problem_of
from planner.recost import cost_of
from planner.report import Progress, table
from planner.solve import Solution, solve

DEFAULT_TIME_S = 30.0
WARNINGS_SHOWN = 3


def limits_of(time_limit_s: float | None, evaluations: int | None) -> Limits:
    """An evaluation limit alone leaves the clock out."""
    for name, value in (("time_limit_s", time_limit_s), ("evaluations", evaluations)):
        if value is not None and not 0 < value < math.inf:
            raise BadInput(f"--{name}: got {value}, expected a positive number")
    if time_limit_s is None and evaluations is None:
        time_limit_s = DEFAULT_TIME_S
    return Limits(time_limit_s, evaluations)


def workload_of(flags: Namespace) -> sizes.Workload:
    given = flags.c_dp_bytes is not None, flags.c_pp_bytes is not None
    if any(given) and flags.model:
        raise BadInput("--model: got a model and byte counts, expected one of them")
    if flags.model:
        return sizes.from_model(
            flags.stages,
            flags.pipelines,
            flags.model,
            flags.global_batch,
            flags.sequence,
            flags.dtype,
            flags.microbatch_size,
        )
    if not all(given):
        raise BadInput("sizes: expected --c_dp_bytes and --c_pp_bytes, or --model")
    shares = sizes.microbatch_shares(flags.microbatches or 8 * flags.pipelines, flags.pipelines)
    return sizes.from_bytes(flags.stages, shares, flags.c_dp_bytes, flags.c_pp_bytes, flags.layers)


def search(problem: Problem, board: Board, solver: str, seed: int, progress: Progress) -> Solution:
    """Solve in a thread while this one shows progress; Ctrl-C ends the search with the best plan so far."""
    outcome: list = []

    def work():
        try:
            outcome.append(solve(problem, board, solver, seed))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        try:
            thread.join(0.1)
            progress.show(board)
        except KeyboardInterrupt:
            board.stop()
    progress.close()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def cut_for_memory(network: Network, workload: sizes.Workload, solution: Solution) -> tuple[Solution, sizes.Workload]:
    """Cut the layers for the memory of every stage's smallest device, with the stages in this order or reversed (which
    costs the same). A smaller c_dp lowers every cost by at most its own factor, and so the bound."""
    room = [device.memory_bytes or math.inf for device in network.devices]
    if workload.model is None or min(room) == math.inf:
        return solution, workload
    placement = solution.placement
    smallest = [min(room[d] for d in row) for row in placement.tolist()]
    try:
        stages = layers.split(workload.model, len(placement), smallest)
    except BadInput:
        placement = placement[::-1]
        stages = layers.split(workload.model, len(placement), smallest[::-1])
    recut = sizes.recut(workload, stages)
    kept = min(1.0, recut.c_dp_bytes / workload.c_dp_bytes)
    proved = solution.proved and recut.c_dp_bytes == workload.c_dp_bytes
    return replace(solution, placement=placement, bound_s=solution.bound_s * kept, proved=proved), recut


def refuse_too_small(network: Network, workload: sizes.Workload):
    """Before any search: not even stages of the roomiest devices could hold the model."""
    if workload.model is not None:
        room = max(device.memory_bytes or math.inf for device in network.devices)
        layers.split(workload.model, len(workload.stages), [room] * len(workload.stages))


def run(flags: Namespace) -> int:
    network = networks.load(flags.network)
    if flags.stages < 1 or flags.pipelines < 1:
        raise BadInput(f"--stages, --pipelines: got {flags.stages} and {flags.pipelines}, expected integers >= 1")
    workload = workload_of(flags)
    problem = problem_of(network, flags.stages, flags.pipelines, workload.c_dp_bytes, workload.c_pp_bytes)
    refuse_too_small(network, workload)
    warn_asymmetric(network)
    board = Board(limits_of(flags.time_limit_s, flags.evaluations))
    solution = search(problem, board, flags.solver, flags.seed, Progress())
    solution, workload = cut_for_memory(network, workload, solution)
    how = {"solver": flags.solver, "seed": flags.seed}
    plan = plan_of(network, flags.network, workload, solution, how)
    refuse_missing(network, plan)
    print(
        table(
            _planned(network, workload, plan), layouts.block(problem).tolist(), layouts.mean_random(problem, flags.seed)
        )
    )
    if flags.out:
        Path(flags.out).write_text(json.dumps(plans.to_json(plan), indent=1) + "\n")
        print(f"wrote {flags.out}")
    return 0


def _planned(network: Network, workload: sizes.Workload, plan: Plan) -> Planned:
    byte_counts = workload.c_dp_bytes, workload.c_pp_bytes
    return Planned(plan, network, *byte_counts, cost_of(network, plan.placement, *byte_counts))


def warn_asymmetric(network: Network):
    found = asymmetric_links(network)
    for line in found[:WARNINGS_SHOWN]:
        print(f"warning: averaged both directions of {line}", file=sys.stderr)
    if len(found) > WARNINGS_SHOWN:
        print(f"warning: and {len(found) - WARNINGS_SHOWN} more links", file=sys.stderr)


def refuse_missing(network: Network, plan: Plan):
    """A plan over a link that does not exist is no plan."""
    if plan.found["cost"]["total_s"] == math.inf:
        raise BadInput(
            f"{network.name or 'network'}: bandwidth_gbps: found no plan of {plan.n_stages} stages x "
            f"{plan.n_pipelines} pipelines that avoids the links of zero bandwidth"
        )
