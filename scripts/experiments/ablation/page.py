"""The page of an ablation: its tables, and the numbers of SWARM's Tables 7 and 8 beside them. All sentences with
numbers are written from the rows."""

import statistics
import sys
from collections.abc import Iterable

from experiments.ablation.grid import BASELINE, AblationConfig
from experiments.ablation.report import Row, markdown
from experiments.page import ROOT, filled, markdown_table, spread

from jaxdt.run.config import RunConfig

TEMPLATE = ROOT / "configs/ablation/page.md"
CUTS = ((2, 2), (4, 2), (2, 4), (4, 4))  # stages, ratio
# Perplexities of SWARM's Table 8 in the order of CUTS, one seed each; App. J. Its int8 is the dynamic map.
TABLE_8 = {
    "none": (19.7, 19.7, 19.7, 19.7),
    "int8": (19.6, 19.7),
    "bottleneck": (19.5, 21.7, 21.6, 28.9),
    "maxout": (19.6, 21.4, 20.5, 21.3),
}
# Steps to perplexity 22 over those without compression, of SWARM's Table 7: 2 stages, 2x.
TABLE_7 = {"none": 1.0, "int8": 0.97, "bottleneck": 1.26, "maxout": 1.28}


def text(config: RunConfig, ablation: AblationConfig, table: list[Row], about: str) -> str:
    """The page. `table` has the cases of configs/ablation.py or a part of them; `about` says machine, load, commit."""
    rows = {(row.case.method, row.case.stages, row.case.ratio): row for row in table}
    values = dict(config=config, ablation=ablation, table=table, about=about, rows=rows)
    values["tables"] = markdown(config, ablation, table)
    return filled(TEMPLATE.read_text(), sys.modules[__name__], values)


def _row(rows: dict[tuple[str, int, int], Row], method: str, stages: int, ratio: int) -> Row | None:
    return rows.get((method, stages, 1 if method == BASELINE else ratio))


def _perplexities(rows: dict[tuple[str, int, int], Row]) -> str:
    lines = []
    for method, paper in TABLE_8.items():
        cells = []
        for n, (stages, ratio) in enumerate(CUTS):
            row = _row(rows, method, stages, ratio)
            cells.append(f"{paper[n]} / {_mean(row.perplexities):.2f}" if n < len(paper) and row else "-")
        lines.append([method, *cells])
    return markdown_table(["perplexity, paper / ours", *(f"{s} stages {r}x" for s, r in CUTS)], lines)


def _steps(rows: dict[tuple[str, int, int], Row]) -> str:
    base = _row(rows, BASELINE, 2, 2)
    ours = []
    for method in TABLE_7:
        row = _row(rows, method, 2, 2)
        ratios = (
            [a / b for a, b in zip(row.steps_to_target, base.steps_to_target, strict=True) if a and b]
            if row and base
            else []
        )
        ours.append(spread(ratios) if ratios else "-")
    head = ["steps to a target over those without compression, 2 stages 2x", *TABLE_7]
    paper = ["paper, Table 7: to perplexity 22", *map(str, TABLE_7.values())]
    return markdown_table(head, [paper, ["ours, seed by seed", *ours]])


def _headline(rows: dict[tuple[str, int, int], Row]) -> str:
    """Whether Table 8's headline comes out: with 4 stages at 4x maxout is far ahead of bottleneck."""
    bottleneck, maxout = (_row(rows, method, 4, 4) for method in ("bottleneck", "maxout"))
    if bottleneck is None or maxout is None:
        return ""
    differences = [a - b for a, b in zip(bottleneck.loss_differences, maxout.loss_differences, strict=True)]
    n_ahead = sum(difference > 0 for difference in differences)
    paper = (
        f"With 4 stages at 4x the paper has bottleneck at {TABLE_8['bottleneck'][3]} and maxout at "
        f"{TABLE_8['maxout'][3]}."
    )
    ours = (
        f"Ours are {spread(bottleneck.perplexities)} and {spread(maxout.perplexities)}; the loss of bottleneck is "
        f"{spread(differences, 3, '+')} nats above maxout's, and maxout is ahead with {n_ahead} of "
        f"{len(differences)} seeds."
    )
    order = "comes out with all seeds" if n_ahead == len(differences) else "is not reproduced"
    return f"The order in the headline of Table 8 {order}. {paper} {ours}\n"


def _times(ablation: AblationConfig, table: list[Row]) -> str:
    """A text about how much the measured seconds vary from measurement to measurement."""
    spreads = [statistics.stdev(step_s) / _mean(step_s) for row in table for step_s in row.step_s[-1:]]
    return (
        f"The parts of a step are CPU seconds, medians of several calls, measured {ablation.measurements} times one "
        "after the other; +- of a time is the standard deviation over these. On the fastest links it is "
        f"{_mean(spreads):.1%} of a row's time in the mean and {max(spreads):.1%} at the worst. What a slow link adds "
        "is simulated from bytes and has no such noise.\n"
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
