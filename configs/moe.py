"""A small model with experts on Shakespeare and Austen: 2 stages, in each layer 8 experts of which a token meets 2.

    python scripts/launch.py --config=configs/moe.py --emulate=configs/networks/four_cities.json --run_dir=runs/moe

`summary.json` and the last lines on the terminal have the load of the busiest expert and the auxiliary loss of each
stage. --config.model.preset=mixtral_8x7b and qwen3_30b_a3b have published shapes.

Hardware: any laptop with 2 cores; a step is predicted to take half a second. Expected: the loss falls from 5.6 to about
2.5 nats per byte, and the held-out loss too; the busiest expert has 1.6 times the mean load of its layer.
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.model.family = "moe"
    config.model.d_ff = 128
    config.model.n_kv_heads = 2
    config.model.n_experts = 8
    config.model.n_experts_per_token = 2
    config.model.router_aux_coef = 0.01
    config.plan.pipelines = 1
    config.plan.microbatches = 4
    return config
