"""Real processes without a common disk: each has a folder of its own, as on hosts of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from fleets import ROOT, write_config
from fork_server import Forked

from jaxdt.run.run_folder import read_json
from jaxdt.runtime.run_dir import token_flag

N_STEPS = 14
# A killed process is noticed by its broken connection; a slow machine must not be taken for a dead one.
OWN_FOLDERS = (
    f"--config.train.steps={N_STEPS}",
    "--config.plan.microbatches=4",
    "--config.plan.pipelines=1",
    "--config.net.deadline_floor_s=30",
    "--config.sync.slice_bytes=4096",
    "--config.train.keep_checkpoints=100",
)


class OwnFolders:
    """A coordinator and peers as `launch.py --emit` describes them, each started with a folder of its own."""

    def __init__(self, tmp_path, emulate: str):
        self.tmp_path, self.emulate = tmp_path, emulate
        self.processes: dict[str, subprocess.Popen] = {}
        config = write_config(tmp_path)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = [f"--config={config}", f"--emit={tmp_path / 'job'}", "--hosts=127.0.0.1,127.0.0.1", f"--port={port}"]
        command = [sys.executable, str(ROOT / "scripts/launch.py"), *flags, *OWN_FOLDERS]
        emitted = Forked(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        said = emitted.communicate()[0]
        assert emitted.returncode == 0, said
        self.coordinator = f"127.0.0.1:{port}"
        self.start("coordinator", "coordinate.py", f"--flagfile={tmp_path / 'job/coordinator.flags'}", emulate)

    def start(self, name: str, script: str, *flags: str) -> None:
        command = [sys.executable, str(ROOT / "scripts" / script), *flags, f"--run_dir={self.tmp_path / name}"]
        with (self.tmp_path / f"{name}.log").open("w") as log:
            self.processes[name] = Forked(command, stdout=log, stderr=log)

    def start_peer(self, peer: int) -> None:
        self.start(f"peer{peer}", "train.py", f"--flagfile={self.tmp_path / f'job/host_{peer}.flags'}", self.emulate)

    def join(self) -> None:
        token = token_flag(self.tmp_path / "job", "newcomer")
        self.start("newcomer", "train.py", f"--join={self.coordinator}", token)

    def log(self, name: str) -> str:
        return (self.tmp_path / f"{name}.log").read_text()

    def losses(self) -> list[float]:
        path = self.tmp_path / "coordinator/metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("}")]

    def wait_for(self, true, what: str, timeout_s: float = 120) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not true():
            assert self.processes["coordinator"].poll() is None, (what, self.log("coordinator"))
            assert time.monotonic() < deadline_s, (what, self.log("coordinator"))
            time.sleep(0.05)


@pytest.fixture
def own_folders(tmp_path, slow_links):
    fleet = OwnFolders(tmp_path, slow_links)
    yield fleet
    for process in fleet.processes.values():
        process.kill()
        process.wait()


def test_a_lost_stage_is_refilled_by_a_newcomer_that_fetches_its_part(own_folders, alone):
    """kill -9 of the only peer of stage 1. The run would wait for 300 s for who may live; a process that has ended is
    known to, since its host refuses connections. The other peer goes back to the checkpoint, too, and the losses are
    the calm run's."""
    fleet = own_folders
    for peer in (0, 1):
        fleet.start_peer(peer)
    fleet.wait_for(lambda: "steps is complete, 2 copies" in fleet.log("coordinator"), "a checkpoint")
    os.kill(fleet.processes["peer1"].pid, signal.SIGKILL)
    fleet.wait_for(lambda: "stage 1 has lost all its peers" in fleet.log("coordinator"), "the loss")
    fleet.join()
    assert fleet.processes["coordinator"].wait(timeout=120) == 0, fleet.log("coordinator")
    assert [fleet.processes[name].wait(timeout=60) for name in ("peer0", "newcomer")] == [0, 0], fleet.log("newcomer")
    assert "back from step" in fleet.log("coordinator")
    assert (fleet.tmp_path / "coordinator" / "coordinator_address").read_text() == fleet.coordinator
    assert len(fleet.losses()) == N_STEPS
    assert fleet.losses() == pytest.approx(alone.losses()[:N_STEPS], rel=1e-5)
    mark = read_json(fleet.tmp_path / f"newcomer/checkpoints/{N_STEPS:08d}/complete.json")
    disks = {(fleet.tmp_path / name / "disk_id").read_text() for name in ("peer0", "newcomer")}
    assert mark["copies"] == 2 and all(set(part["disks"]) == disks for part in mark["checkpoint"]["parts"])
