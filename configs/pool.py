"""The GPT of baseline.py by hybrid parameter servers: two that hold the parameters, four workers that come and go.

    python scripts/launch.py --config=configs/pool.py --run_dir=runs/pool

Hardware: any machine with 2 cores; a minute or two. Expected: the loss falls from 5.6 to about 2.5 nats per byte, as
with baseline.py, also if workers are killed and others come (docs/pool.md).
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.plan.pipelines = 1
    config.plan.workers = 2
    config.wiring.kind = "pool"
    return config
