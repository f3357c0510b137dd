"""AD-PSGD: four pipelines average in pairs (Lian et al., ICML 2018), in one of two readings.

    python scripts/launch.py --config=configs/adpsgd.py --run_dir=runs/adpsgd --stall=0.1,0.3,0
    python scripts/launch.py --config=configs/adpsgd.py:first_come --run_dir=runs/adpsgd --stall=0.1,0.3,0

"pairs": the number of the step says who averages with whom, on all stages alike, so replicas wait for one another.
That is the baseline of SDPipe's public code. "first_come": the first two replicas that are ready form a pair, which
is nearer to the paper's asynchronous averaging; each of its groups closes a quarter of a step after its first member
came, alone if no second one did. Groups of two are also P-Reduce with the smallest groups, so these are the settings of
configs/preduce.py; both names stand here because evaluations compare with both, and P-Reduce's groups may be larger.

Hardware: any laptop with 2 cores; about a minute, ten processes. Expected: the loss falls from 5.6 to about 2.5 nats
per byte.
"""

from pathlib import Path

from jaxdt import load_config


def get_config(reading="pairs"):
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.train.eval_every_steps = 0
    config.train.eval_microbatches = 4
    config.plan.pipelines = 4
    config.sync.kind = "groups"
    config.sync.groups.match = {"pairs": "pairs", "first_come": "window"}[reading]
    config.sync.groups.group_size_max = 0 if reading == "pairs" else 2
    config.sync.groups.connectivity_groups = 0
    return config
