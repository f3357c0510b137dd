"""curves.png: held-out perplexity against steps, against bytes sent, and against simulated time."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402

from jaxdt.ablation.grid import BASELINE, METHODS, AblationConfig, Case  # noqa: E402
from jaxdt.ablation.report import Row  # noqa: E402

COLOURS = dict(zip(METHODS, ("#000000", "#4c78a8", "#72b7b2", "#e45756", "#f58518"), strict=True))
DASHES = {1: "-", 2: "-", 4: "--"}
# The first steps would squeeze the part in which the curves differ.
SHOWN_ABOVE_BEST = 1.6


def draw(path: Path, ablation: AblationConfig, found: list[Row], finished: Mapping[Case, dict]) -> None:
    """A line of panels per number of stages; a curve is the mean over seeds, its band their least and greatest."""
    gbps = min(ablation.gbps)
    figure, grid = plt.subplots(
        len(ablation.stages), 3, figsize=(15, 4.5 * len(ablation.stages)), squeeze=False, layout="constrained"
    )
    for line, stages in zip(grid, ablation.stages, strict=True):
        for row in (row for row in found if row.case.stages == stages):
            steps, losses = _curves(row, ablation, finished)
            step_s = row.step_s[ablation.gbps.index(gbps)] if row.step_s else math.nan
            for axes, scale in zip(line, (1.0, row.step_bytes / 1e6, step_s), strict=True):
                _curve(axes, row.case, steps * scale, np.exp(losses))
        for axes, label in zip(
            line, ("steps", "MB over all boundaries", f"seconds, simulated at {gbps * 1e3:g} Mb/s"), strict=True
        ):
            axes.set(xlabel=label, ylabel="held-out perplexity", title=f"{stages} stages")
            best = min(min(row.perplexities) for row in found)
            axes.set_ylim(0.97 * best, SHOWN_ABOVE_BEST * best)
        line[0].legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _curves(row: Row, ablation: AblationConfig, finished: Mapping[Case, dict]) -> tuple[np.ndarray, np.ndarray]:
    """(steps [n_evals], losses [n_seeds, n_evals])."""
    case = replace(row.case, stages=1) if row.case.method == BASELINE else row.case
    curves = np.array([finished[replace(case, seed=seed)]["eval"] for seed in range(ablation.seeds)])
    return curves[0, :, 0], curves[:, :, 1]


def _curve(axes: Axes, case: Case, xs: np.ndarray, perplexities: np.ndarray) -> None:
    style = {"color": COLOURS[case.method], "linestyle": DASHES.get(case.ratio, ":")}
    axes.plot(xs, perplexities.mean(axis=0), label=f"{case.method} {case.ratio}x", linewidth=1.2, **style)
    axes.fill_between(xs, perplexities.min(axis=0), perplexities.max(axis=0), color=style["color"], alpha=0.15, lw=0)
