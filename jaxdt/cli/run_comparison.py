"""A comparison of runs by what a person decides by, for scripts/report.py: the held-out loss at equal tokens and at
equal seconds, tokens per second over the whole time, and the bytes over each kind of link."""

import bisect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from jaxdt.run.codec import NONE

BETWEEN, WITHIN, OTHER = "between stages", "within stages", "other"
LINK_KINDS = (BETWEEN, WITHIN, OTHER)


@dataclass(frozen=True)
class Point:
    """The run after one step: tokens and seconds until then, and the losses of that step in nats per token."""

    step: int
    tokens: float
    at_s: float
    step_s: float
    loss: float
    eval_loss: float | None


@dataclass(frozen=True)
class Run:
    """The figures of one run that are compared. A figure is None if the run was too short for it. tokens_per_s counts
    the whole time, and bytes_by_kind all bytes, since the run was resumed last, before step resumed_at; bytes_per_token
    is of the same steps."""

    name: str
    codecs: str
    step_s: float | None
    predicted_s: float | None
    tokens_per_s: float | None
    resumed_at: int
    bytes_by_kind: dict[str, int]
    bytes_per_token: float | None
    points: list[Point] = field(default_factory=list)

    @property
    def evaluated(self) -> list[Point]:
        return [point for point in self.points if point.eval_loss is not None]


def run_of(name: str, summary: dict, metrics: Sequence[dict], stage_of: Mapping[int, int]) -> Run:
    """A run from its summary.json, its metrics.jsonl and the (last) stage of each of its peers."""
    points = points_of(metrics)
    resumed_at = summary.get("resumed_at") or 0
    by_kind = bytes_by_kind(summary.get("bytes_on_links", {}), stage_of)
    before = [point.tokens for point in points if point.step < resumed_at]
    n_tokens = points[-1].tokens - (before[-1] if before else 0.0) if points else 0.0
    return Run(
        name=name,
        codecs="+".join(sorted(set(summary.get("codec_on_links", {}).values()))) or NONE,
        step_s=summary.get("step_s_measured"),
        predicted_s=summary.get("step_s_predicted"),
        tokens_per_s=summary.get("tokens_per_s_overall"),
        resumed_at=resumed_at,
        bytes_by_kind=by_kind,
        bytes_per_token=sum(by_kind.values()) / n_tokens if n_tokens else None,
        points=points,
    )


def points_of(metrics: Sequence[dict]) -> list[Point]:
    """The points of a run. A step whose time is not known counts as a median one, in seconds and in tokens."""
    timed = [m for m in metrics if math.isfinite(m["step_s"]) and math.isfinite(m["tokens_per_s"])]
    if not timed:
        return []
    known = {m["step"]: (m["tokens_per_s"] * m["step_s"], m["step_s"]) for m in timed}
    usual = tuple(statistics.median(values) for values in zip(*known.values(), strict=True))
    sizes = [known.get(m["step"], usual) for m in metrics]
    tokens, seconds = (list(accumulate(column)) for column in zip(*sizes, strict=True))
    return [
        Point(m["step"], n, at_s, m["step_s"], m["loss"], m.get("eval_loss"))
        for m, n, at_s in zip(metrics, tokens, seconds, strict=True)
    ]


def bytes_by_kind(bytes_on_links: Mapping[str, int], stage_of: Mapping[int, int]) -> dict[str, int]:
    """Payload bytes between neighbouring stages (activations and their gradients), between peers of one stage
    (averages, and what a pool's servers and workers exchange), and over all other links."""
    totals: dict[str, int] = dict.fromkeys(LINK_KINDS, 0)
    for link, n_bytes in bytes_on_links.items():
        src, dst = (stage_of.get(int(peer)) for peer in link.split("->"))
        distance = None if src is None or dst is None else abs(src - dst)
        totals[WITHIN if distance == 0 else BETWEEN if distance == 1 else OTHER] += n_bytes
    return totals


# -------------------------------------------------------------------------------------------------------------- table


def table(runs: Sequence[Run]) -> str:
    """One row per run; "of the first" divides by the figure of the first run. Held-out losses are compared where the
    run that was evaluated last the earliest ends, on lines between evaluations."""
    at_tokens, at_s = (last_common(runs, where) for where in (_tokens, _seconds))
    tokens = "equal tokens" if at_tokens is None else f"{at_tokens:,.0f} tokens"
    seconds = "equal seconds" if at_s is None else f"{at_s:.1f} s"
    head = ["run", "codec", "tokens/s", "of the first", f"held out at {tokens}", f"held out at {seconds}"]
    head += [f"MB {kind}" for kind in LINK_KINDS] + ["bytes a token, of the first", "step", "predicted"]
    rows = [head]
    for run in runs:
        losses = [held_out(run, where, at) for where, at in ((_tokens, at_tokens), (_seconds, at_s))]
        cells = [run.name, run.codecs, _cell(run.tokens_per_s, ".0f"), _ratio(run.tokens_per_s, runs[0].tokens_per_s)]
        cells += [_cell(loss, ".4f") for loss in losses]
        cells += [f"{run.bytes_by_kind[kind] / 1e6:.3f}" for kind in LINK_KINDS]
        cells += [_ratio(run.bytes_per_token, runs[0].bytes_per_token), _cell(run.step_s, ".3f", " s")]
        rows.append([*cells, _cell(run.predicted_s, ".3f", " s")])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        f"{run.name}: tokens/s and bytes are since step {run.resumed_at}, at which it was resumed"
        for run in runs
        if run.resumed_at
    ]
    return "\n".join(lines)


def last_common(runs: Sequence[Run], where: Callable[[Point], float]) -> float | None:
    """The last place (in tokens or seconds) until which all runs with evaluations were evaluated; None without any."""
    return min((where(run.evaluated[-1]) for run in runs if run.evaluated), default=None)


def held_out(run: Run, where: Callable[[Point], float], at: float | None) -> float | None:
    """The held-out loss of a run at that place, on the line between two evaluations; None before the first one."""
    places = [where(point) for point in run.evaluated]
    losses = [point.eval_loss for point in run.evaluated if point.eval_loss is not None]
    if at is None or not places or not places[0] <= at <= places[-1]:
        return None
    k = bisect.bisect_left(places, at)
    if places[k] == at:
        return losses[k]
    part = (at - places[k - 1]) / (places[k] - places[k - 1])
    return losses[k - 1] + part * (losses[k] - losses[k - 1])


def _tokens(point: Point) -> float:
    return point.tokens


def _seconds(point: Point) -> float:
    return point.at_s


def _ratio(value: float | None, first: float | None) -> str:
    return f"{value / first:.3f}" if value is not None and first else "-"


def _cell(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{spec}}{unit}"
