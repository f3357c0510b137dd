"""Streaming DiLoCo: as configs/diloco.py, but half of the layers averages every 10 local steps, and nobody waits.

    python scripts/launch.py --config=configs/streaming_diloco.py --run_dir=runs/x \\
        --emulate=configs/networks/four_cities.json

Douillard et al. 2025, Alg. 2. The two blocks of a stage are two fragments (sync.groups.fragments). Each is frozen every
20 local steps, the other one 10 steps later. The outer optimizer takes the mean of its changes 2 local steps after that
(sync.groups.lag_steps), and what it makes is mixed half and half with the replica's own parameters
(sync.groups.mix_frac, the paper's alpha). The replicas exchange as many bytes as with DiLoCo, half of them at a time.
The model and the data are those of configs/baseline.py.

Hardware: any laptop with 2 cores; a minute or two. Expected: the loss falls from 5.6 to about 2.5 nats per byte (one
run). `python scripts/tools/replay.py --run_dir=runs/x` does the run again in one process: all numbers are equal.
"""

from pathlib import Path

from jaxdt import load_config


def get_config():
    config = load_config(Path(__file__).with_name("diloco.py"))
    config.sync.groups.fragments = 2
    config.sync.groups.lag_steps = 2
    config.sync.groups.mix_frac = 0.5
    return config
