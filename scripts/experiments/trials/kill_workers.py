"""Kill, pause and start workers of a pool every few seconds, and compare the training with that of one process.

A victim is drawn among the workers that are ready to compute. A killed one, or a new worker in its place, comes after
up to 6 s; a pause may be longer than the worker's leases. The run ends in its first view with the losses and the
parameters of one process. Two minutes on two cores.
"""

from processes import (
    Kill,
    Pause,
    Trial,
    counts_lost_workers,
    has_losses_of_one,
    has_parameters_of_one,
    has_views,
    often,
)

WORKERS = often(3.0, Kill("worker", back_s=6.0), Pause("worker", 6.0))
TRIAL = Trial(
    config="configs/pool.py",
    steps=30,
    forward_s=0.15,
    disturbances=(WORKERS,),
    expected=(counts_lost_workers, has_views(1), has_losses_of_one(1e-5), has_parameters_of_one(1e-4)),
)
