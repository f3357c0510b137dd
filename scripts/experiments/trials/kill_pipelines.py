"""Kill a peer of a fleet whose replicas may differ, at a random moment, and compare the run with the replay of its log.

A minute and a half a try on two cores. Of the next ten rows none comes later than 3 s after the one before, or 3 times
the seconds of the longest row before; the run ends with code 0, and no number of its last checkpoint differs from the
replay.
"""

from processes import Kill, Trial, at, goes_on, is_replayed

TRIAL = Trial(
    config="configs/sdpipe.py",
    tries=5,
    disturbances=(at((0.0, 8.0), Kill("peer")),),
    expected=(goes_on(3.0, 3), is_replayed),
)
