"""curves.png: held-out perplexity against steps, against bytes sent, and against simulated time."""

import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from experiments.ablation.grid import BASELINE, METHODS, AblationConfig, Case
from experiments.ablation.report import Row
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS: dict[str, str] = dict(zip(METHODS, ("#000000", "#4c78a8", "#72b7b2", "#e45756", "#f58518"), strict=True))
DASHES = {1: "-", 2: "-", 4: "--"}
# The vertical axis ends here, as a multiple of the best perplexity: with the first steps on it the curves would hardly
# differ.
AXIS_OVER_BEST = 1.6


def draw(path: Path, ablation: AblationConfig, table: list[Row], finished: Mapping[Case, dict]) -> None:
    """One line of panels per number of stages. A curve is the mean over seeds, its band their minimum and maximum."""
    gbps = min(ablation.gbps)
    x_labels = ("steps", "MB over all boundaries", f"seconds, simulated at {gbps * 1e3:g} Mb/s")
    best = min(min(row.perplexities) for row in table)
    figure = Figure(figsize=(15, 4.5 * len(ablation.stages)), layout="constrained")
    grid = figure.subplots(len(ablation.stages), 3, squeeze=False)
    for line, stages in zip(grid, ablation.stages, strict=True):
        for row in (row for row in table if row.case.stages == stages):
            steps, losses = _curves(row, ablation, finished)
            step_s = statistics.fmean(row.step_s[ablation.gbps.index(gbps)])
            for axes, scale in zip(line, (1.0, row.step_bytes / 1e6, step_s), strict=True):
                _curve(axes, row.case, steps * scale, np.exp(losses))
        for axes, label in zip(line, x_labels, strict=True):
            axes.set(xlabel=label, ylabel="held-out perplexity", title=f"{stages} stages")
            axes.set_ylim(0.97 * best, AXIS_OVER_BEST * best)
        line[0].legend()
    figure.savefig(path, dpi=100)


def _curves(row: Row, ablation: AblationConfig, finished: Mapping[Case, dict]) -> tuple[np.ndarray, np.ndarray]:
    """(steps [n_evals], losses [n_seeds, n_evals])."""
    case = replace(row.case, stages=1) if row.case.method == BASELINE else row.case
    curves = np.array([finished[replace(case, seed=seed)]["eval"] for seed in range(ablation.seeds)])
    return curves[0, :, 0], curves[:, :, 1]


def _curve(axes: Axes, case: Case, xs: np.ndarray, perplexities: np.ndarray) -> None:
    label = f"{case.method} {case.ratio}x"
    color = COLOURS[case.method]
    linestyle = DASHES.get(case.ratio, ":")
    axes.plot(xs, perplexities.mean(axis=0), label=label, linewidth=1.2, color=color, linestyle=linestyle)
    axes.fill_between(xs, perplexities.min(axis=0), perplexities.max(axis=0), color=color, alpha=0.15, lw=0)
