"""The systems that are compared, and what is counted of their runs."""

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# name -> its flags. All have the model and the steps of configs/quickstart.py.
SYSTEMS = {
    "allreduce": ("--config=configs/quickstart.py", "--config.model.tied_head=false"),
    "all": ("--config=configs/local_sgd.py", "--config.sync.groups.every_steps=1"),
    "local_sgd": ("--config=configs/local_sgd.py",),
    "diloco": ("--config=configs/diloco.py",),
    "streaming_diloco": ("--config=configs/streaming_diloco.py",),
    "sdpipe": ("--config=configs/sdpipe.py", "--config.plan.pipelines=2"),
    "none": ("--config=configs/local_sgd.py", "--config.sync.groups.match=none"),
}


def replica_bytes(run_dir: Path, on_links: dict[str, int]) -> int:
    """The bytes between peers of the same stage, over all such links in both directions."""
    stages = [set(stage) for stage in json.loads((run_dir / "plan.json").read_text())["placement"]]
    total = 0
    for link, n_bytes in on_links.items():
        ends = set(map(int, link.split("->")))
        total += n_bytes if any(ends <= stage for stage in stages) else 0
    return total
