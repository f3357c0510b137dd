"""DiLoCo: two pipelines do 20 local steps of AdamW, then one step of SGD with Nesterov's momentum on their mean change.

    python scripts/launch.py --config=configs/diloco.py --emulate=configs/networks/four_cities.json --run_dir=runs/x

Douillard et al. 2023, with their outer learning rate 0.7 and momentum 0.9, and fewer local steps, since the run is
short (theirs: sync.groups.every_steps 500). The replicas of a stage exchange one vector in 20 local steps, a twentieth
of the bytes of all-reduce. The model and the data are those of configs/baseline.py.

Hardware: any laptop with 2 cores; a minute or two. Expected: the loss falls from 5.6 to about 2.6 nats per byte.
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("baseline.py"))
    config.train.eval_every_steps = 0
    config.train.eval_microbatches = 4
    config.sync.kind = "groups"
    config.sync.groups.match = "all"
    config.sync.groups.every_steps = 20
    config.sync.groups.outer = "nesterov"
    config.sync.groups.outer_lr = 0.7
    config.sync.groups.outer_momentum = 0.9
    return config
