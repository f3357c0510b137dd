"""The ablation's results as rows, and rows as markdown. A spread is the standard deviation, of losses over seeds, of
seconds over measurements."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.ablation.grid import BASELINE, EIGHT_BIT, LAYERS, AblationConfig, Case, bytes_per_step, kinds, run_of
from experiments.page import markdown_table, spread

from jaxdt.run.config import RunConfig
from jaxdt.run.network import Link
from jaxdt.run.work import WorkKind
from jaxdt.sim.predict import Conditions, predict_step_s


@dataclass(frozen=True)
class Row:
    """One kind of run over all its seeds; the first three tuples have one entry per seed.

    loss_differences: held-out loss minus that of the baseline with the same seed.
    steps_to_target: steps until the loss that this baseline has after target_frac of the steps; None for a seed that
        does not reach that loss.
    encode_s, decode_s: seconds of one boundary tensor, one per measurement.
    step_s: simulated seconds of a step, a tuple per entry of AblationConfig.gbps with one entry per measurement.
    """

    case: Case
    perplexities: tuple[float, ...]
    loss_differences: tuple[float, ...]
    steps_to_target: tuple[float | None, ...]
    step_bytes: int
    encode_s: tuple[float, ...]
    decode_s: tuple[float, ...]
    step_s: tuple[tuple[float, ...], ...]

    @property
    def target_steps(self) -> float | None:
        """Mean steps to the target; None if a seed does not reach it."""
        reached = self.steps_reached
        return statistics.fmean(reached) if len(reached) == len(self.steps_to_target) else None

    @property
    def steps_reached(self) -> list[float]:
        return [step for step in self.steps_to_target if step is not None]


def cut_cases(ablation: AblationConfig) -> list[Case]:
    """Every kind of case, with seed 0; the baseline once for each number of stages."""
    baseline = [Case(BASELINE, stages, 1) for stages in ablation.stages]
    return baseline + [case for case in kinds(ablation) if case.method != BASELINE]


def rows(
    config: RunConfig, ablation: AblationConfig, finished: Mapping[Case, dict], parts: Mapping[Case, dict]
) -> list[Row]:
    """One row per case of cut_cases. `parts[case]` has encode_s, decode_s and step_s of a measured case, whose seed is
    the number of the measurement."""
    seeds = range(ablation.seeds)
    baseline = [finished[Case(BASELINE, 1, 1, seed)]["eval"] for seed in seeds]
    targets = [value_at(curve, ablation.target_frac * config.train.steps) for curve in baseline]
    table = []
    for case in cut_cases(ablation):
        trained = replace(case, stages=1) if case.method == BASELINE else case
        curves = [finished[replace(trained, seed=seed)]["eval"] for seed in seeds]
        measured = [parts[replace(case, seed=n)] for n in range(ablation.measurements)]
        table.append(
            Row(
                case=case,
                perplexities=tuple(math.exp(curve[-1][1]) for curve in curves),
                loss_differences=tuple(a[-1][1] - b[-1][1] for a, b in zip(curves, baseline, strict=True)),
                steps_to_target=tuple(map(steps_to, curves, targets)),
                step_bytes=bytes_per_step(config, case),
                encode_s=tuple(own["encode_s"] for own in measured),
                decode_s=tuple(own["decode_s"] for own in measured),
                step_s=tuple(zip(*(own["step_s"] for own in measured), strict=True)),
            )
        )
    return table


def step_seconds(config: RunConfig, case: Case, parts: dict, gbps: float) -> float:
    """Simulated seconds of a step: every stage on a host of its own, links of `gbps` each way without latency. A stage
    encodes what it sends and decodes what it receives on its own device, as part of its Work; its measured seconds
    contain its compression layers already."""
    config, plan = run_of(config, case)
    has_codec = case.method not in LAYERS
    encode_s = parts["encode_s"] * has_codec
    decode_s = parts["decode_s"] * has_codec
    seconds = {}
    for s, measured in enumerate(parts["seconds"]):
        last = s == case.stages - 1
        n_before = 0 if s == 0 else 1  # boundaries before and behind the stage
        n_behind = 0 if last else 1
        forward_codec_s = encode_s * n_behind + decode_s * n_before
        backward_codec_s = decode_s * n_behind + encode_s * n_before
        if last:  # its forward is part of its backward
            backward_codec_s += forward_codec_s
            forward_codec_s = 0.0
        seconds[s] = measured | {
            WorkKind.FORWARD: measured[WorkKind.FORWARD] + forward_codec_s,
            WorkKind.BACKWARD: measured[WorkKind.BACKWARD] + backward_codec_s,
        }
    hosts = {s: f"host{s}" for s in seconds}
    conditions = Conditions(seconds, lambda src, dst: Link(0.0, gbps), hosts, dict.fromkeys(hosts.values(), 1.0))
    return predict_step_s(config, plan, conditions)


def value_at(curve: Sequence[Sequence[float]], step: float) -> float:
    """The loss at `step`, interpolated linearly between evaluations."""
    for (a, loss_a), (b, loss_b) in zip(curve, curve[1:], strict=False):
        if step <= b:
            return loss_a + (loss_b - loss_a) * (step - a) / (b - a)
    return curve[-1][1]


def steps_to(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Steps until the loss is first at most `target`, interpolated linearly between evaluations."""
    if curve[0][1] <= target:
        return float(curve[0][0])
    for (a, loss_a), (b, loss_b) in zip(curve, curve[1:], strict=False):
        if loss_b <= target:
            return a + (b - a) * (loss_a - target) / (loss_a - loss_b)
    return None


