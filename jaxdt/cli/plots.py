"""The pictures of a run or a simulation, drawn from traces and metrics with matplotlib.

Figures are made without pyplot: they need no display and no choice of a backend, and nothing has to be closed.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxdt.protocol.events import COORDINATOR
from jaxdt.protocol.trace import bytes_per_link
from jaxdt.spec.work import UPDATE, parse_work

COLOURS = {"F": "#4c78a8", "B": "#f58518", "E": "#b0b0b0", "G": "#72b7b2", "U": "#54a24b"}
COLOURS |= {"R": "#e45756", "N": "#b279a2", "L": "#54a24b", "P": "#72b7b2", "A": "#9d755d"}
COLOURS |= {"C": "#eeca3b"}
NAMES = {"E": "evaluate", "F": "forward", "B": "backward", "R": "regenerate", "G": "gather", "U": "update"}
NAMES |= {"N": "norm", "L": "local step", "P": "lay out", "A": "adopt a mean"}
NAMES |= {"C": "add a contribution"}
PARTS = ("compute", "bubble", "transfer", "sync", "commit")
PART_COLOURS = ("#54a24b", "#b0b0b0", "#f58518", "#72b7b2", "#4c78a8")
EVENT_LINES = {"leave": ":", "join": "--"}
SYNC_STYLE = {"facecolor": "#dceeec", "edgecolor": "#72b7b2", "hatch": "///", "lw": 0.0}
OUTLIER = 5.0  # times the median rate: a step that was committed right after another one would flatten all others
STAGE_LINES = ("-", "--", "-.", ":")


def report(path: Path, metrics: list[dict], records: list[dict], summary: dict) -> None:
    """report.png of a run: loss, timeline of the pipeline, bytes per link, predicted and measured step times. If peers
    joined or left, also the number of peers of each stage and the throughput over time. What was not recorded has no
    panel; where the run was resumed is marked."""
    views = [r for r in records if r["what"] == "report" and r["kind"] == "view" and r["peer"] == COORDINATOR]
    resumed_at = summary.get("resumed_at") or 0
    panels: list[Callable[[Axes], None]] = []
    if metrics:
        panels.append(lambda axes: loss(axes, metrics, resumed_at))
    if (step := _middle_step(records)) is not None:
        panels.append(lambda axes: timeline(axes, records, step))
    if links := summary.get("bytes_on_links") or recorded_bytes(records):
        begin = f" since step {resumed_at}" if resumed_at else ""
        title = f"Bytes per link{begin}" if summary.get("bytes_on_links") else "Bytes per link in the recorded steps"
        panels.append(lambda axes: link_bytes(axes, links, summary.get("codec_on_links", {}), title))
    if metrics:
        predicted_s, uncompressed_s = summary.get("step_s_predicted"), summary.get("step_s_predicted_uncompressed")
        panels.append(lambda axes: step_times(axes, metrics, predicted_s, uncompressed_s, resumed_at))
    if len(views) > 1:
        panels.append(lambda axes: peers_per_stage(axes, views, records[-1]["t"]))
        panels.append(lambda axes: throughput(axes, records, views[0]["t"]))
    n_rows = max(1, -(-len(panels) // 2))
    figure = Figure(figsize=(14, 4.5 * n_rows), layout="constrained")
    all_axes = figure.subplots(n_rows, 2, squeeze=False).ravel()
    for axes, draw in zip(all_axes, panels, strict=False):
        draw(axes)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    figure.savefig(path, dpi=110)


def mark_resumed(axes: Axes, resumed_at: int) -> None:
    """A line at the step at which a run was resumed; none for a run that was not."""
    if resumed_at:
        axes.axvline(resumed_at, color="#888888", ls=":", label=f"resumed at step {resumed_at}")


def loss(axes: Axes, metrics: list[dict], resumed_at: int = 0) -> None:
    """Loss against steps (lower axis) and against time (upper axis)."""
    steps = [m["step"] for m in metrics]
    axes.plot(steps, [m["loss"] for m in metrics], color=COLOURS["F"], label="training")
    held_out = [m for m in metrics if "eval_loss" in m]
    if held_out:
        xs, ys = [m["step"] for m in held_out], [m["eval_loss"] for m in held_out]
        axes.plot(xs, ys, "o", color=COLOURS["B"], label="held out")
    mark_resumed(axes, resumed_at)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    axes.legend()
    if metrics:
        seconds = sum(m["step_s"] for m in metrics) / len(metrics)
        above = axes.secondary_xaxis(
            "top", functions=(lambda x: np.asarray(x) * seconds, lambda s: np.asarray(s) / seconds)
        )
        above.set_xlabel("seconds, at the mean step time")


def timeline(axes: Axes, records: list[dict], step: int | None) -> None:
    """The Work of one step, one row per peer. Between its last gradient and its update a peer averages with others."""
    runs = [(r, parse_work(r["work"])) for r in records if r["what"] == "run"]
    runs = [(r, work) for r, work in runs if work.step == step]
    axes.set(title=f"Pipeline, step {step}", xlabel="seconds", ylabel="peer")
    if not runs:
        return
    zero_s = min(r["t"] for r, _ in runs)
    peers = sorted({r["peer"] for r, _ in runs}, key=lambda peer: _stage_and_peer(runs, peer))
    for r, work in runs:
        row = peers.index(r["peer"])
        axes.barh(row, r["s"], left=r["t"] - zero_s, height=0.7, color=COLOURS[work.kind], edgecolor="white", lw=0.4)
    for row, peer in enumerate(peers):
        updates_s = [r["t"] for r, work in runs if r["peer"] == peer and work.kind == UPDATE]
        ends_s = [r["t"] + r["s"] for r, work in runs if r["peer"] == peer and work.kind != UPDATE]
        if updates_s and ends_s and (began_s := max(ends_s)) < updates_s[0]:
            axes.barh(row, updates_s[0] - began_s, left=began_s - zero_s, height=0.7, **SYNC_STYLE)
    axes.set_yticks(range(len(peers)), [f"p{p} (stage {_stage_and_peer(runs, p)[0]})" for p in peers])
    axes.invert_yaxis()
    kinds = sorted({work.kind for _, work in runs}, key=list(NAMES).index)
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    handles.append(Patch(label="averaging, commit", **SYNC_STYLE))
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}  # it would hide bars
    axes.legend(handles=handles, fontsize=8, ncols=len(handles), **below)


def peers_per_stage(axes: Axes, views: list[dict], end_s: float) -> None:
    """The number of peers of each stage over time, from the coordinator's views."""
    zero_s = views[0]["t"]
    stages = sorted({stage for view in views for stage in view["fields"]["members"].values()})
    times = [view["t"] - zero_s for view in views] + [end_s - zero_s]
    for stage in stages:
        counts = [list(view["fields"]["members"].values()).count(stage) for view in views]
        axes.step(times, [*counts, counts[-1]], where="post", label=f"stage {stage}", color=f"C{stage}")
    axes.set(title="Peers per stage", xlabel="seconds", ylabel="peers")
    axes.set_ylim(bottom=0)
    axes.legend()


