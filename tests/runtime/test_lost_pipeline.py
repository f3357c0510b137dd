"""Replicas that may differ, as real processes: kill -9 of a peer, and the other pipeline goes on. The lost one comes
back when the peer is started again, or when a newcomer takes its place."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from fleets import QUICK, ROOT, one_thread, replayed
from fork_server import Forked

from jaxdt.runtime.run_dir import token_flag

DIFFERING = (
    "--config.sync.kind=groups",
    "--config.sync.groups.match=window",
    "--config.model.tied_head=false",
    "--config.plan.microbatches=4",
    "--config.train.steps=100000",
    "--emulate_forward_s=0.1",
)


def test_a_pipeline_is_lost_and_comes_back_and_the_run_equals_the_replay_of_its_log(churning, tmp_path):
    """First its peer is started again: that process and the one that has waited beside it take the states of the other
    pipeline over. The second time a newcomer takes the place, with a token for no peer in particular and a folder of
    its own."""
    fleet = churning(*DIFFERING, *QUICK)
    fleet.wait_for_step(1)
    command = killed(fleet.children()[3])
    wait_for(fleet, "lost", 1)
    with started(command, tmp_path / "again.log") as again:
        wait_for(fleet, "pipeline_join", 1)
        fleet.wait_for_step(len(fleet.losses()) + 2)
        again.kill()
        wait_for(fleet, "lost", 2)
    join = f"--join={(fleet.run_dir / 'coordinator_address').read_text()}"
    program = [sys.executable, str(ROOT / "scripts/train.py"), join, f"--run_dir={tmp_path / 'newcomer'}"]
    command = [*program, "--emulate_forward_s=0.1", token_flag(fleet.run_dir, "newcomer")]
    with started(command, tmp_path / "newcomer.log") as newcomer:
        wait_for(fleet, "pipeline_join", 2)
        fleet.wait_for_step(len(fleet.losses()) + 2)
        fleet.process.send_signal(signal.SIGINT)
        assert fleet.ended() == 130, fleet.output
        assert newcomer.wait(timeout=60) == 130
    assert "view 2: peers 0 and 1" in fleet.output, fleet.output
    assert fleet.output.count("pipeline 1 is back, with the states of pipeline 0") == 2, fleet.output
    assert "peer 3: joins for stage 1, after " in (tmp_path / "newcomer.log").read_text()
    replayed(fleet.run_dir)


def wait_for(fleet, kind, n):
    """Until peer 3 is lost, or its pipeline is back, for the n-th time."""
    is_meant = {"lost": lambda fields: fields["peer"] == 3, "pipeline_join": lambda fields: True}[kind]
    fleet.wait_for(lambda: len(list(filter(is_meant, fleet.reports(kind)))) >= n, f"{kind} {n}", timeout_s=120)


def killed(pid):
    """The command line of a process that ends here."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    os.kill(pid, signal.SIGKILL)
    return command


@contextmanager
def started(command, log_path):
    """A process with as many threads as the lost one had."""
    environment = os.environ | one_thread()
    with log_path.open("w") as log:
        process = Forked(command, stdout=log, stderr=log, env=environment, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
