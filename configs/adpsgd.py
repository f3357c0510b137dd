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

from jaxdt.config_file import base_config


def get_config(reading="pairs"):
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
    config.sync.groups.match = {"pairs": "pairs", "first_come": "window"}[reading]
    config.sync.groups.group_size_max = 0 if reading == "pairs" else 2
    config.sync.groups.connectivity_groups = 0
    return config
