"""The trials: the systems that each compares, and how they run. And what is counted of their runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Trial:
    """`systems`: name -> config and flags; `how`: the flags of all runs. Peers stall always, with --stalls only if
    `may_be_even`."""

    systems: Mapping[str, tuple[str, ...]]
    how: tuple[str, ...]
    stalls: str
    n_seeds: int
    n_steps: int = 100
    warm_up: int = 10  # steps before those that are timed
    may_be_even: bool = True


# All have the model and the steps of configs/quickstart.py.
SYSTEMS = {
    "allreduce": ("--config=configs/quickstart.py", "--config.model.tied_head=false"),
    "all": ("--config=configs/local_sgd.py", "--config.sync.groups.every_steps=1"),
    "local_sgd": ("--config=configs/local_sgd.py",),
    "diloco": ("--config=configs/diloco.py",),
    "streaming_diloco": ("--config=configs/streaming_diloco.py",),
    "sdpipe": ("--config=configs/sdpipe.py", "--config.plan.pipelines=2"),
    "none": ("--config=configs/local_sgd.py", "--config.sync.groups.match=none"),
}

SDPIPE = "--config=configs/sdpipe.py"
HETPIPE = "--config=configs/hetpipe.py"
# All have the steps of configs/sdpipe.py, and the rules of configs/reproduce/sdpipe.
STRAGGLERS = {
    "allreduce": (SDPIPE, "--config.sync.kind=allreduce", "--config.sync.groups.match=all"),
    "pairs": ("--config=configs/adpsgd.py:pairs",),
    "sdpipe_p10": (SDPIPE, "--config.sync.groups.connectivity_groups=10"),
    "sdpipe_p4n": (SDPIPE, "--config.sync.groups.connectivity_groups=-1"),
    "first_come": ("--config=configs/adpsgd.py:first_come",),
    "preduce": ("--config=configs/preduce.py",),
    "hetpipe": (
        HETPIPE,
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
TRIALS = {
    "replicas": Trial(
        SYSTEMS,
        how=(f"--emulate={ROOT / 'configs/networks/four_cities.json'}", "--emulate_forward_s=0.03"),
        stalls="0.1,1.0,{seed}",
        n_seeds=6,
    ),
    "sdpipe": Trial(
        STRAGGLERS,
        how=(*SMALL, "--emulate_forward_s=0.03"),
        stalls="0.1,0.3,{seed}",
        n_seeds=5,
        n_steps=40,
        may_be_even=False,
    ),
}


def replica_bytes(run_dir: Path, on_links: dict[str, int]) -> int:
    """The bytes between peers of the same stage, over all such links in both directions."""
    stages = [set(stage) for stage in json.loads((run_dir / "plan.json").read_text())["placement"]]
    total = 0
    for link, n_bytes in on_links.items():
        ends = set(map(int, link.split("->")))
        total += n_bytes if any(ends <= stage for stage in stages) else 0
    return total
