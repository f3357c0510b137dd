"""P-Reduce: four pipelines average in groups of at most two, whoever is ready first (Miao et al., SIGMOD 2021).

    python scripts/launch.py --config=configs/preduce.py --run_dir=runs/preduce --stall=0.1,0.3,0

As configs/sdpipe.py, but a group closes as soon as it has two members, and nothing asks for groups that connect all
replicas of a stage. With four pipelines and groups of two these are the settings of configs/adpsgd.py:first_come:
AD-PSGD always averages in pairs, while the size of P-Reduce's groups is chosen (configs/reproduce/sdpipe has half of
the pipelines). This file is where to begin for `sync.groups.group_size_max` above 2.

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
    config.sync.groups.group_size_max = 2
    config.sync.groups.connectivity_groups = 0
    return config
