"""HetPipe: two pipelines push to a server of each stage, and may be a wave apart.

    python scripts/launch.py --config=configs/hetpipe.py --run_dir=runs/x

The model and the data are those of configs/baseline.py. Each pipeline of two stages is a virtual worker. After each
local step its replicas push what has changed to the servers, peers 4 and 5, which compute nothing. After two local
steps (sync.server.wave) a replica goes on from the server's parameters, if its clock is then at most 1 ahead of the
slower one's (sync.server.staleness). Every push adds a whole local step, so the steps of all pipelines add up, and the
learning rate is half of that of configs/local_sgd.py.

Hardware: any laptop with 2 cores, for six peers; about two minutes. Expected: the loss falls from 5.5 to about 2.6 nats
per byte. `python scripts/tools/replay.py --run_dir=runs/x` does the run again in one process: all numbers are equal.
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.train.eval_every_steps = 0
    config.train.eval_microbatches = 4
    config.plan.servers = 1
    config.optim.lr = 1.5e-3
    config.sync.kind = "server"
    config.sync.server.staleness = 1
    config.sync.server.wave = 2
    return config
