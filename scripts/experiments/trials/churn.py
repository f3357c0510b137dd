"""Kill a peer of a fleet every 20 s, and start a newcomer each time, for as long as one likes; watch who stays.

The coordinator and the first peer of each stage are never killed, so that their memory, file descriptors and threads
can be followed: none of them grows by more than 5 % after the warm-up. The first 300 losses are those of one process. A
quarter of an hour; --minutes=1 and less tries the trial itself.
"""

from processes import Join, Kill, Trial, does_not_grow, every, has_losses_of_one

PERIOD_S = 20.0
FIRST = ("peer 0", "peer 1")  # of the two stages
TRIAL = Trial(
    config="configs/swarm.py",
    flags=("--config.codec=none",),
    seconds=900.0,
    latency_s=0.02,
    disturbances=(every(PERIOD_S, Kill("peer", spared=FIRST), Join()),),
    watched=("coordinator", *FIRST),
    expected=(has_losses_of_one(1e-5, first=300), does_not_grow(0.05, PERIOD_S)),
)
