"""A small GPT cut into two stages, one on each of two hosts.

    python scripts/launch.py --config=configs/two_hosts.py --emit=runs/two --hosts=HOST_A,HOST_B

Prints the commands to start on each host. A checkpoint every 10 steps, since each host is the only one of its stage.

Hardware: two machines of any kind, or one machine as both hosts; half a minute on two cores of one machine. Expected:
the loss falls from 5.6 to about 2.6 nats per byte.
"""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.model.n_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 512
    config.data.seq_len = 64
    config.plan.stages = 2
    config.plan.microbatches = 4
    config.train.steps = 60
    config.train.microbatch_size = 16
    config.train.eval_every_steps = 20
    config.train.checkpoint_every_steps = 10  # a stage of one host that is lost goes back to the last checkpoint
    config.optim.lr = 3e-3
    config.optim.warmup_steps = 10
    return config