def throughput(axes: Axes, records: list[dict], zero_s: float) -> None:
    """Tokens per second of each committed step over time."""
    steps = [r for r in records if r["what"] == "report" and r["kind"] == "step"]
    times = [r["t"] - zero_s for r in steps]
    rates = [r["fields"]["tokens_per_s"] for r in steps]
    axes.plot(times, rates, ".", color=COLOURS["F"])
    top = OUTLIER * float(np.nanmedian(rates)) if rates else 0.0
    n_above = sum(rate > top for rate in rates)
    above = f" ({n_above} steps above the picture)" if n_above else ""
    axes.set(title=f"Throughput{above}", xlabel="seconds", ylabel="tokens/s")
    axes.set_ylim(bottom=0, top=top if n_above else None)


def run_under_faults(path: Path, records: list[dict]) -> None:
    """faults.png of a simulated run: peers per stage and throughput over time."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    views = [r for r in records if r["kind"] == "view"]
    peers_per_stage(axes[0], views, records[-1]["t"])
    throughput(axes[1], records, views[0]["t"])
    figure.savefig(path, dpi=100)


def churn_comparison(path: Path, runs: Sequence) -> None:
    """study.png: the throughput of several runs (churn_comparison.results.Run) under the same events, and the number of
    peers of each stage in each run. A dotted line marks a machine that leaves, a dashed line one that joins."""
    figure = Figure(figsize=(9, 3 + 1.3 * len(runs)), layout="constrained")
    axes = figure.subplots(1 + len(runs), 1, height_ratios=(2.2, *[1] * len(runs)), sharex=True)
    for i, run in enumerate(runs):
        at_s, rates = zip(*run.rates, strict=True)
        mean = run.rate(0.0, run.seconds)
        axes[0].step([*at_s, run.seconds], [*rates, rates[-1]], f"C{i}", where="post", label=f"{run.name}: {mean:.1f}")
        times, sizes = zip(*run.peers, strict=True)
        for stage, counts in enumerate(zip(*sizes, strict=True)):
            style = STAGE_LINES[stage % len(STAGE_LINES)]
            line = [*counts, counts[-1]]
            axes[1 + i].step([*times, run.seconds], line, f"C{i}{style}", where="post", label=f"stage {stage}")
        if run.moves_s:
            axes[1 + i].plot(run.moves_s, [0.3] * len(run.moves_s), "k^", ms=5, label="a peer moves")
        axes[1 + i].set(ylabel="peers", ylim=(0, 0.5 + max(map(max, sizes))))
        axes[1 + i].set_title(run.name, fontsize=9)
        axes[1 + i].legend(fontsize=7, loc="lower right", ncols=3)
    for ax, run in zip(axes, (runs[0], *runs), strict=True):
        for at, what, _ in run.events:
            if what in EVENT_LINES:
                ax.axvline(at, color="#888888", lw=0.8, ls=EVENT_LINES[what])
    axes[0].set(ylabel="samples/s", title="Throughput (mean in the legend); dotted: a machine goes, dashed: one comes")
    axes[0].set_ylim(bottom=0)
    axes[0].legend(fontsize=8, loc="lower right")
    axes[-1].set(xlabel="seconds", xlim=(0, runs[0].seconds))
    figure.savefig(path, dpi=75)


def recorded_bytes(records: list[dict]) -> dict[str, int]:
    """Payload bytes of each directed link, "src->dst", in the recorded steps."""
    return {f"{src}->{dst}": n for (src, dst), n in bytes_per_link(records).items()}


def link_bytes(axes: Axes, bytes_on_links: dict[str, int], codecs: dict[str, str], title: str) -> None:
    """Payload bytes of each directed link, and the name of its codec if it has one. A peer that was killed in its first
    second has left no record of what it sent; the title says so."""
    ends = {link: tuple(map(int, link.split("->"))) for link in bytes_on_links}
    links = sorted(ends, key=lambda link: ends[link])
    codec_of = {link: codecs.get(link, "none") for link in links}
    labels = [link.replace("->", "→") + (f"\n{name}" if name != "none" else "") for link, name in codec_of.items()]
    axes.bar(labels, [bytes_on_links[link] / 1e6 for link in links], color=COLOURS["G"])
    unrecorded = sorted({dst for _, dst in ends.values()} - {src for src, _ in ends.values()})
    without = f" (without what {', '.join(f'p{peer}' for peer in unrecorded)} sent)" if unrecorded else ""
    axes.set(title=f"{title}{without}", ylabel="MB")
    axes.tick_params(axis="x", rotation=60 if len(links) > 12 else 0)


def step_times(
    axes: Axes, metrics: list[dict], predicted_s: float | None, uncompressed_s: float | None, resumed_at: int = 0
) -> None:
    """Measured step times, and the predicted ones of this run and of the same run without codecs, in one line where the
    two are alike. A prediction is of the steps since the run was resumed."""
    training = [m for m in metrics if "eval_loss" not in m]
    axes.plot([m["step"] for m in training], [m["step_s"] for m in training], ".", color=COLOURS["F"], label="measured")
    span = (resumed_at, max(resumed_at, metrics[-1]["step"] if metrics else 0))
    if predicted_s:
        differs = uncompressed_s is not None and f"{predicted_s / uncompressed_s:.2f}" != "1.00"
        alike = "" if uncompressed_s is None or differs else ", with codecs and without"
        axes.plot(span, (predicted_s, predicted_s), color=COLOURS["B"], label=f"predicted {predicted_s:.3f} s{alike}")
        if uncompressed_s is not None and differs:
            ratio = predicted_s / uncompressed_s
            label = f"predicted without codecs {uncompressed_s:.3f} s (with them {ratio:.2f} of it)"
            axes.plot(span, (uncompressed_s, uncompressed_s), color=COLOURS["B"], ls="--", label=label)
    mark_resumed(axes, resumed_at)
    axes.set(title="Step time (steps with a held-out evaluation left out)", xlabel="step", ylabel="seconds")
    axes.set_ylim(bottom=0)
    axes.legend()


def comparison(path: Path, runs: Sequence) -> None:
    """comparison.png: step times, bytes over each stage boundary and losses of several runs (run_comparison.Run)."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    times, traffic, losses = figure.subplots(1, 3)
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        training = [m for m in run.metrics if "eval_loss" not in m]
        duration = "not timed" if run.step_s is None else f"{run.step_s:.3f} s"
        label = f"{run.name} ({run.codecs}): {duration}"
        times.plot([m["step"] for m in training], [m["step_s"] for m in training], ".", color=f"C{i}", label=label)
        xs = [boundary + (i - (len(runs) - 1) / 2) * width for boundary in run.boundary_bytes]
        traffic.bar(xs, [n / 1e6 for n in run.boundary_bytes.values()], width, color=f"C{i}", label=run.name)
        losses.plot([m["step"] for m in run.metrics], [m["loss"] for m in run.metrics], color=f"C{i}", label=run.name)
    boundaries = sorted({boundary for run in runs for boundary in run.boundary_bytes})
    traffic.set_xticks(boundaries, [f"{boundary}|{boundary + 1}" for boundary in boundaries])
    traffic.set(title="Bytes over each stage boundary", xlabel="stages", ylabel="MB a step")
    times.set(title="Step time (median in the legend)", xlabel="step", ylabel="seconds")
    times.set_ylim(bottom=0)
    times.legend()
    losses.set(title="Loss", xlabel="step", ylabel="nats per token")
    for axes in (traffic, losses):
        axes.legend()
    figure.savefig(path, dpi=100)


