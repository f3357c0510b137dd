"""A small GPT, trained in the way in which SWARM trains its large one. configs/swarm_1b.py is the same at full size.

    python scripts/launch.py --config=configs/swarm.py --run_dir=runs/swarm

Stochastic wiring over 2 stages and 4 peers, which may leave and join; rotary positions, GeGLU, one block applied twice
in each stage, samples that grow from 16 to 64 tokens, LAMB, 8-bit boundaries, updates delayed by one step, rebalancing.

Hardware: any laptop with 2 cores; about two minutes. Expected: the loss falls from 5.6 to about 2.2 nats per byte (1.9
without the delay). Killing, pausing and joining peers meanwhile does not change the losses, as long as each stage keeps
one peer.
"""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.model.n_layers = 4
    config.model.n_shared_blocks = 2
    config.model.d_model = 128
    config.model.d_ff = 512
    config.model.n_heads = 4
    config.data.seq_len = 64
    config.model.positions = "rotary"
    config.model.activation = "geglu"
    config.model.tied_head = True
    config.plan.stages = 2
    config.plan.pipelines = 2
    config.plan.microbatches = 8
    config.data.seq_start = 16
    config.data.seq_growth_steps = 100
    config.codec = "int8"
    config.wiring.kind = "swarm"
    config.wiring.routers = 2
    config.wiring.rebalance_s = 30.0
    config.sync.delay = 1
    config.sync.delay_after_steps = 40
    config.train.steps = 200
    config.train.microbatch_size = 8
    config.train.eval_every_steps = 50
    config.train.eval_microbatches = 8
    config.train.checkpoint_every_steps = 20
    config.optim.name = "lamb"
    config.optim.lr = 2e-2
    config.optim.eps = 1e-6
    config.optim.warmup_steps = 10
    config.optim.lr_schedule = "cosine"
    config.optim.decay_steps = 200
    config.optim.weight_decay = 0.01
    return config
