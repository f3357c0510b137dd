"""Codecs and compression layers compared with plain boundaries: SWARM's Tables 7 and 8 at the size of a laptop.

    python scripts/ablate.py --config=configs/ablation.py --run_dir=runs/ablation

8 layers of width 64 on the committed corpus in bytes, cut into 2 and 4 stages: 39 runs of 300 steps, two at a time.

Hardware: two otherwise idle cores; about 30 minutes. Expected: int8 is as good as no codec within the spread of the
seeds. Compression layers cost quality, more with 4 stages than with 2, and more at 4x than at 2x. The results are in
configs/ablation/README.md.
"""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.model.n_layers = 8
    config.model.d_model = 64
    config.model.n_heads = 4
    config.data.seq_len = 128
    config.plan.microbatches = 4
    config.train.steps = 300
    config.train.microbatch_size = 4
    config.train.eval_every_steps = 20
    config.train.eval_microbatches = 24
    config.optim.lr = 3e-3
    config.optim.warmup_steps = 30
    config.optim.lr_schedule = "cosine"
    config.optim.decay_steps = 300
    config.optim.weight_decay = 0.1
    config.remat = "dots"
    config.ablation = dict(
        methods=("none", "int8", "int8-dynamic", "bottleneck", "maxout"),
        stages=(2, 4),
        ratios=(2, 4),
        seeds=3,
        measurements=5,
        target_frac=0.75,
        gbps=(0.1, 0.5, float("inf")),
        workers=2,
    )
    return config
