"""What delayed updates cost in loss: the same training with sync.delay 0 and 1, in one process.

Both arms see the same tokens and apply the same number of updates. The page's rows are settings of
configs/reference_2000.py with half of its steps; a row takes three seeds twice, about 35 CPU minutes. With --config the
run is that config's, such as configs/baseline.py with --config.sync.delay_after_steps=50, and only that one. Its
stages and codec are not used: stages do not change what is computed, and a codec would change it a little. The result
has, by setting:

  held_out, training   losses by arm and seed: held-out after the last update, training over the last 20 steps
  spread, deviation    of the losses with delay 0: largest less smallest, and standard deviation
  gap                  mean with delay 1 less mean with delay 0
  within               whether the gap is at most the spread
"""

import functools
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from absl import flags
from comparison import Comparison, Given, Line
from ml_collections import config_flags
from one_process import Batches, inputs_of, whole_model
from page import ROOT, markdown_table

from jaxdt.cli import config_flag, run_inputs
from jaxdt.model.chain import Chain
from jaxdt.model.data import TokenFile
from jaxdt.model.stage import StageFunctions
from jaxdt.run.config import RunConfig

CONFIG = "configs/reference_2000.py"
STEPS = 1000
SETTINGS = ((3e-4, 0.99, 0.03), (3e-4, 0.95, 0.15), (3e-3, 0.9, 0.0))  # lr, b1, gradient_frac; the last: the config's
SEEDS = (0, 1, 2)
DELAY_AFTER = 200
LAST_STEPS = 20  # the training loss is a mean over them
ARMS = ("delay 0", "delay 1")
T95 = {2: 12.7062, 3: 4.30265, 4: 3.18245, 5: 2.77645}  # two-sided 95 % of Student's t, by the number of seeds


# ----------------------------------------------------------------------------------------------------------- the runs


@functools.cache
def configs() -> list[tuple[str, RunConfig, TokenFile]]:
    """(file, config, tokens) of each row that is made."""
    if config_flag.is_given():
        inputs = config_flag.inputs(run_inputs.RunOptions())
        return [(str(config_flags.get_config_filename(flags.FLAGS["config"])), inputs.config, inputs.data)]
    rows = []
    for lr, b1, frac in SETTINGS:
        steps = {"train.steps": STEPS, "optim.decay_steps": STEPS, "sync.delay_after_steps": DELAY_AFTER}
        inputs = inputs_of(CONFIG, steps | {"optim.lr": lr, "optim.b1": b1, "optim.gradient_frac": frac})
        rows.append((CONFIG, inputs.config, inputs.data))
    return rows


def case(file: str, config: RunConfig, seed: int, delay: int) -> Line:
    optim = config.optim
    settings = dict(lr=optim.lr, b1=optim.b1, gradient_frac=optim.gradient_frac)
    return dict(config=file, steps=config.train.steps, **settings, seed=seed, delay=delay)


def cases(given: Given) -> list[Line]:
    every = itertools.product(configs(), given.seeds, range(len(ARMS)))
    return [case(file, config, seed, delay) for (file, config, _), seed, delay in every]


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    for file, config, data in configs():
        functions = whole_model(config)
        for seed, delay in itertools.product(given.seeds, range(len(ARMS))):
            line = case(file, config, seed, delay)
            if line in left:
                own = replace(config, train=replace(config.train, seed=seed), sync=replace(config.sync, delay=delay))
                held_out, training = trained(own, functions, data)
                yield line | dict(held_out=round(held_out, 5), training=round(training, 5))


def trained(config: RunConfig, functions: StageFunctions, data: TokenFile) -> tuple[float, float]:
    """(held-out loss after all updates, training loss of the last steps), nats per token. The gradient of a step is
    that of the version that the delay prescribes; the update is applied to the newest version."""
    batches, chain = Batches(config, data), Chain([functions], config.train.seed, config.optim.clip_norm)
    before, losses = list(chain.params), list[float]()
    for step in range(config.train.steps):
        params = list(chain.params)
        losses.append(chain.step(batches.of_step(step), params if config.delay.version_of(step) == step else before))
        before = params
    return chain.evaluate(batches.held_out()), statistics.mean(losses[-LAST_STEPS:])


def result(lines: Sequence[Line]) -> dict[str, Any]:
    """By setting, what the arms come to. Training losses are there for runs that have kept them."""
    found: dict[str, Any] = {}
    for row in rows_of(lines):
        of_row = [line for line in lines if row.has(line)]
        found[row.name] = {"config": row.config, "steps": row.steps, "seeds": [*row.losses]}
        for measure in ("held_out", "training"):
            arms = [[line[measure] for line in of_row if line["delay"] == n and measure in line] for n in (0, 1)]
            if len(arms[0]) == len(arms[1]) > 1:
                found[row.name][measure] = dict(zip(ARMS, arms, strict=True)) | compared(*arms)
    return found


