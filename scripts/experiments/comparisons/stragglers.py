"""SDPipe's stragglers of configs/reproduce/sdpipe as real processes: systems whose peers stall.

2 stages x 4 pipelines with the steps of configs/sdpipe.py, and the rules of configs/reproduce/sdpipe. Each peer pauses
for 0.3 s in a tenth of its steps, by the same draws under each system. Forwards take at least 30 ms, so two cores are
enough. The first system is another one from seed to seed. Five seeds of about 8 minutes each.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comparison import Given, Line
from page import ROOT, centred, spread

from comparisons import replicas
from comparisons.replicas import EQUAL, STALLING, Run, Setting, grouped, in_turn, maker, ratios

SDPIPE = "--config=configs/sdpipe.py"
SYSTEMS = {
    "allreduce": (SDPIPE, "--config.sync.kind=allreduce", "--config.sync.groups.match=all"),
    "pairs": ("--config=configs/adpsgd.py:pairs",),
    "sdpipe_p10": (SDPIPE, "--config.sync.groups.connectivity_groups=10"),
    "sdpipe_p4n": (SDPIPE, "--config.sync.groups.connectivity_groups=-1"),
    "first_come": ("--config=configs/adpsgd.py:first_come",),
    "preduce": ("--config=configs/preduce.py",),
    "hetpipe": (
        "--config=configs/hetpipe.py",
        "--config.plan.pipelines=4",
        "--config.optim.lr=7.5e-4",  # each push is added whole, so the rate is divided by the number of pipelines
        "--config.sync.server.wave=10",
        "--config.sync.server.staleness=4",
    ),
    "none": (SDPIPE, "--config.sync.groups.match=none"),
}
# A model so small that its peers leave the cores idle: the time of its forwards is emulated.
SIZES = {"n_layers": 2, "d_model": 32, "d_ff": 128, "n_heads": 2}
SMALL = tuple(f"--config.model.{name}={size}" for name, size in SIZES.items())
SETTING = Setting(SYSTEMS, how=(*SMALL, "--emulate_forward_s=0.03"), stalls="0.1,0.3,{seed}")


def cases(given: Given) -> list[Line]:
    return in_turn(SYSTEMS, STALLING, given.seeds, given.steps)


def values(folder: Path, out: Path) -> dict[str, Any]:
    return replicas.values(folder, out)


def rows_of_gains(runs: Sequence[Run]) -> list[list]:
    """A row for each system: its throughput over that of all-reduce, seed by seed."""
    by_system = grouped(runs)
    equal = by_system.get(EQUAL, {})
    rows = []
    for system, own in by_system.items():
        gains = ratios(equal, own)
        pairs = [(run.predicted_s, run.as_predicted_s) for run in own.values()]
        off = [predicted / measured - 1 for predicted, measured in pairs if predicted and measured]
        spread_of_errors = centred(off, "+.1%", statistics.median) if off else "-"
        spread_of_gains = centred(gains, ".2f", statistics.median) if gains else "-"
        median_s = f"{statistics.median(run.step_s for run in own.values()):.3f}"
        loss = spread([run.held_out for run in own.values()], 3)
        rows.append([system, len(own), median_s, spread_of_gains, spread_of_errors, loss])
    return rows


COMPARISON = replace(
    replicas.COMPARISON,
    page=ROOT / "configs/reproduce/sdpipe_measured",
    cases=cases,
    made=maker(SETTING),
    values=values,
    n_seeds=5,
    steps=40,
)
