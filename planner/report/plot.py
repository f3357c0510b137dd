"""`python -m planner plot`: who sits where, which hops are slow, and the costs as bars."""

from argparse import Namespace
from pathlib import Path

import numpy as np

from jaxdt.run.errors import BadInput, why
from planner.cost.reference import cost_of
from planner.model.problem import exchange_s, mean_links, problem_of, regions_of
from planner.report.plan_file import CostedPlan, read
from planner.search import layouts

REGIONS_MAX = 20  # more have no colours of their own


def draw(costed: CostedPlan, out: str):
    """Write the picture of a plan."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1))
    _draw_placement(left, costed)
    step_s = costed.plan.found.get("step_s")
    if step_s is None:
        _draw_bars(right, costed)
        decided = f"{costed.cost.total_s:.2f} s by Eq. 1-4"
    else:
        _draw_steps(right, costed)
        decided = f"{step_s:.2f} s a step (simulated)"
    if costed.plan.found.get("objective") == "cost_per_step":
        decided = f"{costed.plan.found['price']['per_step']:.4g} a step, {decided}"
    figure.suptitle(f"{costed.network.name}: {decided}")
    figure.savefig(out, dpi=130)


def _draw_placement(axes, costed: CostedPlan):
    """A row for each pipeline and a column for each stage. Dots have the colours of their regions; a hop is the redder
    and the thicker, the longer it takes."""
    from matplotlib import colormaps

    network, placement = costed.network, np.array(costed.plan.placement)
    n_stages, n_pipelines = placement.shape
    alpha_s, beta = mean_links(network)
    hop_s = exchange_s(alpha_s, beta, costed.sizes.c_pp_bytes)[placement[:-1], placement[1:]]
    longest_s = hop_s[np.isfinite(hop_s)].max(initial=1e-9)
    reds = colormaps["Reds"]
    for (s, p), seconds in np.ndenumerate(hop_s):
        share = min(1.0, seconds / longest_s)
        axes.plot((s, s + 1), (p, p), color=reds(0.25 + 0.75 * share), linewidth=0.8 + 4 * share, zorder=1)
    regions = regions_of(network)
    names = list(dict.fromkeys(device.region or f"device {d}" for d, device in enumerate(network.devices)))
    colours = colormaps["tab20"](np.arange(len(names)) % 20)
    side = max(20.0, 4000.0 / max(n_stages, n_pipelines) ** 1.3)
    for region, name in enumerate(names):
        at = np.argwhere(regions[placement] == region)
        if len(at):
            axes.scatter(*at.T, color=colours[region], s=side, zorder=2, edgecolors="0.3", linewidths=0.5, label=name)
    dp_s = costed.sizes.exchanges_per_step * exchange_s(alpha_s, beta, costed.sizes.c_dp_bytes / n_pipelines)
    groups_s = dp_s[placement[:, :, None], placement[:, None, :]].sum(axis=2).max(axis=1)
    axes.set_xticks(range(n_stages), [f"stage {s}\n{seconds:.3g} s" for s, seconds in enumerate(groups_s)], fontsize=8)
    step = -(-n_pipelines // 16)
    axes.set_yticks(range(0, n_pipelines, step), [f"pipeline {p}" for p in range(0, n_pipelines, step)], fontsize=8)
    axes.set(xlim=(-0.5, n_stages - 0.5), ylim=(n_pipelines - 0.5, -0.5))
    axes.set_title(f"dot: region; red: slow hop, at most {longest_s:.3g} s; below: averaging of a stage", fontsize=10)
    if len(names) <= REGIONS_MAX:
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12), "ncols": min(5, len(names))}
        axes.legend(fontsize=8, markerscale=min(1.0, 8 / side**0.5), frameon=False, **below)


def _draw_steps(axes, costed: CostedPlan):
    """The simulated seconds by which the plan was chosen, beside those of plans that it was compared with."""
    found = costed.plan.found
    names = {"step_s": "plan", "simple_step_s": "best simple\nplan", "step_s_with_all": "with all\ndevices"}
    bars = {label: found[name] for name, label in names.items() if found.get(name) is not None}
    axes.bar_label(axes.bar(list(bars), list(bars.values()), color="#4c72b0"), fmt="%.4g s")
    axes.set_ylabel("simulated seconds a step")


def _draw_bars(axes, costed: CostedPlan):
    bars = {"plan": (costed.cost.datap_s, costed.cost.pipelinep_s)}
    if costed.plan.n_stages * costed.plan.n_pipelines == costed.network.n_devices:
        problem = problem_of(costed.network, costed.plan.n_stages, costed.plan.n_pipelines, *costed.sizes)
        block = cost_of(costed.network, layouts.block(problem).tolist(), *costed.sizes)
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


def run(flags: Namespace) -> int:
    out = flags.out or str(Path(flags.plan).with_suffix(".png"))
    costed = read(flags.plan, flags.network)
    try:
        draw(costed, out)
    except (OSError, ValueError) as error:
        raise BadInput(f"--out: {out} cannot be written ({why(error)})") from None
    print(f"wrote {out}")
    return 0
