"""configs/study: the raw data of the runs of ten seeds, and the page made of them, numbers in sentences included."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from page import filled

from churn_comparison import results
from churn_comparison.results import Run
from jaxdt.cli import local_run, plots
from jaxdt.runtime.reporting.interval import SEEDS, interval, sentence

RAW = "runs.jsonl"
TEMPLATE = local_run.SCRIPTS.parent / "configs/study/page.md"
PICTURED_SEED = SEEDS[0]


def write_raw(folder: Path, by_seed: Sequence[Sequence[Run]], about: str) -> None:
    """Write the runs of all seeds; `about` says machine, load and commit."""
    lines = [{"about": about}]
    lines += [{"seed": seed, "run": asdict(run)} for seed, runs in zip(SEEDS, by_seed, strict=True) for run in runs]
    (folder / RAW).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_raw(folder: Path) -> tuple[str, list[list[Run]]]:
    """(about, the runs of each seed in the order in which they were made)."""
    head, *lines = (json.loads(line) for line in (folder / RAW).read_text().splitlines())
    by_seed: list[list[Run]] = [[] for _ in SEEDS]
    for line in lines:
        by_seed[line["seed"]].append(_run(line["run"]))
    return head["about"], by_seed


def _run(fields: dict) -> Run:
    """A run from its line. JSON has neither tuples nor integers as keys."""
    by_step = {name: {int(step): value for step, value in fields[name].items()} for name in ("ends_s", "losses")}
    lists = dict(
        events=tuple(map(tuple, fields["events"])),
        peers=tuple((at_s, tuple(sizes)) for at_s, sizes in fields["peers"]),
        moves_s=tuple(fields["moves_s"]),
    )
    return Run(**(fields | by_step | lists))


def write(folder: Path) -> None:
    """Write README.md and study.png from the raw data in `folder`."""
    about, by_seed = read_raw(folder)
    (folder / "README.md").write_text(text(about, by_seed))
    plots.churn_comparison(folder / "study.png", _sorted(by_seed[SEEDS.index(PICTURED_SEED)]))


def text(about: str, by_seed: Sequence[Sequence[Run]]) -> str:
    compared = [results.compare(runs) for runs in by_seed]
    figures = [found["runs"] for found in compared]
    names = sorted(figures[0])
    rates = {name: [own[name]["samples_per_s"] for own in figures] for name in names}
    values = dict(about=about, figures=figures, names=names, sentences=_sentences(rates))
    values |= dict(means=_means(figures, names), checks=_checks(compared, by_seed))
    return filled(TEMPLATE.read_text(), sys.modules[__name__], values)


def _sorted(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.name)


def _sentences(rates: dict[str, list[float]]) -> list[str]:
    names = list(rates)
    pairs = [(one, other) for i, other in enumerate(names) for one in names[i + 1 :]]
    return [sentence(one, other, rates) for one, other in pairs]


def _means(figures: Sequence[dict], names: Sequence[str]) -> list[list]:
    """Means over seeds of what else the runs had."""
    whats = {
        "seconds in which a stage had two peers more than the other": "uneven_s",
        "steps": "steps",
        "moves of peers between stages": "moves",
        "machines that left": "leaves",
        "machines that came": "joins",
        "machines spared, since each was alone at its stage": "spared",
    }
    return [[what, *(interval(own[name][field] for own in figures) for name in names)] for what, field in whats.items()]


def _checks(compared: Sequence[dict], by_seed: Sequence[Sequence[Run]]) -> str:
    """Whether the runs of a seed had the same events and losses, and how busy the machine was."""
    runs = [run for own in by_seed for run in own]
    steps = sum(found["steps_compared"] for found in compared)
    difference = max(found["loss_difference"] for found in compared)
    bad = [
        f"seed {seed}: {'; '.join(found['bad'])}" for seed, found in zip(SEEDS, compared, strict=True) if found["bad"]
    ]
    busy = [run.cores_busy for run in runs]
    lines = [
        f"Losses of the {steps} steps that all three runs of a seed did differ by at most {difference:.1e} (relative), "
        "whoever was killed.",
        f"What a comparison must not show: {'. '.join(bad)}." if bad else "All runs of a seed had the same events.",
        f"The process that killed and started others was held up for {max(run.held_up_s for run in runs):.2f} s at "
        f"most. {statistics.fmean(busy):.1f} cores were busy in the mean of a run ({min(busy):.1f} to "
        f"{max(busy):.1f}), with all that ran on the machine.",
    ]
    return " ".join(lines) + "\n"
