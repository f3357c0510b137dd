"""A small GPT with AdamW, from which comparisons and other configs start: 2 stages x 2 pipelines.

    python scripts/launch.py --config=configs/baseline.py --emulate=configs/networks/four_cities.json --run_dir=runs/x

configs/quickstart.py trains a model of that size on the same data, with rotary positions and muon.

Hardware: any laptop with 2 cores; about a minute. Expected: the loss falls from 5.6 to about 2.5 nats per byte.
"""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.model.n_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 512
    config.model.n_heads = 4
    config.data.seq_len = 64
    config.plan.stages = 2
    config.plan.pipelines = 2
    config.plan.microbatches = 8
    config.train.steps = 100
    config.train.microbatch_size = 8
    config.train.eval_every_steps = 25
    config.train.eval_microbatches = 8
    config.optim.lr = 3e-3
    config.optim.warmup_steps = 10
    config.optim.lr_schedule = "cosine"
    config.optim.decay_steps = 100
    config.optim.weight_decay = 0.1
    return config
