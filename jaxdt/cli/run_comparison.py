"""A table that compares runs by step time, bytes over each stage boundary and loss, for scripts/report.py."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.protocol.trace import bytes_per_boundary
from jaxdt.spec.codec import NONE


@dataclass(frozen=True)
class Run:
    """The figures of one run that are compared. Seconds are None if the run was too short to be timed."""

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
    return Run(
        name=name,
        codecs="+".join(codecs) or NONE,
        step_s=summary.get("step_s_measured"),
        predicted_s=summary.get("step_s_predicted"),
        tokens_per_s=summary.get("tokens_per_s"),
        boundary_bytes=bytes_per_boundary(records),
        metrics=metrics,
    )


def table(runs: Sequence[Run]) -> str:
    """One row per run. The third column is the step time divided by that of the first run."""
    rows = [("run", "codec", "step", "of the first", "predicted", "tokens/s", "boundary", "loss")]
    rows += [_row(run, runs[0]) for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(run: Run, first: Run) -> tuple[str, ...]:
    ratio = f"{run.step_s / first.step_s:.3f}" if run.step_s and first.step_s else "-"
    speed = "-" if run.tokens_per_s is None else f"{run.tokens_per_s:.0f}"
    megabytes = " ".join(f"{n_bytes / 1e6:.3f}" for n_bytes in run.boundary_bytes.values())
    traffic = f"{megabytes} MB a step" if megabytes else "-"
    loss = f"{run.metrics[-1]['loss']:.4f}" if run.metrics else "-"
    return (run.name, run.codecs, _seconds(run.step_s), ratio, _seconds(run.predicted_s), speed, traffic, loss)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
