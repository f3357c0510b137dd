"""HetPipe: two pipelines push to a server of each stage, and may be a wave apart.

    python scripts/launch.py --config=configs/hetpipe.py --run_dir=runs/x

The model and the data are those of configs/quickstart.py. Each pipeline of two stages is a virtual worker. After each
local step its replicas push what has changed to the servers, peers 4 and 5, which compute nothing. After two local
steps (sync.server.wave) a replica goes on from the server's parameters, if its clock is then at most 1 ahead of the
slower one's (sync.server.staleness). Every push adds a whole local step, so the steps of all pipelines add up, and the
learning rate is half of that of configs/local_sgd.py.

Hardware: any laptop with 2 cores, for six peers; about two minutes. Expected: the loss falls from 5.5 to about 2.6 nats
per byte. `python scripts/tools/replay.py --run_dir=runs/x` does the run again in one process: all numbers are equal.
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
    config.plan.servers = 1
    config.plan.microbatches = 8
    config.train.steps = 100
    config.train.microbatch_size = 8
    config.optim.lr = 1.5e-3
    config.optim.warmup_steps = 10
    config.optim.lr_schedule = "cosine"
    config.optim.decay_steps = 100
    config.optim.weight_decay = 0.1
    config.sync.kind = "server"
    config.sync.server.staleness = 1
    config.sync.server.wave = 2
    return config
