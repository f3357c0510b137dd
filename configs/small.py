"""The benchmark workload `small`: 8 layers, width 256, sequence 128, vocabulary 1024, microbatch 2, 8 microbatches.

    python scripts/bench/bench_pipeline.py

Hardware: two otherwise idle cores. Needs a token file with 1024 tokens, which the benchmark makes at random.
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
