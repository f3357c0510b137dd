"""Replicas that may differ, as real processes: kill -9 of a peer, and the other pipeline goes on. The lost one comes
back when the peer is started again, or when a newcomer takes its place."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from fleets import QUICK, ROOT

from jaxdt.runtime.run_dir import token_flag

DIFFERING = (
    "--config.sync.kind=groups",
    "--config.sync.groups.match=window",
    "--config.model.tied_head=false",
    "--config.plan.microbatches=4",
    "--config.train.steps=8",
    "--emulate_forward_s=0.02",
)
LONGER = ("--emulate_forward_s=0.1", "--config.train.steps=40")


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
    fleet = launched(*DIFFERING, *QUICK, *LONGER)
    fleet.wait_for_step(1)
    command, variables = killed(fleet.children()[3])
    assert_brings_back(fleet, command, variables, tmp_path / "again.log")


def test_a_newcomer_takes_the_place_of_a_lost_peer(launched, tmp_path):
    """It has a token for no peer in particular, and a folder of its own."""
    fleet = launched(*DIFFERING, *QUICK, *LONGER)
    fleet.wait_for_step(1)
    _, variables = killed(fleet.children()[3])
    fleet.wait_for(lambda: fleet.views(0) == 2, "the view without its pipeline")
    join = f"--join={(fleet.run_dir / 'coordinator_address').read_text()}"
    program = [sys.executable, str(ROOT / "scripts/train.py"), join, f"--run_dir={tmp_path / 'newcomer'}"]
    command = [*program, "--emulate_forward_s=0.1", token_flag(fleet.run_dir, "newcomer")]
    assert_brings_back(fleet, command, variables, tmp_path / "newcomer.log")
    assert "peer 3: joins for stage 1, after " in (tmp_path / "newcomer.log").read_text()


def killed(pid):
    """The command line and the environment of a process that ends here."""
    command, variables = (
        Path(f"/proc/{pid}/{name}").read_bytes().decode().rstrip("\0").split("\0") for name in ("cmdline", "environ")
    )
    os.kill(pid, signal.SIGKILL)
    return command, dict(line.split("=", 1) for line in variables)


def assert_brings_back(fleet, command, variables, log_path):
    own = {"env": variables, "stdin": subprocess.PIPE}  # threads as the lost process had
    with log_path.open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, **own) as comes:
        try:
            assert fleet.ended(300) == 0, fleet.output
            assert comes.wait(timeout=30) == 0, log_path.read_text()
        finally:
            comes.kill()
    assert "pipeline 1 is back, with the states of pipeline 0" in fleet.output, fleet.output
    assert "done: 40 steps" in fleet.output
    assert_equals_replay(fleet)
