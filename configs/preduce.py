"""P-Reduce: four pipelines average in groups of at most two, whoever is ready first (Miao et al., SIGMOD 2021).

    python scripts/launch.py --config=configs/preduce.py --run_dir=runs/preduce --stall=0.1,0.3,0

As configs/sdpipe.py, but a group closes as soon as it has two members, and nothing asks for groups that connect all
replicas of a stage. With four pipelines and groups of two these are the settings of configs/adpsgd.py:first_come:
AD-PSGD always averages in pairs, while the size of P-Reduce's groups is chosen (configs/reproduce/sdpipe has half of
the pipelines). This file is where to begin for `sync.groups.group_size_max` above 2.

Hardware: any laptop with 2 cores; about a minute, ten processes. Expected: the loss falls from 5.6 to about 2.5 nats
per byte.
"""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.model.n_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 512
    config.model.n_heads = 4
    config.data.seq_len = 64
    config.model.tied_head = False
    config.plan.stages = 2
    config.plan.pipelines = 4
    config.plan.microbatches = 8
    config.train.steps = 100
    config.train.microbatch_size = 8
    config.optim.lr = 3e-3
    config.optim.warmup_steps = 10
    config.optim.lr_schedule = "cosine"
    config.optim.decay_steps = 100
    config.optim.weight_decay = 0.1
    config.sync.kind = "groups"
    config.sync.groups.match = "window"
    config.sync.groups.group_size_max = 2
    config.sync.groups.connectivity_groups = 0
    return config
