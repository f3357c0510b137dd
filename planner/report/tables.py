"""The text that `solve` prints: a progress line while it works, a table at the end."""

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxdt.run.plan import Plan
from planner.cost.reference import cost_of
from planner.report.plan_file import CostedPlan
from planner.report.result import Progress, ScoredStep

CLEAR = "\x1b[K"  # clears what an earlier, longer line has left on a terminal
NONE = "-"  # in a table, for a cost over a link that does not exist


class ProgressLine:
    """One line on stderr once there is a plan: rewritten on a terminal, printed again every quiet_s seconds
    elsewhere. It names what is minimised: "cost" is always that of Eq. 1-4, "step" always the estimated one."""

    def __init__(self, quiet_s: float = 5.0):
        self.live = sys.stderr.isatty()
        self.interval_s = 0.2 if self.live else quiet_s
        self.last_s = -math.inf

    def show(self, progress: Progress):
        starts = progress.starts if progress.starts and progress.starts.best_s is not None else None
        has_plan = progress.best_s is not None or starts is not None
        if not has_plan or progress.elapsed_s - self.last_s < self.interval_s:
            return
        self.last_s = progress.elapsed_s
        text = f"{progress.elapsed_s:6.1f} s  {best_of(progress)}"
        if starts:
            text += f"; looks for starts by Eq. 1-4: {best_of(starts)}"
        if rate := (starts or progress).evaluations_per_s:
            text += f"  {rate:,.0f} plans/s"
        print(f"\r{text}{CLEAR}" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def close(self):
        if self.live and math.isfinite(self.last_s):
            print(file=sys.stderr)


VALUES = {  # objective -> its name, and how a value is printed
    "comm_cost": ("cost", "{:.3f} s"),
    "step_time": ("step", "{:.3f} s (estimated)"),
    "cost_per_step": ("price", "{:.4g} a step (estimated)"),
}


def best_of(progress: Progress) -> str:
    """The best plan of a search, by what is minimised, with its shape, and how far from the best possible it is."""
    name, value = VALUES[progress.objective]
    if progress.best_s is None:
        return f"no {name} yet"
    shape = f" for {progress.shape[0]} x {progress.shape[1]}" if progress.shape else ""
    gap = progress.gap
    is_known = gap is not None and math.isfinite(gap)
    bound = f", at most {gap:.2%} above the best possible (bound {progress.bound_s:.3f} s)" if is_known else ""
    return f"best {name} {value.format(progress.best_s)}{shape}{bound}"


def line(widths: Sequence[int], *cells: str) -> str:
    """A row of a table for terminals: the first column to the left, the others to the right."""
    (width, first), *others = zip(widths, cells, strict=False)
    return f"{first:<{width}}" + "".join(f"{cell:>{width}}" for width, cell in others)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])


WIDTHS = (16, 12, 16, 12)
HEADER = line(WIDTHS, "seconds, Eq. 1-4", "total", "data-parallel", "pipeline")


def row(name: str, *terms_s: float) -> str:
    """Total, data-parallel and pipeline seconds."""
    return line(WIDTHS, name, *map(seconds, terms_s))


def seconds(value_s: float) -> str:
    """Seconds in a table, or NONE where they are not finite."""
    return f"{value_s:.4f}" if math.isfinite(value_s) else NONE


def cost_table(costed: CostedPlan, block: list[list[int]], random_s: tuple[float, float, float]) -> str:
    """Costs of the plan beside those of the block layout and the mean of random placements (total, data, pipeline)."""
    found = costed.plan.found
    block_cost = cost_of(costed.network, block, *costed.sizes)
    return "\n".join(
        [
            HEADER,
            row("plan", *costed.cost.terms_s),
            row("block layout", *block_cost.terms_s),
            row("random (mean)", *random_s),
            f"{'bound':<16}{found['bound_s']:>12.4f}  {above_bound(found)}",
            *memory_lines(costed.plan),
            effort(found, found["time_s"]),
        ]
    )


def above_bound(found: Mapping[str, Any]) -> str:
    """A text about how far the plan is above its bound."""
    if found["proved"]:
        return "proved optimal"
    return "no bound" if found["gap"] is None else f"the plan costs {found['gap']:.2%} more"


