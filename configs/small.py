"""The benchmark workload `small`: 8 layers, width 256, sequence 128, vocabulary 1024, microbatch 2, 8 microbatches.

    python scripts/bench/bench_pipeline.py
    python scripts/measure.py profile --config=configs/small.py --out=profile.json

configs/small.py is the workload of bench_pipeline.py and compare.py emulated, which make a random token file with a
vocabulary of 1024, and an example for measure.py and simulate.py. Only its step times matter, not its losses.

Hardware: two otherwise idle cores. Expected: a step takes 0.9 to 3.3 s in the 72 variants of plan, codec and network in
configs/prediction/README.md.
"""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("small")
    config.model.vocab_size = 1024
    config.plan.stages = 2
    config.plan.microbatches = 8
    config.train.microbatch_size = 2
    config.train.steps = 12
    config.optim.lr = 1e-3
    config.remat = "dots"
    return config
