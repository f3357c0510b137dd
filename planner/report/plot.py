"""`python -m planner plot`: devices laid out by latency and coloured by stage, pipelines as paths, costs as bars."""

from argparse import Namespace
from pathlib import Path

import numpy as np

from planner.cost.reference import cost_of
from planner.model.plan_io import Planned, read
from planner.model.problem import mean_links, problem_of
from planner.search import layouts


def positions(distance: np.ndarray) -> np.ndarray:
    """Points [N, 2] whose distances come close to the given ones (classical multidimensional scaling). Equal devices
    are spread on a small circle around their common place."""
    n = len(distance)
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centre @ distance**2 @ centre)
    points = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0)) if n > 2 else np.arange(2.0 * n).reshape(n, 2)
    angle = np.arange(n) * 2.4
    radius = 0.06 * max(float(np.ptp(points)), 1e-9) * np.sqrt(1 + np.arange(n) % 8) / 2
    return points + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def draw(planned: Planned, out: str):
    """Write the picture of a plan."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 6), width_ratios=(2.2, 1), layout="constrained")
    _draw_network(left, planned)
    _draw_bars(right, planned)
    figure.suptitle(f"{planned.network.name}: {planned.cost.total_s:.2f} s by Eq. 1-4")
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _draw_network(axes, planned: Planned):
    placement = np.array(planned.plan.placement)
    points = positions(mean_links(planned.network)[0])
    for pipeline in range(placement.shape[1]):
        path = points[placement[:, pipeline]]
        axes.plot(*path.T, color="0.6", linewidth=0.7, zorder=1)
    stage = np.full(planned.network.n_devices, np.nan)
    for s, row in enumerate(placement):
        stage[row] = s
    used = ~np.isnan(stage)
    dots = axes.scatter(
        *points[used].T, c=stage[used], cmap="viridis", s=45, zorder=2, edgecolors="white", linewidths=0.5
    )
    axes.figure.colorbar(dots, ax=axes, label="stage", ticks=range(len(placement)), location="bottom", shrink=0.6)
    regions = [device.region for device in planned.network.devices]
    for region in dict.fromkeys(filter(None, regions)) if len(set(regions)) <= 24 else ():
        centre = points[[found == region for found in regions]].mean(axis=0)
        axes.annotate(region, centre, fontsize=8, ha="center", va="bottom", xytext=(0, 8), textcoords="offset points")
    axes.set(xticks=[], yticks=[], title="distance = latency, line = pipeline")


def _draw_bars(axes, planned: Planned):
    sizes = planned.c_dp_bytes, planned.c_pp_bytes
    bars = {"plan": (planned.cost.datap_s, planned.cost.pipelinep_s)}
    if planned.plan.n_stages * planned.plan.n_pipelines == planned.network.n_devices:
        problem = problem_of(planned.network, planned.plan.n_stages, planned.plan.n_pipelines, *sizes)
        block = cost_of(planned.network, layouts.block(problem).tolist(), *sizes)
        bars["block"] = (block.datap_s, block.pipelinep_s)
        bars["random"] = layouts.mean_random(problem, 0)[1:]
    data, pipeline = zip(*bars.values(), strict=True)
    axes.bar(list(bars), data, label="data-parallel", color="#4c72b0")
    axes.bar(list(bars), pipeline, bottom=data, label="pipeline", color="#dd8452")
    axes.axhline(float(planned.plan.found["bound_s"]), color="black", linestyle="--", linewidth=1, label="bound")
    axes.set_ylabel("seconds a step, Eq. 1-4")
    axes.legend(fontsize=8)


def run(flags: Namespace) -> int:
    out = flags.out or str(Path(flags.plan).with_suffix(".png"))
    draw(read(flags.plan, flags.network), out)
    print(f"wrote {out}")
    return 0
