"""A resumed run whose coordinator is killed, terminated, started twice and ended by another signal; one of its peers,
started twice; and a peer of another run."""

import os
import shutil
import signal

from fleets import MANY_STEPS, N_STEPS, ONE_PROCESS, ROOT
from forks import run_scripts

from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT
from jaxdt.runtime.run_dir import job_flags, peer_credential

COORDINATE, TRAIN = (str(ROOT / "scripts" / name) for name in ("coordinate.py", "train.py"))
IMPORTS = "import jaxdt.cli.run_flags, jaxdt.runtime.coordinator_process, jaxdt.runtime.peer_process"


def test_a_resumed_run_outlives_its_coordinators_and_nothing_runs_twice(launched, ended, tmp_path):
    fleet = launched(*ONE_PROCESS, "--resume", *MANY_STEPS, "--config.train.keep_checkpoints=1")
    began_from = ended / f"checkpoints/{N_STEPS:08d}"
    fleet.wait_for_step(N_STEPS + 3)
    assert began_from.exists(), "a peer that is started again begins with it"
    shutil.rmtree(began_from)  # the coordinator does without
    for number in (signal.SIGKILL, signal.SIGTERM):
        before = fleet.losses()
        os.kill(fleet.coordinator(), number)
        fleet.wait_for_step(len(before) + 3)
        assert fleet.losses()[: len(before)] == before
    address = (fleet.run_dir / "coordinator_address").read_text()

    flags = [*job_flags(fleet.run_dir), "--peer=0", f"--coordinator={address}"]
    commands = [
        [COORDINATE, *job_flags(fleet.run_dir), f"--run_dir={fleet.run_dir}"],
        [TRAIN, *flags, peer_credential(fleet.run_dir, 0), f"--run_dir={tmp_path / 'second'}"],
        [TRAIN, *flags, peer_credential(tmp_path / "other", 0), f"--run_dir={tmp_path / 'intruder'}"],
    ]
    results = run_scripts(commands, IMPORTS, tmp_path, os.environ | MALLOC_ENVIRONMENT | {"LD_PRELOAD": ""})
    assert [code for code, _, _ in results] == [2, 2, 2], results
    coordinator, second, intruder = (err.strip().splitlines()[-1] for _, _, err in results)
    assert "has a coordinator already (process " in coordinator, coordinator
    assert second.startswith("peer 0 (stage 0): runs at 127.0.0.1:"), second
    assert "and answers; a second one, 127.0.0.1:0 (process " in second, second
    assert "coordinator: " in intruder, intruder

    fleet.wait_for_step(len(fleet.losses()) + 2)
    os.kill(fleet.coordinator(), signal.SIGUSR1)  # a failure, which no new start would mend
    assert fleet.ended(timeout_s=60) == 3, fleet.output
    assert "coordinator: killed, started again" in fleet.output
    assert "coordinator: terminated, started again" in fleet.output
    assert "coordinator: lost, " in fleet.output
    assert "(stage 0): lost, " not in fleet.output
    assert "refused" in fleet.output