# ----------------------------------------------------------------------------------------------------------- markdown


def markdown(config: RunConfig, ablation: AblationConfig, table: list[Row]) -> str:
    """The tables of quality and of cost."""
    return f"{quality(ablation, table)}\n\n{cost(config, ablation, table)}\n"


def quality(ablation: AblationConfig, table: list[Row]) -> str:
    """Held-out perplexity as in SWARM's Table 8; a column per ratio and number of stages."""
    columns = [(stages, ratio) for ratio in ablation.ratios for stages in ablation.stages]
    head = ["held-out perplexity", *(f"{stages} stages {ratio}x" for stages, ratio in columns)]
    lines = []
    for method in ablation.methods:
        cells = {
            (row.case.stages, row.case.ratio): spread(row.perplexities) for row in table if row.case.method == method
        }
        if method == BASELINE:
            cells = {(stages, ratio): cells[stages, 1] for stages, ratio in columns}
        lines.append([method, *(cells.get(column, "-") for column in columns)])
    note = "int8 is 2x against 16-bit boundaries, as the paper counts, and 4x against fp32."
    return f"{markdown_table(head, lines)}\n\nMean +- standard deviation over {ablation.seeds} seeds. {note}"


def cost(config: RunConfig, ablation: AblationConfig, table: list[Row]) -> str:
    """A line per kind of run: loss compared with the baseline of the same seed, bytes, seconds, time to the target."""
    speeds = [f"{gbps * 1e3:g} Mb/s" if math.isfinite(gbps) else "unlimited" for gbps in ablation.gbps]
    head = ["boundary", "ratio", "stages", "loss - none", "steps to target", "MB/step", "encode ms", "decode ms"]
    head += [f"step s, {speed}" for speed in speeds] + [f"target s, {speed}" for speed in speeds]
    lines = []
    for row in table:
        steps = row.target_steps
        method = row.case.method
        reached = row.steps_reached
        lines.append(
            [
                method,
                "1x" if method == BASELINE else f"{row.case.ratio}x{' (16-bit)' if method in EIGHT_BIT else ''}",
                str(row.case.stages),
                "-" if method == BASELINE else spread(row.loss_differences, 3, "+"),
                f"{len(reached)} of {ablation.seeds} seeds" if steps is None else spread(reached, 0),
                f"{row.step_bytes / 1e6:.2f}",
                f"{statistics.fmean(row.encode_s) * 1e3:.2f}",
                f"{statistics.fmean(row.decode_s) * 1e3:.2f}",
                *(spread(step_s, 3) for step_s in row.step_s),
                *("-" if steps is None else f"{steps * statistics.fmean(step_s):.0f}" for step_s in row.step_s),
            ]
        )
    n_steps = config.train.steps
    goal = f"the held-out loss of the same seed's baseline after {ablation.target_frac:.0%} of {n_steps} steps"
    note = f"Target: {goal}. Step and target seconds are simulated from parts measured {ablation.measurements} times."
    return f"{markdown_table(head, lines)}\n\n{note}"
