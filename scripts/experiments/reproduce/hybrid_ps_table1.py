"""The hybrid parameter-server paper's Table 1: cost of a model, days of training, and whether they fit."""

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.reproduce.results import Job, Results, described
from matplotlib.figure import Figure

PRINTED = {  # cost (GFLOPs in the head, GMACs in the caption), days of 100 epochs on one RTX 4070
    "ALBERT": (17.68, 24.9),
    "BERT": (22.79, 32.1),
    "LLAMA-70B": (515.52, 726.1),
    "GPT-3-175B": (1279.66, 1902.2),
}
EPOCHS, DAY_S = 100, 86400.0
RTX_4070_FLOPS = 29.15e12  # peak, fp32, from the vendor's data sheet
TRAINING = 3  # forward and backward, in forwards
SAME, ALIKE = 0.01, 0.05  # ratios, and lengths, that differ by less count as one


@dataclass(frozen=True)
class Shape:
    """A model that a row may mean. d_kv: width of keys and values; n_ff: matrices of a feed-forward layer."""

    row: str
    name: str
    n_layers: int
    d_model: int
    d_ff: int
    d_kv: int
    n_ff: int = 2

    @property
    def macs(self) -> float:
        """Multiplications of a token with the weights of all layers: no embedding, head or attention scores."""
        attention = 2 * self.d_model * (self.d_model + self.d_kv)
        return float(self.n_layers * (attention + self.n_ff * self.d_model * self.d_ff))


SHAPES = (
    Shape("ALBERT", "ALBERT-base", 12, 768, 3072, 768),
    Shape("ALBERT", "ALBERT-xxlarge", 12, 4096, 16384, 4096),
    Shape("BERT", "BERT-base", 12, 768, 3072, 768),
    Shape("BERT", "BERT-large", 24, 1024, 4096, 1024),
    Shape("LLAMA-70B", "Llama 2 70B", 80, 8192, 28672, 1024, 3),
    Shape("GPT-3-175B", "GPT-3 175B", 96, 12288, 49152, 12288),
)


def days_of_cost(row: str, results: Results) -> list[float]:
    """Days per unit of cost, and the sequences of an epoch at the card's peak if the unit is a GFLOP, and if a GMAC."""
    cost, days = PRINTED[row]
    return results.get(
        Job(f"row={row} cost={cost} days={days} flops={RTX_4070_FLOPS:g}", 0, partial(_days, cost, days))
    )


def _days(cost: float, days: float) -> list[float]:
    sequences = days * DAY_S * RTX_4070_FLOPS / (EPOCHS * TRAINING * cost * 1e9)
    return [days / cost, sequences, sequences / 2]


def tokens(shape: Shape, results: Results) -> list[float]:
    """Multiplications of a token, and the tokens of a sequence whose forward costs as printed, in FLOP and in MACs."""
    cost, _ = PRINTED[shape.row]
    return results.get(Job(f"{described(shape)} cost={cost}", 0, partial(_tokens, shape, cost)))


def _tokens(shape: Shape, cost: float) -> list[float]:
    return [shape.macs, cost * 1e9 / (2 * shape.macs), cost * 1e9 / shape.macs]


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    days = {row: days_of_cost(row, results) for row in PRINTED}
    lengths = {shape: tokens(shape, results) for shape in SHAPES}
    usual = statistics.median_low(value[0] for value in days.values())
    pictures = {"hybrid_ps_table1.png": draw(lengths)}
    return dict(pictures=pictures, lengths=lengths, **by_usual_days(days, usual), **by_length(lengths))


def day_rows(days: dict[str, list[float]], usual: float) -> list[list]:
    return [
        [row, *PRINTED[row], f"{ratio:.4f}", PRINTED[row][0] * usual, f"{100 * (ratio / usual - 1):+.1f}", *sequences]
        for row, (ratio, *sequences) in days.items()
    ]


def by_usual_days(days: dict[str, list[float]], usual: float) -> dict[str, Any]:
    """How many rows have the same ratio, and what those without it would have."""
    fit = [row for row, (ratio, *_) in days.items() if abs(ratio / usual - 1) < SAME]
    others = ", ".join(
        f"{row} has {PRINTED[row][1]:g} days where {PRINTED[row][0] * usual:.1f} follow from its cost"
        for row in days
        if row not in fit
    )
    return dict(days=days, by_usual_days_fit=fit, by_usual_days_others=others, usual=usual)


def token_rows(lengths: dict[Shape, list[float]]) -> list[list]:
    return [[shape.row, shape.name, macs / 1e9, flop, mac] for shape, (macs, flop, mac) in lengths.items()]


def by_length(lengths: dict[Shape, list[float]]) -> dict[str, Any]:
    """The nearest that the four rows come to one length of sequences."""
    by_row = {row: [n[2] for shape, n in lengths.items() if shape.row == row] for row in PRINTED}
    ranges = "; ".join(f"{row} {' or '.join(f'{n:.1f}' for n in found)}" for row, found in by_row.items())
    target = by_row["GPT-3-175B"][0]
    nearest = {row: min(found, key=lambda n: abs(n / target - 1)) for row, found in by_row.items()}
    fit = [row for row, n in nearest.items() if abs(n / target - 1) < ALIKE]
    others = [row for row in PRINTED if row not in fit]
    end = f"no reading gives {', '.join(others)} such a length" if others else "one length fits all rows"
    low, high = (most(nearest[row] for row in fit) for most in (min, max))
    return dict(
        by_length_end=end,
        by_length_fit=fit,
        by_length_high=high,
        by_length_low=low,
        ranges=ranges,
    )


def draw(lengths: dict[Shape, list[float]]) -> Figure:
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    ax = figure.subplots()
    names = [shape.name for shape in lengths]
    for column, label in ((2, "if the unit is a MAC"), (1, "if it is a FLOP")):
        ax.plot([values[column] for values in lengths.values()], names, "o" if column == 2 else "s", label=label)
    ax.set(xscale="log", xlabel="tokens of a sequence whose forward costs as printed")
    ax.invert_yaxis()
    ax.legend(fontsize=8)
    return figure
