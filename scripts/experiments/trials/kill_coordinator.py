"""Kill the coordinator of a fleet whose replicas may differ, at a random moment; launch.py starts it again.

Without a coordinator no row comes, so the next one may take 60 s; no row is missing at the end. Otherwise as
kill_pipelines.
"""

from processes import Kill, Trial, at, goes_on, has_all_rows, is_replayed

TRIAL = Trial(
    config="configs/sdpipe.py",
    tries=5,
    disturbances=(at((0.0, 8.0), Kill("coordinator")),),
    expected=(goes_on(60.0, 3), has_all_rows, is_replayed),
)
