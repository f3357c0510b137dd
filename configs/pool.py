"""The GPT of quickstart.py by hybrid parameter servers: two that hold the parameters, four workers that come and go.

    python scripts/launch.py --config=configs/pool.py --run_dir=runs/pool

Hardware: any machine with 2 cores; a minute or two. Expected: the loss falls from 5.6 to about 2.5 nats per byte, as
with quickstart.py, also if workers are killed and others come (docs/pool.md).
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
    config.plan.pipelines = 1
    config.plan.workers = 2
    config.plan.microbatches = 8
    config.wiring.kind = "pool"
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
