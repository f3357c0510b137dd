"""Replicas that may differ, as real processes: kill -9 of a peer, and the other pipeline goes on. The lost one comes
back when the peer is started again."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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


def assert_equals_replay(fleet):
    replay = [sys.executable, str(ROOT / "scripts/tools/replay.py"), f"--run_dir={fleet.run_dir}"]
    done = subprocess.run(replay, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "are equal" in done.stdout, done.stdout + done.stderr


def test_a_run_that_loses_a_peer_ends_and_equals_the_replay_of_its_log(launched):
    fleet = launched(*DIFFERING, *QUICK)
    fleet.wait_for_step(1)
    os.kill(fleet.children()[3], signal.SIGKILL)
    assert fleet.ended() == 0, fleet.output
    assert "view 2: peers 0 and 1" in fleet.output and "done: 8 steps" in fleet.output
    assert_equals_replay(fleet)


def test_a_peer_that_is_started_again_brings_its_pipeline_back(launched, tmp_path):
    """Its process and the one that has waited beside it take the states of the other pipeline over."""
    fleet = launched(*DIFFERING, *QUICK, "--emulate_forward_s=0.1", "--config.train.steps=40")
    fleet.wait_for_step(1)
    pid = fleet.children()[3]
    command, variables = (
        Path(f"/proc/{pid}/{name}").read_bytes().decode().rstrip("\0").split("\0") for name in ("cmdline", "environ")
    )
    own = {"env": dict(line.split("=", 1) for line in variables), "stdin": subprocess.PIPE}  # threads as it had
    os.kill(pid, signal.SIGKILL)
    with (tmp_path / "again.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, **own) as again:
        try:
            assert fleet.ended(300) == 0, fleet.output
            assert again.wait(timeout=30) == 0
        finally:
            again.kill()
    assert "pipeline 1 is back, with the states of pipeline 0" in fleet.output, fleet.output
    assert "done: 40 steps" in fleet.output
    assert_equals_replay(fleet)
