"""Runs beside one another: step time, bytes over each stage boundary, loss. Part of scripts/report.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.protocol.trace import bytes_per_boundary
from jaxdt.spec.codec import NONE


@dataclass(frozen=True)
class Run:
    """What is compared. Seconds are None for a run that was too short to be timed."""

    name: str
    codecs: str
    step_s: float | None
    predicted_s: float | None
    tokens_per_s: float | None
    boundary_bytes: dict[int, float]
    metrics: list[dict]


def run_of(name: str, summary: dict, metrics: list[dict], records: list[dict]) -> Run:
    """A run from its summary.json, its metrics.jsonl and its merged trace."""
    codecs = sorted(set(summary.get("codec_on_links", {}).values()))
    seconds = (summary.get(field) for field in ("step_s_measured", "step_s_predicted", "tokens_per_s"))
    return Run(name, "+".join(codecs) or NONE, *seconds, bytes_per_boundary(records), metrics)


def table(runs: Sequence[Run]) -> str:
    """A row per run; step times also as parts of the first one's."""
    rows = [("run", "codec", "step", "of the first", "predicted", "tokens/s", "boundary", "loss")]
    rows += [_row(run, runs[0]) for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(run: Run, first: Run) -> tuple[str, ...]:
    ratio = f"{run.step_s / first.step_s:.3f}" if run.step_s and first.step_s else "-"
    speed = "-" if run.tokens_per_s is None else f"{run.tokens_per_s:.0f}"
    crossing = " ".join(f"{n_bytes / 1e6:.3f}" for n_bytes in run.boundary_bytes.values())
    loss = f"{run.metrics[-1]['loss']:.4f}" if run.metrics else "-"
    times = _seconds(run.step_s), ratio, _seconds(run.predicted_s)
    return run.name, run.codecs, *times, speed, f"{crossing} MB a step" if crossing else "-", loss


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
