"""configs/delay/README.md: what a delay of one update costs in loss, and what the settings cost that make it cheap."""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import filled

from jaxdt.cli import local_run

FILE = "losses.jsonl"
TEMPLATE = local_run.SCRIPTS.parent / "configs/delay/page.md"
CONFIG = "configs/reference_2000.py"
STEPS = 1000
SETTINGS = ((3e-4, 0.99, 0.03), (3e-4, 0.95, 0.15), (3e-3, 0.9, 0.0))  # lr, b1, gradient_frac; the last: the config's
SEEDS = (0, 1, 2)
DELAY_AFTER = 200
T95 = {2: 12.7062, 3: 4.30265, 4: 3.18245, 5: 2.77645}  # two-sided 95 % of Student's t, by the number of seeds
DECIDING = ("config", "steps", "lr", "b1", "gradient_frac", "seed", "delay")  # fields that name a run


@dataclass(frozen=True)
class Row:
    """The held-out losses of one setting by seed: without a delay, and with one after the first steps."""

    config: str
    steps: int
    settings: tuple[float, float, float]
    losses: dict[int, tuple[float, float]]

    @property
    def prompt(self) -> float:
        """The mean without a delay."""
        return statistics.fmean(pair[0] for pair in self.losses.values())

    @property
    def costs(self) -> list[float]:
        """The cost of the delay in loss, one value per seed."""
        return [delayed - prompt for prompt, delayed in self.losses.values()]

    def price(self, best: "Row") -> float:
        """The loss of this row less that of `best`, both without a delay, in the mean of the seeds that both have."""
        seeds = sorted(self.losses.keys() & best.losses.keys())
        return statistics.fmean(self.losses[seed][0] - best.losses[seed][0] for seed in seeds)

    @property
    def cost(self) -> str:
        """The mean with half of its 95 % interval, if there are several seeds."""
        mean, n = statistics.fmean(self.costs), len(self.costs)
        if n == 1:
            return f"{mean:+.4f}"
        return f"{mean:+.4f} +- {T95[n] * statistics.stdev(self.costs) / math.sqrt(n):.4f}"


def read(path: Path) -> list[dict[str, Any]]:
    """The runs in a file of raw data; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add(path: Path, run: dict[str, Any]) -> None:
    """Add a run to a file of raw data. It takes the place of an earlier one of the same name."""
    kept = [old for old in read(path) if any(old[field] != run[field] for field in DECIDING)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*kept, run]))


def rows_of(runs: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each setting, with the seeds for which both runs are there."""
    found: dict[tuple, dict[int, dict[int, float]]] = {}
    for run in runs:
        key = (run["config"], run["steps"], (run["lr"], run["b1"], run["gradient_frac"]))
        found.setdefault(key, {}).setdefault(run["seed"], {})[run["delay"]] = run["held_out"]
    rows = []
    for (config, steps, settings), seeds in found.items():
        losses = {seed: (arms[0], arms[1]) for seed, arms in sorted(seeds.items()) if len(arms) == 2}
        if losses:
            rows.append(Row(config, steps, settings, losses))
    return rows


def page(folder: Path) -> str:
    rows = rows_of(read(folder / FILE))
    sections = []
    for config, steps in dict.fromkeys((row.config, row.steps) for row in rows):
        sections.append(f"## `{config}`, loss after {steps} steps\n")
        sections.append(table([row for row in rows if (row.config, row.steps) == (config, steps)]))
    return filled(TEMPLATE.read_text(), sys.modules[__name__], dict(sections="\n".join(sections), rows=rows))


def table(rows: Sequence[Row]) -> str:
    """The rows of one config, and the price of the row in which the delay costs least."""
    best = min(rows, key=lambda row: row.prompt)
    lines = [
        "| `lr`, `b1`, `gradient_frac` | seeds | without delay | with delay | the delay costs | price of the row |"
    ]
    lines += ["|---|---|---|---|---|---|"]
    for row in rows:
        columns = [", ".join(f"{pair[arm]:.3f}" for pair in row.losses.values()) for arm in (0, 1)]
        seeds = ", ".join(map(str, row.losses))
        lines.append(f"| {_named(row)} | {seeds} | {' | '.join(columns)} | {row.cost} | {row.price(best):+.3f} |")
    return "\n".join(lines) + "\n" + price_sentence(rows)


def price_sentence(rows: Sequence[Row]) -> str:
    """A sentence about the loss without a delay of the row in which the delay costs least."""
    if len(rows) < 2:
        return ""
    free = min(rows, key=lambda row: statistics.fmean(row.costs))
    best = min(rows, key=lambda row: row.prompt)
    cost, price = statistics.fmean(free.costs), free.price(best)
    if free is best:
        return f"\nThe delay costs least, {cost:.4f}, with {_named(free)}, which is also the best without a delay.\n"
    return (
        f"\nThe delay costs least, {cost:.4f}, with {_named(free)}. That is not for nothing: without a delay this row "
        f"ends {price:.3f} above {_named(best)}, {price / abs(cost):.0f} times as much as the delay costs it.\n"
    )


def _named(row: Row) -> str:
    lr, b1, frac = row.settings
    return f"{lr:g}, {b1:g}, {frac:g}"


def commands() -> str:
    return "\n".join(
        f"python scripts/experiments/delay_loss.py --config={CONFIG} --config.train.steps={STEPS} "
        f"--config.optim.decay_steps={STEPS} --config.sync.delay_after_steps={DELAY_AFTER} "
        f"--config.optim.lr={lr:g} --config.optim.b1={b1:g} --config.optim.gradient_frac={frac:g} "
        f"--seeds={','.join(map(str, SEEDS))} --out=configs/delay"
        for lr, b1, frac in SETTINGS
    )


def missing_sentence(rows: Sequence[Row]) -> str:
    """Which rows of the commands are not there yet."""
    present = {row.settings for row in rows if row.config == CONFIG and len(row.losses) >= len(SEEDS)}
    left = [f"{lr:g}, {b1:g}, {frac:g}" for lr, b1, frac in SETTINGS if (lr, b1, frac) not in present]
    return f"Rows of `{CONFIG}` that have not been run with all seeds: {'; '.join(left)}.\n" if left else ""