def simulation(path: Path, records: list[dict], parts: dict[str, float], utilisation: dict[int, float]) -> None:
    """simulation.png: the timeline of a step, the parts of its time, and the utilisation of each peer (0..1)."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(3, 1, 1))
    timeline(axes[0], records, _middle_step(records))
    stacked(axes[1], ["step"], [parts])
    axes[2].barh([f"p{peer}" for peer in utilisation], [100 * u for u in utilisation.values()], color=COLOURS["F"])
    axes[2].set(title="Utilisation per peer", xlabel="%", xlim=(0, 100))
    axes[2].invert_yaxis()
    if len(utilisation) > 32:
        for ax in (axes[0], axes[2]):
            ax.set_yticks([])
    figure.savefig(path, dpi=100)


def stacked(axes: Axes, labels: list[str], parts: list[dict[str, float]]) -> None:
    """One bar per step time, divided into its parts."""
    below = [0.0] * len(labels)
    for name, colour in zip(PARTS, PART_COLOURS, strict=True):
        heights = [max(0.0, one[f"{name}_s"]) for one in parts]
        axes.bar(labels, heights, bottom=below, color=colour, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(title="Parts of a step", ylabel="seconds")
    axes.legend(fontsize=8)


def sweep(path: Path, name: str, points: list[dict]) -> None:
    """sweep.png: step time with its parts, and utilisation, as functions of the quantity `name`."""
    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    values = [point[name] for point in points]
    left.plot(values, [point["step_s"] for point in points], "o-", color="black", label="step")
    for part, colour in zip(PARTS, PART_COLOURS, strict=True):
        left.plot(values, [max(1e-9, point["parts"][f"{part}_s"]) for point in points], color=colour, label=part)
    longest_s = max(point["step_s"] for point in points)
    left.set(title="Step time", ylabel="seconds", xlabel=name, xscale="log", yscale="log")
    left.set_ylim(longest_s / 1e4, 1.5 * longest_s)
    left.legend(fontsize=8)
    right.plot(values, [100 * point["utilisation"] for point in points], "o-", color=COLOURS["F"])
    right.set(title="Utilisation", ylabel="%", xlabel=name, xscale="log", ylim=(0, 100))
    figure.savefig(path, dpi=100)


def _middle_step(records: list[dict]) -> int | None:
    """A step without evaluation from the middle of the recording, behind the warm-up and before the end."""
    kinds: dict[int, set[str]] = {}
    for r in records:
        if r["what"] == "run":
            work = parse_work(r["work"])
            if work.step is not None:
                kinds.setdefault(work.step, set()).add(work.kind)
    steps = sorted(step for step, seen in kinds.items() if "E" not in seen) or sorted(kinds)
    return steps[len(steps) // 2] if steps else None


def _stage_and_peer(runs: list, peer: int) -> tuple[int, int]:
    return next(work.stage for r, work in runs if r["peer"] == peer), peer
