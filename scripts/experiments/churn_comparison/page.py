"""configs/study: the raw data of the runs of ten seeds, and the page made of them, numbers in sentences included."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from churn_comparison import results
from churn_comparison.results import Run
from jaxdt.cli import plots
from jaxdt.runtime.reporting.interval import SEEDS, interval, sentence

RAW = "runs.jsonl"
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
    return "\n".join(
        [
            HEAD.format(about=about, picture=PICTURED_SEED),
            results.seeds_table(figures),
            _sentences(rates),
            _means(figures, names),
            _checks(compared, by_seed),
            FOOT,
        ]
    )


def _sorted(runs: Sequence[Run]) -> list[Run]:
    return sorted(runs, key=lambda run: run.name)


def _sentences(rates: dict[str, list[float]]) -> str:
    names = list(rates)
    pairs = [(one, other) for i, other in enumerate(names) for one in names[i + 1 :]]
    return "".join(f"- {sentence(one, other, rates)}\n" for one, other in pairs)


def _means(figures: Sequence[dict], names: Sequence[str]) -> str:
    """Means over seeds of what else the runs had."""
    lines = ["| means over the seeds | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for what, field in (
        ("seconds in which a stage had two peers more than the other", "uneven_s"),
        ("steps", "steps"),
        ("moves of peers between stages", "moves"),
        ("machines that left", "leaves"),
        ("machines that came", "joins"),
        ("machines spared, since each was alone at its stage", "spared"),
    ):
        cells = [str(interval(own[name][field] for own in figures)) for name in names]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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


HEAD = f"""# Machines that come and go: `fixed`, `swarm`, and `swarm` that rebalances

    python scripts/experiments/study.py --ten_seeds --run_dir=runs/study_seeds --page=configs/study --about=TEXT

The same training run three times, one after the other, as real processes: two stages of four peers, 12 microbatches a
step. 37 minutes of a trace of spot machines (V100 on AWS, [traces](../reproduce/traces/SOURCES.md), from second
24060 on) go by in 160 s: 32 machines stand for 8 peers, five leave (`kill -9`) and five come (`train.py --join`), the
same ones at the same moments in all three. Who leaves is drawn from a seed: 0 to 9, none left out. Which of the three
runs comes first changes from seed to seed. Raw data: [`{RAW}`]({RAW}), from which
`study.py --page=configs/study` writes this page and the picture again.

{{about}} **Compute is emulated by sleeping** (a forward 0.15 s, a backward 0.30 s); the model is tiny, links are the
loopback interface.

![Throughput over time, and peers of each stage, of seed {{picture}}](study.png)

+- and intervals are 95 %, over seeds (Student's t); ratios are paired by seed.
"""

FOOT = """What one does not see here: machines of unequal speed and slow links, for which `swarm` is made, and seconds
of real computation. Newcomers go to the smallest stage in all three runs, which mends uneven stages without
rebalancing. The same trace, simulated, with the rule of Algorithm 2's listing as a fourth arm:
[churn](../reproduce/churn/README.md).
"""
