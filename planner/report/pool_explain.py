"""The sources of the seconds of a pool's plan, in words."""

from collections.abc import Sequence

from planner.cost.pool import PassCost
from planner.report.pool_plan import CostedPool, LevelScore
from planner.report.tables import NONE, line

WIDTHS = (8, 22, 22)


def text(costed: CostedPool) -> str:
    """The text that `explain` prints."""
    cost, stages = costed.cost, costed.stages
    k = cost.slowest_stage
    slowest = cost.stages[k]
    lines = [
        f"{len(stages)} stages on {costed.network.name or 'a network'}: {cost.total_s:.3f} s a step by Eq. 1-2 of the "
        f"hybrid parameter server paper, {costed.facts.n_minibatches} mini-batches of "
        f"{slowest.total_s:.3f} s at stage {k}.",
        f"Stage {k}: forward {_pass(costed, slowest.forward)}; backward {_pass(costed, slowest.backward)}"
        + (f"; {slowest.hop_s:.3f} s with stage {k + 1}." if k + 1 < len(stages) else "."),
        stage_table(costed),
    ]
    why = costed.plan.found.get("left_out_why")
    if why:
        lines.append(f"Left out: {'; '.join(why)}.")
    return "\n".join([*lines, level_table(costed.facts.levels, cost.total_s)])


def _pass(costed: CostedPool, one: PassCost) -> str:
    return (
        f"{one.total_s:.3f} s by {costed.name(one.device)}, {one.compute_s:.3f} s of it computing and "
        f"{one.transfer_s:.3f} s on links"
    )


def stage_table(costed: CostedPool) -> str:
    """A row for each stage; behind a device its units of a mini-batch."""
    names = costed.plan.devices
    lines: list[str] = []
    for k, (stage, cost) in enumerate(zip(costed.stages, costed.cost.stages, strict=True)):

        def listed(devices: Sequence[int], units: dict[int, int] = stage.units) -> str:
            return ", ".join(f"{names[d]} ({units[d]})" for d in devices) or NONE

        both = stage.front == stage.back
        servers = f"server {listed(stage.front)}" if both else f"front {listed(stage.front)}; back {listed(stage.back)}"
        lines.append(
            f"  stage {k}: layers {stage.lo}..{stage.hi - 1}, {cost.total_s:.3f} s a mini-batch; {servers}; "
            f"workers {listed(stage.workers)}"
        )
    return "\n".join(lines)


def level_table(levels: Sequence[LevelScore], step_s: float) -> str:
    """The numbers of stages that were looked at, and whether one is better than the plan's step_s by Eq. 1 and 2 in
    full."""
    lines = [line(WIDTHS, "stages", "Eq. 2 with Eq. 3, s", "Eq. 1-2 in full, s")]
    for level in levels:
        scores = (f"{value:.3f}" if value is not None else NONE for value in (level.search_s, level.step_s))
        lines.append(line(WIDTHS, str(level.n_stages), *scores))
    priced = [(level.step_s, level.n_stages) for level in levels if level.step_s is not None]
    best_s, n_best = min(priced, default=(step_s, 0))
    if best_s < step_s:
        lines.append(
            f"By Eq. 1-2 in full {n_best} stages are shorter than the plan, {best_s:.3f} s: --stages {n_best}."
        )
    return "\n".join(lines)
