"""Two peers of different stages pause together for longer than their deadline, and come back.

The others go on without them, and both join again; losses are those of one process. A minute and a half.
"""

from processes import Pause, Trial, at, has_losses_of_one

TRIAL = Trial(
    config="configs/swarm.py",
    flags=("--config.codec=none",),
    steps=60,
    disturbances=(at(4.0, Pause("peer 2", 12.0, 10.0), Pause("peer 3", 12.0, 10.0)),),
    expected=(has_losses_of_one(1e-5),),
)
