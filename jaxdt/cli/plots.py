"""The pictures of a run or a simulation, drawn from traces and metrics with matplotlib.

Figures are made without pyplot: they need no display and no choice of a backend, and nothing has to be closed.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jaxdt.cli.run_comparison import LINK_KINDS, Run
from jaxdt.protocol import events as ev
from jaxdt.protocol.attempts import Attempt, attempts, typical_attempt
from jaxdt.protocol.presence import peers_there, workers_there
from jaxdt.protocol.trace import bytes_per_link
from jaxdt.run.work import WorkKind
from jaxdt.runtime.reporting.metrics import plain_steps

COLOURS = {"F": "#4c78a8", "B": "#f58518", "E": "#b0b0b0", "G": "#72b7b2", "U": "#54a24b"}
COLOURS |= {"R": "#e45756", "N": "#b279a2", "L": "#54a24b", "P": "#72b7b2", "A": "#9d755d"}
COLOURS |= {"C": "#eeca3b"}
NAMES = {  # in the order of a legend
    "E": "evaluate",
    "F": "forward",
    "B": "backward (last stage: forward too)",
    "R": "regenerate",
    "G": "gather",
    "U": "update",
    "N": "norm",
    "L": "local step",
    "P": "lay out",
    "A": "adopt a mean",
    "C": "add a contribution",
}
PARTS = ("compute", "bubble", "transfer", "sync", "commit")
PART_COLOURS = ("#54a24b", "#b0b0b0", "#f58518", "#72b7b2", "#4c78a8")
EVENT_LINES = {"leave": ":", "join": "--"}
SYNC_STYLE = {"facecolor": "#dceeec", "edgecolor": "#72b7b2", "hatch": "///", "lw": 0.0}
OUTLIER = 5.0  # times the median rate: a step that was committed right after another one would flatten all others
VISIBLE_FRAC = 0.002  # of the width of a picture: a shorter bar is not seen
SLOW = 3.0  # times the 0.9 quantile of the step times: such a step would flatten all others
SPREAD, SPREAD_MAX = 0.02, 0.2  # of the most peers: how far apart two equal lines, and all of them, are drawn
STAGE_LINES = ("-", "--", "-.", ":")
LINKS_MAX = 30  # the names of more links cannot be read
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.12)}  # a legend inside the axes would hide bars


def report(path: Path, metrics: list[dict], records: list[dict], summary: dict) -> bool:
    """report.png of a run: loss, timeline of the pipeline, bytes per link, predicted and measured step times. If peers,
    or a pool's workers, joined, left or were absent, also how many each stage had, and the throughput over time. Data
    that were not recorded have no panel; the steps at which the run was resumed are marked. Returns False, and writes
    no file, if there is no panel at all."""
    peers, workers = peers_there(records), workers_there(records)
    resumed_at, resumes = summary.get("resumed_at") or 0, summary.get("resumes", [])
    panels: list[Callable[[Axes], None]] = []
    if metrics:
        panels.append(lambda axes: loss(axes, metrics, resumes))
    if found := attempts(records):
        panels.append(lambda axes: typical_timeline(axes, found))
    if links := summary.get("bytes_on_links") or recorded_bytes(records):
        begin = f" since step {resumed_at}" if resumed_at else ""
        title = f"Bytes per link{begin}" if summary.get("bytes_on_links") else "Bytes per link in the recorded steps"
        panels.append(lambda axes: link_bytes(axes, links, summary.get("codec_on_links", {}), title))
    if metrics:
        predicted_s, uncompressed_s = summary.get("step_s_predicted"), summary.get("step_s_predicted_uncompressed")
        panels.append(lambda axes: step_times(axes, metrics, predicted_s, uncompressed_s, resumes))
    for who, counts in (("peers", peers), ("workers", workers)):
        if len(counts) > 1:
            panels.append(functools.partial(per_stage, who=who, counts_at=counts, end_s=records[-1]["t"]))
    if len(peers) > 1 or len(workers) > 1:
        panels.append(lambda axes: throughput(axes, records, peers[0][0]))
    if not panels:
        return False
    n_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(14, 4.5 * n_rows), layout="constrained")
    all_axes = figure.subplots(n_rows, 2, squeeze=False).ravel()
    for axes, draw in zip(all_axes, panels, strict=False):
        draw(axes)
    for axes in all_axes[len(panels) :]:
        axes.remove()
    figure.savefig(path, dpi=110)
    return True


def numbers(metrics: Sequence[dict]) -> list[int]:
    """The numbers of steps as people read them, from 1; files count from 0."""
    return [m["step"] + 1 for m in metrics]


def mark_resumed(axes: Axes, resumes: Sequence[int]) -> None:
    """A line at each step at which a run was resumed; none for a run that was not."""
    for step in resumes:
        steps = f"step{'s' * (len(resumes) > 1)} {', '.join(map(str, resumes))}"
        label = f"resumed at {steps}" if step == resumes[0] else None
        axes.axvline(step, color="#888888", ls=":", label=label)


def loss(axes: Axes, metrics: list[dict], resumes: Sequence[int] = ()) -> None:
    """Loss against steps (lower axis) and against time (upper axis)."""
    axes.plot(numbers(metrics), [m["loss"] for m in metrics], color=COLOURS["F"], label="training")
    held_out = [m for m in metrics if "eval_loss" in m]
    if held_out:
        axes.plot(numbers(held_out), [m["eval_loss"] for m in held_out], "o", color=COLOURS["B"], label="held out")
    if skipped := [m for m in metrics if m.get("verdict") == "skip"]:
        label = f"skipped: {len(skipped)}, with a gradient that was not finite"
        shown = axes.get_xaxis_transform()  # the loss of such a step may be NaN
        axes.plot(numbers(skipped), [0.02] * len(skipped), "x", color=COLOURS["R"], transform=shown, label=label)
    mark_resumed(axes, resumes)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="Loss")
    axes.legend()
    if metrics:
        seconds = float(np.nanmean([m["step_s"] for m in metrics]))
        above = axes.secondary_xaxis(
            "top", functions=(lambda x: np.asarray(x) * seconds, lambda s: np.asarray(s) / seconds)
        )
        above.set_xlabel("seconds, at the mean step time")


def typical_timeline(axes: Axes, found: Sequence[Attempt]) -> None:
    """The timeline of a typical attempt of those in a trace. The title says how many steps that trace has, since a run
    traces its first ones alone."""
    attempt = typical_attempt(found)
    assert attempt is not None, "a trace with Work has attempts"
    timeline(axes, attempt)
    if (n_traced := len({other.step for other in found})) > 1:
        axes.set_title(f"Pipeline, step {attempt.step + 1}: a typical one of the {n_traced} traced")


def timeline(axes: Axes, attempt: Attempt) -> None:
    """The Work of one step, one row per peer. Between its last gradient and its update a peer averages with others."""
    runs = attempt.runs
    axes.set(title=f"Pipeline, step {attempt.step + 1}", xlabel="seconds", ylabel="peer")
    zero_s = min(r["t"] for r, _ in runs)
    peers = sorted({r["peer"] for r, _ in runs}, key=lambda peer: _stage_and_peer(runs, peer))
    for r, work in runs:
        row = peers.index(r["peer"])
        axes.barh(row, r["s"], left=r["t"] - zero_s, height=0.7, color=COLOURS[work.kind], edgecolor="white", lw=0.4)
    for row, peer in enumerate(peers):
        updates_s = [r["t"] for r, work in runs if r["peer"] == peer and work.kind == WorkKind.UPDATE]
        ends_s = [r["t"] + r["s"] for r, work in runs if r["peer"] == peer and work.kind != WorkKind.UPDATE]
        if updates_s and ends_s and (began_s := max(ends_s)) < updates_s[0]:
            axes.barh(row, updates_s[0] - began_s, left=began_s - zero_s, height=0.7, **SYNC_STYLE)
        own = sorted(((r["t"], r["t"] + r["s"], work.kind) for r, work in runs if r["peer"] == peer))
        for (_, began_s, before), (until_s, _, kind) in itertools.pairwise(own):
            if (before, kind) == (WorkKind.LAY_OUT, WorkKind.ADOPT):  # a replica that waits for the mean of its group
                axes.barh(row, until_s - began_s, left=began_s - zero_s, height=0.7, **SYNC_STYLE)
    axes.set_yticks(range(len(peers)), [f"p{p} (stage {_stage_and_peer(runs, p)[0]})" for p in peers])
    axes.invert_yaxis()
    span_s = max(r["t"] + r["s"] for r, _ in runs) - zero_s
    seen = {work.kind for r, work in runs if r["s"] > VISIBLE_FRAC * span_s}
    kinds = sorted(seen, key=list(NAMES).index)
    handles = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds]
    handles.append(Patch(label="averaging, commit", **SYNC_STYLE))
    axes.legend(handles=handles, fontsize=8, ncols=len(handles), **BELOW)


def per_stage(axes: Axes, who: str, counts_at: list[tuple[float, dict[int, int]]], end_s: float) -> None:
    """How many peers or workers of each stage are there, over time (jaxdt.protocol.presence). The lines of stages with
    as many lie beside one another."""
    zero_s = counts_at[0][0]
    times = [at_s - zero_s for at_s, _ in counts_at] + [end_s - zero_s]
    stages = list(counts_at[0][1])
    most = max(max(counts.values()) for _, counts in counts_at)
    apart = min(SPREAD, SPREAD_MAX / len(stages)) * most
    for row, stage in enumerate(stages):
        counts = [counts[stage] + row * apart for _, counts in counts_at]
        axes.step(times, [*counts, counts[-1]], where="post", label=f"stage {stage}", color=f"C{stage}")
    axes.set(title=f"{who.capitalize()} per stage", xlabel="seconds", ylabel=who)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(-apart, most + len(stages) * apart)  # lines that stay at the top lie below the frame
    axes.legend()


def throughput(axes: Axes, records: list[dict], zero_s: float) -> None:
    """Tokens per second of each committed step over time, and when peers were lost and the run went back."""
    steps = [r for r in records if r["what"] == "report" and r["kind"] == "step"]
    times = [r["t"] - zero_s for r in steps]
    rates = [r["fields"]["tokens_per_s"] for r in steps]
    axes.plot(times, rates, ".", color=COLOURS["F"])
    top = OUTLIER * float(np.nanmedian(rates)) if rates else 0.0
    n_above = sum(rate > top for rate in rates)
    above = f" ({n_above} step{'s' * (n_above != 1)} above the picture)" if n_above else ""
    axes.set(title=f"Throughput{above}", xlabel="seconds", ylabel="tokens/s")
    axes.set_ylim(bottom=0, top=top if n_above else None)
    mark_losses(axes, records, zero_s)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()


def mark_losses(axes: Axes, records: list[dict], zero_s: float) -> None:
    """A line at each moment at which the coordinator took peers for lost, or the run went back to a checkpoint."""
    reports = [r for r in records if r["what"] == "report" and r["kind"] in ("lost", "rollback")]
    lost = [r for r in reports if r["kind"] == "lost" and r["peer"] == ev.COORDINATOR]
    rollbacks = [r for r in reports if r["kind"] == "rollback" and r["peer"] == ev.COORDINATOR]
    names = ", ".join(f"p{peer}" for peer in dict.fromkeys(r["fields"]["peer"] for r in lost))
    steps = ", ".join(str(r["fields"]["to"]) for r in rollbacks)
    for found, label, style in ((lost, f"lost: {names}", ":"), (rollbacks, f"back to step {steps}", "--")):
        for i, record in enumerate(found):
            axes.axvline(record["t"] - zero_s, color=COLOURS["R"], ls=style, label=None if i else label)


def run_under_faults(path: Path, records: list[dict]) -> None:
    """faults.png of a simulated run: peers per stage and throughput over time."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    peers = peers_there(records)
    per_stage(axes[0], "peers", peers, records[-1]["t"])
    throughput(axes[1], records, peers[0][0])
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
    """Payload bytes of each directed link, and the name of its codec if it has one; of many links those with the most
    bytes. A peer that was killed in its first second has left no record of what it sent; the title says so."""
    ends = {link: tuple(map(int, link.split("->"))) for link in bytes_on_links}
    most = sorted(ends, key=lambda link: bytes_on_links[link])[-LINKS_MAX:]
    links = sorted(most, key=lambda link: ends[link])
    codec_of = {link: codecs.get(link, "none") for link in links}
    labels = [link.replace("->", "→") + (f" {name}" if name != "none" else "") for link, name in codec_of.items()]
    axes.barh(labels, [bytes_on_links[link] / 1e6 for link in links], color=COLOURS["G"])
    unrecorded = sorted({dst for _, dst in ends.values()} - {src for src, _ in ends.values()})
    without = f" (without what {', '.join(f'p{peer}' for peer in unrecorded)} sent)" if unrecorded else ""
    part = f" ({len(links)} of {len(ends)} links)" if len(links) < len(ends) else ""
    axes.set(title=f"{title}{part}{without}", xlabel="MB")
    axes.tick_params(axis="y", labelsize=10 if len(links) <= LINKS_MAX // 2 else 7)
    axes.invert_yaxis()


def step_times(
    axes: Axes,
    metrics: list[dict],
    predicted_s: float | None,
    uncompressed_s: float | None,
    resumes: Sequence[int] = (),
) -> None:
    """Measured step times, and the predicted ones of this run and of the same run without codecs, in one line where the
    two are alike. A prediction is of the steps since the run was resumed last."""
    training = plain_steps(metrics)
    steps_s = [m["step_s"] for m in training]
    axes.plot(numbers(training), steps_s, ".", color=COLOURS["F"], label="measured")
    begin = 1 + (resumes[-1] if resumes else 0)
    span = (begin, max([begin, *numbers(metrics)]))
    if predicted_s:
        differs = uncompressed_s is not None and f"{predicted_s / uncompressed_s:.2f}" != "1.00"
        alike = "" if uncompressed_s is None or differs else ", the same without codecs"
        axes.plot(span, (predicted_s, predicted_s), color=COLOURS["B"], label=f"predicted {predicted_s:.3f} s{alike}")
        if uncompressed_s is not None and differs:
            ratio = predicted_s / uncompressed_s
            label = f"predicted without codecs {uncompressed_s:.3f} s (with them {ratio:.2f} of it)"
            axes.plot(span, (uncompressed_s, uncompressed_s), color=COLOURS["B"], ls="--", label=label)
    mark_resumed(axes, resumes)
    axes.set(title="Step time (steps with a held-out evaluation left out)", xlabel="step", ylabel="seconds")
    top_s = _top_s(steps_s, at_least_s=max(predicted_s or 0.0, uncompressed_s or 0.0))
    axes.set_ylim(0, top_s)
    if top_s is not None:
        above = {m["step"] + 1: m["step_s"] for m in training if m["step_s"] > top_s}
        label = f"longer: {len(above)}, up to {max(above.values()):.1f} s"
        axes.plot(list(above), [top_s] * len(above), "^", color=COLOURS["R"], ms=8, clip_on=False, label=label)
    axes.legend(fontsize=8, ncols=3, **BELOW)


def _top_s(steps_s: list[float], at_least_s: float) -> float | None:
    """The upper end of an axis of step times, so that a few long steps do not flatten all others; None keeps the
    default end."""
    timed_s = [step_s for step_s in steps_s if math.isfinite(step_s)]
    if not timed_s:
        return None
    usual_s = max(at_least_s, float(np.quantile(timed_s, 0.9, method="lower")))
    return 1.5 * usual_s if max(timed_s) > SLOW * usual_s else None


def comparison(path: Path, runs: Sequence[Run]) -> None:
    """comparison.png: losses of several runs against tokens and against time, the bytes over each kind of link, and
    step times over time."""
    figure = Figure(figsize=(16, 10), layout="constrained")
    (by_tokens, by_time), (traffic, times) = figure.subplots(2, 2)
    width = 0.8 / len(runs)
    for i, run in enumerate(runs):
        for axes, where in ((by_tokens, "tokens"), (by_time, "at_s")):
            places = [getattr(point, where) for point in run.points]
            axes.plot(places, [point.loss for point in run.points], f"C{i}", alpha=0.35, label=f"{run.name}, training")
            places = [getattr(point, where) for point in run.evaluated]
            axes.plot(places, [p.eval_loss for p in run.evaluated], f"C{i}o-", ms=4, label=f"{run.name}, held out")
        xs = [kind + (i - (len(runs) - 1) / 2) * width for kind in range(len(LINK_KINDS))]
        traffic.bar(xs, [run.bytes_by_kind[kind] / 1e6 for kind in LINK_KINDS], width, color=f"C{i}", label=run.name)
        speed = "not timed" if run.tokens_per_s is None else f"{run.tokens_per_s:.0f} tokens/s"
        measured = {point.step for point in run.evaluated}  # a held-out loss is measured in the step after its row's
        training = [point for point in run.points if point.step - 1 not in measured]
        label = f"{run.name} ({run.codecs}): {speed}"
        times.plot([p.at_s for p in training], [p.step_s for p in training], ".", color=f"C{i}", label=label)
    by_tokens.set(title="Loss against tokens", xlabel="tokens", ylabel="nats per token")
    by_time.set(title="Loss against time", xlabel="seconds", ylabel="nats per token")
    traffic.set_xticks(range(len(LINK_KINDS)), LINK_KINDS)
    traffic.set(title="Bytes by kind of link", ylabel="MB")
    times.set(title="Step time, and tokens/s over the whole time", xlabel="seconds", ylabel="seconds")
    times.set_ylim(bottom=0)
    for axes in (by_tokens, by_time, traffic, times):
        axes.legend(fontsize=8, ncols=2, **BELOW)
    figure.savefig(path, dpi=90)


def simulation(
    path: Path, records: list[dict], parts: dict[str, float], utilisation: dict[int, float], n_steps: int = 1
) -> None:
    """simulation.png: the timeline of a step, or of a period of n_steps up to and with an average; the parts of a
    step's time, and the utilisation of each peer (0..1)."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(3, 1, 1))
    if n_steps == 1:
        typical_timeline(axes[0], attempts(records))
    else:
        found = [attempt for attempt in attempts(records) if 1 <= attempt.step <= n_steps]
        timeline(axes[0], Attempt(1, [run for attempt in found for run in attempt.runs]))
        axes[0].set_title(f"Pipeline, steps 2 to {n_steps + 1}: a period with its average")
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
    axes.legend(fontsize=8, ncols=3, **BELOW)


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


def _stage_and_peer(runs: list, peer: int) -> tuple[int, int]:
    return next(work.stage for r, work in runs if r["peer"] == peer), peer