def compared(prompt: Sequence[float], delayed: Sequence[float]) -> dict[str, float | bool]:
    spread = max(prompt) - min(prompt)
    gap = statistics.mean(delayed) - statistics.mean(prompt)
    return {"spread": spread, "deviation": statistics.stdev(prompt), "gap": gap, "within": gap <= spread}


# ----------------------------------------------------------------------------------------------------------- the page


@dataclass(frozen=True)
class Row:
    """The held-out losses of one setting by seed: without a delay, and with one after the first steps."""

    config: str
    steps: int
    settings: tuple[float, float, float]
    losses: Mapping[int, tuple[float, float]]

    @property
    def name(self) -> str:
        return "{:g}, {:g}, {:g}".format(*self.settings)

    def has(self, line: Line) -> bool:
        """Whether a run is one of this row."""
        return key_of(line) == (self.config, self.steps, self.settings) and line["seed"] in self.losses

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


def key_of(line: Line) -> tuple[str, int, tuple[float, float, float]]:
    return line["config"], line["steps"], (line["lr"], line["b1"], line["gradient_frac"])


def rows_of(lines: Sequence[Line]) -> list[Row]:
    """A row for each setting, with the seeds for which both runs are there."""
    found: dict[tuple, dict[int, dict[int, float]]] = {}
    for line in lines:
        found.setdefault(key_of(line), {}).setdefault(line["seed"], {})[line["delay"]] = line["held_out"]
    rows = []
    for key, seeds in found.items():
        losses = {seed: (arms[0], arms[1]) for seed, arms in sorted(seeds.items()) if len(arms) == 2}
        if losses:
            rows.append(Row(*key, losses))
    return rows


def values(folder: Path, out: Path) -> dict[str, Any]:
    rows = rows_of(COMPARISON.read(folder)[1])
    sections = []
    for config, steps in dict.fromkeys((row.config, row.steps) for row in rows):
        sections.append(f"## `{config}`, loss after {steps} steps\n")
        sections.append(table([row for row in rows if (row.config, row.steps) == (config, steps)]))
    return dict(sections="\n".join(sections), rows=rows)


def table(rows: Sequence[Row]) -> str:
    """The rows of one config, and the price of the row in which the delay costs least."""
    best = min(rows, key=lambda row: row.prompt)
    lines = []
    for row in rows:
        columns = [", ".join(f"{pair[arm]:.3f}" for pair in row.losses.values()) for arm in (0, 1)]
        lines.append([row.name, ", ".join(map(str, row.losses)), *columns, row.cost, f"{row.price(best):+.3f}"])
    head = [
        "`lr`, `b1`, `gradient_frac`",
        "seeds",
        "without delay",
        "with delay",
        "the delay costs",
        "price of the row",
    ]
    return markdown_table(head, lines) + "\n" + price_sentence(rows)


def price_sentence(rows: Sequence[Row]) -> str:
    """A sentence about the loss without a delay of the row in which the delay costs least."""
    if len(rows) < 2:
        return ""
    free = min(rows, key=lambda row: statistics.fmean(row.costs))
    best = min(rows, key=lambda row: row.prompt)
    cost, price = statistics.fmean(free.costs), free.price(best)
    if free is best:
        return f"\nThe delay costs least, {cost:.4f}, with {free.name}, which is also the best without a delay.\n"
    return (
        f"\nThe delay costs least, {cost:.4f}, with {free.name}. That is not for nothing: without a delay this row "
        f"ends {price:.3f} above {best.name}, {price / abs(cost):.0f} times as much as the delay costs it.\n"
    )


def missing_sentence(rows: Sequence[Row]) -> str:
    """Which rows of the command are not there yet."""
    present = {row.settings for row in rows if row.config == CONFIG and len(row.losses) >= len(SEEDS)}
    left = [f"{lr:g}, {b1:g}, {frac:g}" for lr, b1, frac in SETTINGS if (lr, b1, frac) not in present]
    return f"Rows of `{CONFIG}` that have not been run with all seeds: {'; '.join(left)}.\n" if left else ""


COMPARISON = Comparison(
    page=ROOT / "configs/delay",
    cases=cases,
    made=made,
    values=values,
    result=result,
    n_seeds=len(SEEDS),
    seeds_min=2,
    file="losses.jsonl",
    fields=("config", "steps", "lr", "b1", "gradient_frac", "seed", "delay", "held_out"),
)
