"""A small Llama on Shakespeare and Austen: 2 stages x 2 pipelines, the heads in groups, the table tied.

    python scripts/launch.py --config=configs/llama.py --emulate=configs/networks/four_cities.json --run_dir=runs/llama

The sizes are those of configs/baseline.py. --config.model.preset=smollm2_135m and the like have published shapes.

Hardware: any laptop with 2 cores; about a minute. Expected: the loss falls from 5.5 to about 2.4 nats per byte.
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.model.family = "llama"
    config.model.d_ff = 384
    config.model.n_kv_heads = 2
    config.model.tied_head = True
    return config
