"""Replicas that may differ, as real processes: kill -9 of a peer, and the other pipeline goes on."""

import os
import signal
import subprocess
import sys

from fleets import QUICK, ROOT

DIFFERING = (
    "--config.wiring.kind=independent",
    "--config.sync.kind=groups",
    "--config.sync.groups.match=window",
    "--config.model.tied_head=false",
    "--config.plan.microbatches=4",
    "--config.train.steps=8",
    "--emulate_forward_s=0.02",
)


def test_a_run_that_loses_a_peer_ends_and_equals_the_replay_of_its_log(launched):
    fleet = launched(*DIFFERING, *QUICK)
    fleet.wait_for_step(1)
    os.kill(fleet.children()[3], signal.SIGKILL)
    assert fleet.ended() == 0, fleet.output
    assert "view 2: peers 0 and 1" in fleet.output and "done: 8 steps" in fleet.output
    replay = [sys.executable, str(ROOT / "scripts/tools/replay.py"), f"--run_dir={fleet.run_dir}"]
    done = subprocess.run(replay, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "are equal" in done.stdout, done.stdout + done.stderr
