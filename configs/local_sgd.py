"""Local SGD: two pipelines do 8 local steps by themselves, then average their parameters, over four cities.

    python scripts/launch.py --config=configs/local_sgd.py --emulate=configs/networks/four_cities.json --run_dir=runs/x

The model and the data are those of configs/baseline.py. The replicas of a stage exchange their parameters once in 8
local steps (sync.groups.every_steps), an eighth of the bytes of all-reduce.

Hardware: any laptop with 2 cores; a minute or two. Expected: the loss falls from 5.6 to about 2.5 nats per byte.
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.train.eval_every_steps = 0
    config.train.eval_microbatches = 4
    config.sync.kind = "groups"
    config.sync.groups.match = "all"
    config.sync.groups.every_steps = 8
    return config
