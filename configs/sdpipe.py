"""SDPipe: four pipelines average in groups of those that are ready, so a straggler holds up few (PVLDB 16(9), 2023).

    python scripts/launch.py --config=configs/sdpipe.py --run_dir=runs/sdpipe --stall=0.1,0.3,0

After each local step a replica waits for a group. A group closes a quarter of a step after its first member came,
unless the last groups of the stage do not connect all its replicas yet. `--stall` lets each peer sleep 0.3 s in a
tenth of its steps. metrics.jsonl says how large the groups of each row were, and what share of them was let pass
unconnected. `scripts/tools/replay.py --run_dir=runs/sdpipe` does the run again in one process, from its log of
groups.

Hardware: any laptop with 2 cores; about a minute, ten processes. Expected: the loss falls from 5.6 to about 2.5 nats
per byte.
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.train.eval_every_steps = 0
    config.train.eval_microbatches = 4
    config.plan.pipelines = 4
    config.sync.kind = "groups"
    config.sync.groups.match = "window"
    return config
