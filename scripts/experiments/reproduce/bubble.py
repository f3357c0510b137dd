"""The bubble of a pipeline: the idle part of a step, simulated, against the closed form of GPipe's paper."""

from dataclasses import replace
from typing import Any

from experiments.reproduce.results import Results
from experiments.reproduce.swarm_fleet import Fleet

STAGES, MICROBATCHES = (2, 4, 8), (4, 8, 16, 32)
COMPUTE_S = 1.0  # of a stage and microbatch
FLEET = Fleet(2, 1, 64, 1, "none", compute_s=COMPUTE_S, latency_s=0.0, gbps=1e6)


def closed_form(n_stages: int, n_microbatches: int) -> float:
    return (n_stages - 1) / (n_microbatches + n_stages - 1)


def simulated(n_stages: int, n_microbatches: int, schedule: str, results: Results) -> float:
    step_s = replace(FLEET, n_stages=n_stages, schedule=schedule).step_s(n_microbatches, results)
    return 1 - n_microbatches * COMPUTE_S / step_s


def run(results: Results) -> dict[str, Any]:
    """What the page shows."""
    rows = []
    for p in STAGES:
        for m in MICROBATCHES:
            ours = [simulated(p, m, schedule, results) for schedule in ("1f1b", "gpipe")]
            rows.append([p, m, *(f"{100 * part:.2f}" for part in (closed_form(p, m), *ours))])
    off = max(abs(simulated(p, m, "1f1b", results) - closed_form(p, m)) for p in STAGES for m in MICROBATCHES)
    return dict(rows=rows, off=off)
