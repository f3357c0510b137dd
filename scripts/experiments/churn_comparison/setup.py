"""The setup that runs whose machines come and go have in common, real ones (scripts/experiments/comparisons/study.py)
and simulated ones (scripts/experiments/reproduce/churn.py)."""

from dataclasses import dataclass
from pathlib import Path

from jaxdt.sim.availability import from_trace
from jaxdt.sim.faults import Fault

TRACE = Path(__file__).resolve().parents[3] / "configs/reproduce/traces/bamboo_aws_p3_v100.json"
TRACE_BEGIN_S, TRACE_S = 24060.0, 2240.0
TRACE_SPEED = 14.0  # seconds of the trace in one second of a run
ROUTERS = 2


@dataclass(frozen=True)
class Setup:
    """The setup that the compared runs have in common.

    leave_by: "kill" or "term", the signal that a leaving peer gets.
    lose_stages: remove also a peer that is alone at its stage.
    """

    stages: int
    pipelines: int
    microbatches: int
    forward_s: float
    leave_by: str = "kill"
    lose_stages: bool = False


SETUP = Setup(stages=2, pipelines=4, microbatches=12, forward_s=0.15)


def schedule(seconds: float, seed: int, speed: float) -> list[Fault]:
    """The machines that leave and join, and the moments; the same for every run of a seed."""
    stages = [[p * SETUP.stages + s for p in range(SETUP.pipelines)] for s in range(SETUP.stages)]
    return from_trace(TRACE, stages, seed, seconds, speed, TRACE_BEGIN_S, spare=True)


def fields(setup: Setup, wiring: dict) -> dict:
    """Fields of a run's config, by group."""
    n = setup.stages
    return {
        "model": dict(n_layers=n, d_model=32, n_heads=2, d_ff=64, max_len=16),
        "plan": dict(stages=n, pipelines=setup.pipelines, microbatches=setup.microbatches),
        "train": dict(steps=1_000_000, microbatch_size=1, checkpoint_every_steps=20),
        "net": dict(heartbeat_s=0.5, deadline_floor_s=30.0),  # a lost peer is noticed by its broken connections
        "wiring": wiring,
    }
