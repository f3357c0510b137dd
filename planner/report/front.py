"""A Pareto front of step time against price: a table and a picture."""

from collections import Counter
from collections.abc import Sequence

from planner.model.prices import StepPrice
from planner.report.result import Result
from planner.report.tables import markdown_table

HEADER = ("step", "price a step", "price an hour", "bytes out of regions", "stages x pipelines", "devices")


def devices_by_kind(point: Result) -> str:
    """A text about the number of devices of each kind that a plan uses."""
    kinds = Counter(point.network.devices[d].kind or "device" for d in sorted(point.plan.peers))
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items())


def _both(point: Result) -> tuple[float, StepPrice]:
    """Seconds and price of a step, which a point has."""
    assert point.step_s is not None and point.price is not None
    return point.step_s, point.price


def markdown(points: Sequence[Result]) -> str:
    """A table of the points. Prices are in the network's currency."""
    rows: list[list[str]] = []
    for point in points:
        step_s, price = _both(point)
        prices = f"{price.per_step:.4f}", f"{price.per_hour:.2f}", f"{price.egress_per_step:.4f}"
        shape = f"{point.plan.n_stages} x {point.plan.n_pipelines}"
        rows.append([f"{step_s:.2f} s", *prices, shape, devices_by_kind(point)])
    return markdown_table(HEADER, rows) + "\n"


def draw(points: Sequence[Result], out: str):
    """Write the picture of a front."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    steps_s = [_both(point)[0] for point in points]
    prices = [_both(point)[1].per_step for point in points]
    axes.step(steps_s, prices, where="post", color="0.7", linewidth=1, zorder=1)
    axes.scatter(steps_s, prices, s=45, color="#4c72b0", zorder=2)
    for point, step_s, price in zip(points, steps_s, prices, strict=True):
        text = f"{point.plan.n_stages} x {point.plan.n_pipelines}: {devices_by_kind(point)}"
        axes.annotate(text, (step_s, price), xytext=(6, 8), textcoords="offset points", fontsize=8, rotation=25)
    axes.margins(x=0.05)
    axes.set_xlim(right=axes.get_xlim()[1] + 0.12 * (axes.get_xlim()[1] - axes.get_xlim()[0]))  # room for the last text
    axes.set_ylim(0, 1.35 * max(prices))
    name = points[0].network.name or "network"
    axes.set(
        xlabel="seconds a step (simulated)", ylabel="price of a step", title=f"{name}: stages x pipelines, devices"
    )
    figure.savefig(out, dpi=110)
