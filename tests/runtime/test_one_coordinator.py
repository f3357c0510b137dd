"""A resumed run whose coordinator is killed, terminated, started twice and ended by another signal; and one of its
peers, started twice."""

import os
import signal
import subprocess
import sys

from fleets import MANY_STEPS, N_STEPS, ONE_PROCESS, ROOT

from jaxdt.runtime.run_dir import job_flags, peer_credential


def started(fleet, script, *flags):
    """A further process of a run: its exit code and its last line."""
    command = [sys.executable, str(ROOT / "scripts" / script), *job_flags(fleet.run_dir), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    return done.returncode, done.stdout.strip().splitlines()[-1]


def test_a_resumed_run_outlives_its_coordinators_and_nothing_runs_twice(launched, ended, tmp_path):
    fleet = launched(*ONE_PROCESS, "--resume", *MANY_STEPS, "--config.train.keep_checkpoints=1")
    began_from = ended / f"checkpoints/{N_STEPS:08d}/complete.json"
    n_steps = N_STEPS
    while began_from.exists():  # until it is deleted in favour of a newer one
        n_steps += 1
        fleet.wait_for_step(n_steps)
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = fleet.losses()
        os.kill(fleet.coordinator(), number)
        fleet.wait_for_step(len(before) + 3)
        assert fleet.losses()[: len(before)] == before
    address = (fleet.run_dir / "coordinator_address").read_text()

    code, line = started(fleet, "coordinate.py", f"--run_dir={fleet.run_dir}")
    assert code == 2 and "has a coordinator already (process " in line, line
    flags = (
        "--peer=0",
        peer_credential(fleet.run_dir, 0),
        f"--coordinator={address}",
        f"--run_dir={tmp_path / 'second'}",
    )
    code, line = started(fleet, "train.py", *flags)
    assert code == 2 and line.startswith("peer 0 (stage 0): runs at 127.0.0.1:"), line
    assert "and answers; a second one at 127.0.0.1:0 (process " in line, line

    fleet.wait_for_step(len(fleet.losses()) + 2)
    os.kill(fleet.coordinator(), signal.SIGUSR1)  # a failure, which no new start would mend
    assert fleet.ended(timeout_s=60) == 3, fleet.output
    assert "coordinator: killed, started again" in fleet.output
    assert "coordinator: terminated, started again" in fleet.output
    assert "coordinator: lost, " in fleet.output
    assert "(stage 0): lost, " not in fleet.output
