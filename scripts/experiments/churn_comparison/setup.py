"""The setup that the runs of scripts/experiments/study.py, real or simulated, have in common."""

from dataclasses import dataclass


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
