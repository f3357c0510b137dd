"""SDPipe: four pipelines average in groups of those that are ready, so a straggler holds up few (PVLDB 16(9), 2023).

    python scripts/launch.py --config=configs/sdpipe.py --run_dir=runs/sdpipe --stall=0.1,0.3,0

After each local step a replica waits for a group. A group closes a quarter of a step after its first member came,
unless the last groups of the stage do not connect all its replicas yet. `--stall` lets each peer sleep 0.3 s in a
tenth of its steps. metrics.jsonl says how large the groups of each row were, and what share of them was let pass
unconnected. `scripts/tools/replay.py --run_dir=runs/sdpipe` does the run again in one process, from its log of
groups.

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
    return config
