"""What `solve` prints: a progress line while it works, a table at the end."""

import math
import sys

from jaxdt.spec.plan import Plan
from planner.cost.reference import cost_of
from planner.model.plan_io import Planned
from planner.model.problem import MISSING_S
from planner.search.incumbent import Board


class Progress:
    """One line on stderr once there is a plan: rewritten on a terminal, now and then elsewhere."""

    def __init__(self, quiet_s: float = 5.0):
        self.live = sys.stderr.isatty()
        self.every_s = 0.2 if self.live else quiet_s
        self.last_s = -math.inf

    def show(self, board: Board):
        elapsed_s, board = board.elapsed_s, board.part or board
        if board.best_s >= MISSING_S or elapsed_s - self.last_s < self.every_s:
            return
        self.last_s = elapsed_s
        gap = (board.best_s - board.bound_s) / board.bound_s if board.bound_s > 0 else math.inf
        text = (
            f"{elapsed_s:6.1f} s  best {board.best_s:.3f} s  bound {board.bound_s:.3f} s  gap {gap:7.2%}  "
            f"{board.evaluations / max(board.elapsed_s, 1e-3):,.0f} plans/s"
        )
        print(f"\r{text}   " if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def close(self):
        if self.live:
            print(file=sys.stderr)


def row(name: str, total_s: float, datap_s: float, pipelinep_s: float) -> str:
    return f"{name:<16}{total_s:>12.4f}{datap_s:>16.4f}{pipelinep_s:>12.4f}"


def table(planned: Planned, block, random_s: tuple[float, float, float]) -> str:
    """Costs of the plan beside those of the block layout and the mean of random placements (total, data, pipeline)."""
    cost, found = planned.cost, planned.plan.found
    other = cost_of(planned.network, block, planned.c_dp_bytes, planned.c_pp_bytes)
    gap = "proved optimal" if found["proved"] else "no bound" if found["gap"] is None else f"gap {found['gap']:.2%}"
    return "\n".join(
        [
            f"{'seconds, Eq. 1-4':<16}{'total':>12}{'data-parallel':>16}{'pipeline':>12}",
            row("plan", cost.total_s, cost.datap_s, cost.pipelinep_s),
            row("block layout", other.total_s, other.datap_s, other.pipelinep_s),
            row("random (mean)", *random_s),
            f"{'bound':<16}{found['bound_s']:>12.4f}  {gap}",
            f"{found['solver']}, seed {found['seed']}: {found['evaluations']:,} plans in {found['time_s']:.1f} s",
        ]
    )


WHY_THEY_DIFFER = (
    "Both costs are right about different things: Eq. 1-4 count communication alone, add up hops that microbatches\n"
    "cross at the same time and let a device's exchanges wait for each other; the step also computes, overlaps, and\n"
    "waits for the slowest device. The plan is the one with the shortest step."
)


def step_table(plan: Plan, finalists: list[tuple[str, float, float, float, float]], time_s: float) -> str:
    """The simulated finalists (name, step, total, data-parallel, pipeline), what the plan chose, who is left out."""
    found = plan.found
    lines = [f"{'seconds':<26}{'step (simulated)':>17}{'Eq. 1-4: total':>16}{'data-parallel':>16}{'pipeline':>12}"]
    for k, (name, step_s, total_s, datap_s, pipelinep_s) in enumerate(finalists):
        label = f"plan ({name})" if k == 0 else name
        lines.append(f"{label:<26.26}{step_s:>17.4f}{total_s:>16.4f}{datap_s:>16.4f}{pipelinep_s:>12.4f}")
    sizes = [hi - lo for lo, hi in plan.stages]
    lines += [
        WHY_THEY_DIFFER,
        f"{plan.n_stages} stages x {plan.n_pipelines} pipelines, layers {sizes}, microbatches {list(plan.shares)}, "
        f"in flight {list(plan.in_flight) if plan.in_flight else 'all'}",
    ]
    if found["left_out"]:
        whole_s = found["step_s_with_all"]
        beside = f"; the best step found with all devices takes {whole_s:.4f} s" if whole_s else ""
        lines += [f"left out, because the step is shorter without{beside}:"]
        lines += [f"  {why}" for why in found["left_out_why"]]
    lines.append(f"{found['solver']}, seed {found['seed']}: {found['evaluations']:,} plans in {time_s:.1f} s")
    return "\n".join(lines)
