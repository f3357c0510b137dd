"""DiLoCo: two pipelines do 20 local steps of AdamW, then one step of SGD with Nesterov's momentum on their mean change.

    python scripts/launch.py --config=configs/diloco.py --emulate=configs/networks/four_cities.json --run_dir=runs/x

Douillard et al. 2023, with their outer learning rate 0.7 and momentum 0.9, and fewer local steps, since the run is
short (theirs: sync.groups.every_steps 500). The replicas of a stage exchange one vector in 20 local steps, a twentieth
of the bytes of all-reduce. The model and the data are those of configs/quickstart.py.

Hardware: any laptop with 2 cores; a minute or two. Expected: the loss falls from 5.6 to about 2.6 nats per byte.
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
    config.sync.groups.every_steps = 20
    config.sync.groups.outer = "nesterov"
    config.sync.groups.outer_lr = 0.7
    config.sync.groups.outer_momentum = 0.9
    return config
