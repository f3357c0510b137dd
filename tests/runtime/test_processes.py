"""Real processes over real sockets: the same losses as one process, and what happens when some of them are killed."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.model.n_layers = 2
    config.model.d_model = 32
    config.model.n_heads = 2
    config.model.d_ff = 64
    config.model.seq_len = 16
    config.model.tied_head = True
    config.plan.stages = 2
    config.plan.pipelines = 2
    config.plan.microbatches = 3
    config.train.microbatch_size = 2
    config.train.steps = 6
    config.train.checkpoint_every_steps = 2
    config.remat = "dots"
    return config
"""


class Launched:
    """A local fleet as a user starts it; leaves nothing behind."""

    def __init__(self, tmp_path: Path, *flags: str, run_dir: str = "run", file_bytes_max: int = resource.RLIM_INFINITY):
        self.run_dir = tmp_path / run_dir
        config = tmp_path / "config.py"
        config.write_text(CONFIG)
        command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={config}", f"--run_dir={self.run_dir}"]
        self.process = subprocess.Popen(
            [*command, "--report=false", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        # Not in the child before its program starts: that would fork this process, in which jax has threads.
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (file_bytes_max, file_bytes_max))

    def ended(self, timeout_s: float = 120) -> int:
        self.output = self.process.communicate(timeout=timeout_s)[0]
        return self.process.returncode

    def children(self) -> dict[int, int]:
        """peer -> pid of the launcher's children that are peers."""
        prefix = "--peer="
        words = ((pid, word) for pid, words in self._commands() for word in words if word.startswith(prefix))
        return {int(word.removeprefix(prefix)): pid for pid, word in words}

    def coordinator(self) -> int:
        """Its pid."""
        return next(pid for pid, words in self._commands() if any(word.endswith("coordinate.py") for word in words))

    def _commands(self) -> list[tuple[int, list[str]]]:
        """pid and command line of the launcher's children."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == self.process.pid:
                found.append((int(entry.name), words))
        return found

    def wait_for_step(self, n: int, timeout_s: float = 120) -> None:
        deadline_s = time.monotonic() + timeout_s
        while len(self.losses()) < n:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def losses(self) -> list[float]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if line.endswith("}")]

    def last_line(self, peer: int) -> str:
        return (self.run_dir / "logs" / f"peer_{peer}.log").read_text().strip().splitlines()[-1]


@pytest.fixture
def launched(tmp_path):
    """Starts fleets; none outlives its test."""
    fleets = []

    def start(*flags, **options):
        fleets.append(Launched(tmp_path, *flags, **options))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.process.kill()  # its children follow
        fleet.process.communicate()


def alive(pids) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_four_processes_over_tls_train_as_one_process_does(launched):
    one = launched("--config.plan.stages=1", "--config.plan.pipelines=1", run_dir="one")
    assert one.ended() == 0, one.output
    four = launched(run_dir="four")
    assert four.ended() == 0, four.output
    assert four.losses() == pytest.approx(one.losses(), rel=1e-5)
    assert len(four.losses()) == 6
    summary = json.loads((four.run_dir / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["loss_last"] == four.losses()[-1]
    assert {"step_s_predicted", "step_s_measured", "tokens_per_s", "bytes_on_links", "loss_first"} <= set(summary)


@pytest.mark.parametrize("victim", [0, 1])
def test_the_last_peer_of_a_stage_ends_the_run_everywhere_with_code_3(launched, victim):
    """If the config says so."""
    one_pipeline = ("--config.plan.pipelines=1", "--config.wiring.on_stage_lost=stop")
    fleet = launched("--config.train.steps=100000", *one_pipeline)
    fleet.wait_for_step(random.Random(victim).randint(1, 30))
    pids = fleet.children()
    assert sorted(pids) == [0, 1]
    os.kill(pids[victim], signal.SIGKILL)
    assert fleet.ended(timeout_s=20) == 3, fleet.output
    assert f"peer {victim} (stage {victim}): lost" in fleet.output
    assert f"peer {victim} (stage {victim}): lost" in fleet.last_line(1 - victim)
    assert not alive(pids.values())


def test_an_interrupt_ends_the_run_with_code_130(launched):
    fleet = launched("--config.train.steps=100000")
    fleet.wait_for_step(1)
    pids = fleet.children()
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended(timeout_s=20) == 130, fleet.output
    assert not alive(pids.values())


def test_a_killed_launcher_takes_its_children_along(launched):
    fleet = launched("--config.train.steps=100000")
    fleet.wait_for_step(1)
    pids = fleet.children()
    fleet.process.kill()
    deadline_s = time.monotonic() + 20
    while alive(pids.values()) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not alive(pids.values())
    fleet.ended()


def test_a_run_that_was_killed_resumes_on_another_cut_with_the_same_losses(launched):
    whole = launched("--config.train.steps=8", run_dir="whole")
    assert whole.ended() == 0, whole.output
    cut = launched("--config.train.steps=100000", run_dir="cut")
    cut.wait_for_step(5)
    for pid in (*cut.children().values(), cut.process.pid):
        os.kill(pid, signal.SIGKILL)
    cut.ended(timeout_s=20)
    flags = ("--resume", "--config.train.steps=100000", "--config.plan.stages=1", "--config.plan.pipelines=1")
    resumed = launched(*flags, run_dir="cut")
    resumed.wait_for_step(8)
    resumed.process.send_signal(signal.SIGINT)
    assert resumed.ended(timeout_s=20) == 130, resumed.output
    assert resumed.losses()[:8] == pytest.approx(whole.losses(), rel=1e-5)


ALONE = ("--config.plan.stages=1", "--config.plan.pipelines=1")


def test_a_resume_goes_back_to_a_checkpoint_that_is_whole(launched):
    """After a loss of power the newest one has an empty file; with that in both, nothing is started."""
    fleet = launched(*ALONE, "--config.train.steps=4")
    assert fleet.ended() == 0, fleet.output
    losses = fleet.losses()
    parts = [next(fleet.run_dir.glob(f"checkpoints/0000000{version}/stage_0-*")) for version in (2, 4)]
    (parts[1] / "_METADATA").write_bytes(b"")
    resumed = launched(*ALONE, "--resume", "--config.train.steps=4")
    assert resumed.ended() == 0, resumed.output
    assert f"so the run goes on from step 2: {parts[1] / '_METADATA'}: damaged" in resumed.output
    assert resumed.losses() == losses
    for part in fleet.run_dir.glob("checkpoints/*/stage_0-*"):
        (part / "_METADATA").write_bytes(b"")
    metrics = (fleet.run_dir / "metrics.jsonl").read_bytes()
    refused = launched(*ALONE, "--resume", "--config.train.steps=6")
    assert refused.ended() == 2, refused.output
    assert "_METADATA: damaged" in refused.output and "Traceback" not in refused.output
    assert (fleet.run_dir / "metrics.jsonl").read_bytes() == metrics


def test_a_disk_that_is_full_ends_the_run_with_code_2(launched):
    """A file may not grow beyond 200 kB: the metrics fit, a checkpoint does not."""
    fleet = launched(*ALONE, "--config.train.steps=100000", "--config.model.d_model=128", file_bytes_max=200_000)
    assert fleet.ended() == 2, fleet.output
    assert "peer 0 (stage 0): checkpoint of 2 steps: " in fleet.output
    assert "Traceback" not in fleet.output
    assert not list(fleet.run_dir.glob("checkpoints/*/complete.json"))


def test_a_killed_coordinator_is_started_again_and_one_that_fails_ends_the_run_with_code_3(launched):
    fleet = launched(*ALONE, "--config.train.steps=100000")
    fleet.wait_for_step(1)
    os.kill(fleet.coordinator(), signal.SIGKILL)
    fleet.wait_for_step(len(fleet.losses()) + 2)
    os.kill(fleet.coordinator(), signal.SIGUSR1)
    assert fleet.ended(timeout_s=60) == 3, fleet.output
    assert "coordinator: killed, started again" in fleet.output and "coordinator: lost" in fleet.output


def test_a_peer_with_another_credential_is_refused_and_harms_nobody(launched, tmp_path):
    from jaxdt.runtime.net import credential
    from jaxdt.runtime.run_dir import job_flags

    fleet = launched("--config.train.steps=100000")
    fleet.wait_for_step(1)
    credential.create(tmp_path / "other.pem")
    address = (fleet.run_dir / "coordinator_address").read_text()
    flags = [*job_flags(fleet.run_dir), f"--credential={tmp_path / 'other.pem'}", f"--run_dir={tmp_path / 'intruder'}"]
    command = [sys.executable, str(ROOT / "scripts/train.py"), "--peer=1", f"--coordinator={address}", *flags]
    intruder = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    assert intruder.returncode == 2, intruder.stdout
    assert "coordinator: " in intruder.stdout.strip().splitlines()[-1]
    fleet.wait_for_step(len(fleet.losses()) + 2)
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended(timeout_s=20) == 130
    assert "refused" in fleet.output


def test_a_peer_that_dies_before_anyone_knew_it_ends_the_run_with_one_line(launched):
    fleet = launched("--config.train.steps=100000")
    deadline_s = time.monotonic() + 60
    while 2 not in (pids := fleet.children()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    os.kill(pids[2], signal.SIGKILL)
    assert fleet.ended(timeout_s=40) == 3, fleet.output
    assert "peer 2 (stage 0): lost" in fleet.output
    for peer in (0, 1, 3):
        assert "peer 2 (stage 0): lost" in fleet.last_line(peer)