def effort(found: Mapping[str, Any], time_s: float) -> str:
    """A text about the effort of finding a plan."""
    without = "found by the proof alone" if found["proved"] else "from layouts without search"
    tried = f"{found['evaluations']:,} plans tried" if found["evaluations"] else without
    return f"{found['solver']}, seed {found['seed']}: {tried} in {time_s:.1f} s"


MEMORY_KINDS = {
    "parameters": "parameters",
    "moments": "moments",
    "gradients": "gradients",
    "activations": "activations",
    "on_host": "host copies",
}


def memory_lines(plan: Plan) -> list[str]:
    """A table of what the busiest peer of each stage holds, by kind of number; nothing where the model is unknown, or
    the stages are not those that were planned."""
    stages = plan.found.get("stage_memory_bytes", ())
    if len(stages) != plan.n_stages:
        return []
    titles = (*MEMORY_KINDS.values(), "in all")
    widths = (12, 10, *(len(title) + 3 for title in titles))
    lines = [line(widths, "memory, GB", "layers", *titles)]
    for stage, ((lo, hi), n_bytes) in enumerate(zip(plan.stages, stages, strict=True)):
        sizes = [*(n_bytes[name] for name in MEMORY_KINDS), sum(n_bytes.values())]
        lines.append(line(widths, f"stage {stage}", f"{lo}..{hi - 1}", *(f"{size / 1e9:.3f}" for size in sizes)))
    return lines


def labels_of(names: Sequence[str]) -> list[str]:
    """The names, with a number where the same one stands above."""
    seen: Counter[str] = Counter()
    labels: list[str] = []
    for name in names:
        seen[name] += 1
        labels.append(f"{name}, no. {seen[name]}" if seen[name] > 1 else name)
    return labels


WHY_COSTS_DIFFER = (
    "Both costs are right about different things: Eq. 1-4 count communication alone, add up hops that microbatches\n"
    "cross at the same time and let a device's exchanges wait for each other; the step also computes, overlaps, and\n"
    "waits for the slowest device. The plan is the one "
)


def step_table(plan: Plan, rows: Sequence[ScoredStep], time_s: float) -> str:
    """The simulated finalists, the first of which is the plan; the plan's settings; the devices that it leaves out."""
    found = plan.found
    names = labels_of([row.name for row in rows])
    labels = [f"plan ({names[0]})", *names[1:]]
    widths = (max(26, *map(len, labels)), 17, 16, 16, 12)
    lines = [line(widths, "seconds", "step (simulated)", "Eq. 1-4: total", "data-parallel", "pipeline")]
    for label, one in zip(labels, rows, strict=True):
        lines.append(line(widths, label, *map(seconds, (one.step_s, *one.cost.terms_s))))
    sizes = [hi - lo for lo, hi in plan.stages]
    is_cheapest = found["objective"] == "cost_per_step"
    lines += [
        WHY_COSTS_DIFFER + ("whose step costs least." if is_cheapest else "with the shortest step."),
        f"{plan.shape}, layers {sizes}, microbatches {list(plan.shares)}, "
        f"in flight {list(plan.in_flight) if plan.in_flight else 'all'}",
    ]
    if price := found.get("price"):
        lines.append(
            f"a step costs {price['per_step']:.6g}, {price['egress_per_step']:.3g} of it for bytes that leave their "
            f"region; the devices cost {price['per_hour']:g} an hour"
        )
    if found["left_out"]:
        with_all_s = found["step_s_with_all"]
        comparison = f"; the best step found with all devices takes {with_all_s:.4f} s" if with_all_s else ""
        is_paid = is_cheapest or "budget_per_hour" in found
        why = "because of time, memory or price" if is_paid else "because the step is shorter without"
        lines += [f"left out, {why}{comparison}:"]
        lines += [f"  {why}" for why in found["left_out_why"]]
    if simple_s := found.get("simple_step_s"):
        above = f"{simple_s / found['step_s'] - 1:.1%} more than the plan"
        lines.append(f"the best simple plan, judged before the search, takes {simple_s:.4f} s, {above}")
    lines += [f"not tried: {part}" for part in found.get("not_tried", ())]
    lines += memory_lines(plan)
    lines.append(effort(found, time_s))
    return "\n".join(lines)
