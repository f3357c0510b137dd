"""`python -m planner plot`: devices laid out by latency and coloured by stage, pipelines as paths, costs as bars."""

from argparse import Namespace
from pathlib import Path

import numpy as np

from jaxdt.spec.errors import BadInput
from planner.cost.reference import cost_of
from planner.model.problem import mean_links, problem_of
from planner.report.plan_file import CostedPlan, read
from planner.search import layouts


def positions(distance: np.ndarray) -> np.ndarray:
    """Points [N, 2] whose distances come close to distance [N, N] (classical multidimensional scaling). Devices at one
    place are spread on a small circle around it."""
    n = len(distance)
    centre = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centre @ distance**2 @ centre)
    points = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0)) if n > 2 else np.arange(2.0 * n).reshape(n, 2)
    angle = np.arange(n) * 2.4
    radius = 0.06 * max(float(np.ptp(points)), 1e-9) * np.sqrt(1 + np.arange(n) % 8) / 2
    return points + radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)


def draw(costed: CostedPlan, out: str):
    """Write the picture of a plan."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 6), width_ratios=(2.2, 1), layout="constrained")
    _draw_network(left, costed)
    _draw_bars(right, costed)
    figure.suptitle(f"{costed.network.name}: {costed.cost.total_s:.2f} s by Eq. 1-4")
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _draw_network(axes, costed: CostedPlan):
    placement = np.array(costed.plan.placement)
    points = positions(mean_links(costed.network)[0])
    for pipeline in range(placement.shape[1]):
        path = points[placement[:, pipeline]]
        axes.plot(*path.T, color="0.6", linewidth=0.7, zorder=1)
    stage = np.full(costed.network.n_devices, np.nan)
    for s, row in enumerate(placement):
        stage[row] = s
    used = ~np.isnan(stage)
    dots = axes.scatter(
        *points[used].T, c=stage[used], cmap="viridis", s=45, zorder=2, edgecolors="white", linewidths=0.5
    )
    axes.figure.colorbar(dots, ax=axes, label="stage", ticks=range(len(placement)), location="bottom", shrink=0.6)
    regions = [device.region for device in costed.network.devices]
    for region in dict.fromkeys(filter(None, regions)) if len(set(regions)) <= 24 else ():
        centre = points[[name == region for name in regions]].mean(axis=0)
        axes.annotate(region, centre, fontsize=8, ha="center", va="bottom", xytext=(0, 8), textcoords="offset points")
    axes.set(xticks=[], yticks=[], title="distance = latency, line = pipeline")


def _draw_bars(axes, costed: CostedPlan):
    c_dp_bytes = costed.c_dp_bytes
    c_pp_bytes = costed.c_pp_bytes
    bars = {"plan": (costed.cost.datap_s, costed.cost.pipelinep_s)}
    if costed.plan.n_stages * costed.plan.n_pipelines == costed.network.n_devices:
        problem = problem_of(costed.network, costed.plan.n_stages, costed.plan.n_pipelines, c_dp_bytes, c_pp_bytes)
        block = cost_of(costed.network, layouts.block(problem).tolist(), c_dp_bytes, c_pp_bytes)
        bars["block"] = (block.datap_s, block.pipelinep_s)
        _, datap_s, pipelinep_s = layouts.mean_random(problem, 0)
        bars["random"] = (datap_s, pipelinep_s)
    bars = {name: terms for name, terms in bars.items() if np.isfinite(terms).all()}  # no bar over missing links
    data, pipeline = zip(*bars.values(), strict=True)
    axes.bar(list(bars), data, label="data-parallel", color="#4c72b0")
    axes.bar(list(bars), pipeline, bottom=data, label="pipeline", color="#dd8452")
    if costed.bound_s > 0:
        axes.axhline(costed.bound_s, color="black", linestyle="--", linewidth=1, label="bound")
    axes.set_ylabel("seconds a step, Eq. 1-4")
    axes.legend(fontsize=8)


def one_line(error: Exception) -> str:
    """The reason of an error of the system or of matplotlib."""
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or str(error).splitlines()[0]


def run(flags: Namespace) -> int:
    out = flags.out or str(Path(flags.plan).with_suffix(".png"))
    costed = read(flags.plan, flags.network)
    try:
        draw(costed, out)
    except (OSError, ValueError) as error:
        raise BadInput(f"--out: {out} cannot be written ({one_line(error)})") from None
    print(f"wrote {out}")
    return 0
