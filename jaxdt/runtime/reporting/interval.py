"""The mean of a few runs with its 95 % confidence interval."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

SEEDS = range(10)
T95 = 2.262157  # two-sided 95 % quantile of Student's t with 9 degrees of freedom


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % confidence interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        spread = f" +- {self.half:.2g}" if self.half > 5e-5 * abs(self.mean) else ""
        return f"{self.mean:.4g}{spread}"


def interval(values: Iterable[float]) -> Interval:
    """The interval of one value per seed, by Student's t."""
    runs = list(values)
    if len(runs) != len(SEEDS):
        raise ValueError(f"got {len(runs)} values, expected one for each of {len(SEEDS)} seeds")
    return Interval(statistics.fmean(runs), T95 * statistics.stdev(runs) / math.sqrt(len(runs)))


def paired_ratio(values: Iterable[float], others: Iterable[float]) -> Interval:
    """The interval of `values` divided by `others`, seed by seed."""
    return interval(value / other for value, other in zip(values, others, strict=True))


def sentence(one: str, other: str, rates: Mapping[str, Sequence[float]]) -> str:
    """A sentence that compares the rates of two named systems, seed by seed."""
    ratio = paired_ratio(rates[one], rates[other])
    verdict = "more" if ratio.low > 1 else "less" if ratio.high < 1 else "no difference is shown"
    n_ahead = sum(a > b for a, b in zip(rates[one], rates[other], strict=True))
    return (
        f"`{one}` over `{other}`: {ratio.mean:.3f} (95 % interval {ratio.low:.3f} to {ratio.high:.3f}), {verdict}; "
        f"ahead with {n_ahead} of {len(SEEDS)} seeds."
    )
