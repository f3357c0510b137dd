"""Local SGD: two pipelines do 8 local steps by themselves, then average their parameters, over four cities.

    python scripts/launch.py --config=configs/local_sgd.py --emulate=configs/networks/four_cities.json --run_dir=runs/x

The model and the data are those of configs/quickstart.py. The replicas of a stage exchange their parameters once in 8
local steps (sync.groups.every_steps), an eighth of the bytes of all-reduce.

Hardware: any laptop with 2 cores; a minute or two. Expected: the loss falls from 5.6 to about 2.5 nats per byte.
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
    config.plan.pipelines = 2
    config.plan.microbatches = 8
    config.train.steps = 100
    config.train.microbatch_size = 8
    config.optim.lr = 3e-3
    config.optim.warmup_steps = 10
    config.optim.lr_schedule = "cosine"
    config.optim.decay_steps = 100
    config.optim.weight_decay = 0.1
    config.sync.kind = "groups"
    config.sync.groups.match = "all"
    config.sync.groups.every_steps = 8
    return config
