"""Real processes that are killed, joined, paused or asked to leave: losses and parameters are those of one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from test_processes import ROOT, Launched

from jaxdt.runtime.storage.checkpoint import load_entries, newest
from jaxdt.runtime.storage.parts import step_folder
from jaxdt.spec import network as networks

N_STEPS = 60
STEPS = (f"--config.train.steps={N_STEPS}", "--config.plan.microbatches=4")
ONE_PROCESS = ("--config.plan.stages=1", "--config.plan.pipelines=1")
ALONE: list[Launched] = []  # by whichever module asks first
QUICK = ("--config.net.heartbeat_s=0.2", "--config.net.deadline_floor_s=2.0")
SWARM = ("--config.wiring.kind=swarm", *QUICK)


class Churning(Launched):
    """An elastic fleet and its newcomers."""

    newcomer: subprocess.Popen | None = None

    def join(self) -> None:
        """A newcomer with one credential and one address; returns when it has the state."""
        address = (self.run_dir / "coordinator_address").read_text()
        command = [sys.executable, str(ROOT / "scripts/train.py"), f"--join={address}"]
        command += [f"--credential={self.run_dir / 'credential.pem'}", f"--run_dir={self.run_dir}"]
        self.log = self.run_dir.parent / "newcomer.log"
        with self.log.open("w") as log:
            self.newcomer = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait_for(lambda: " download " in self.log.read_text(), "the newcomer's download")

    def wait_for(self, true, what: str, timeout_s: float = 60) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not true():
            assert self.process.poll() is None, (what, self.process.communicate()[0])
            assert time.monotonic() < deadline_s, what
            time.sleep(0.05)

    def views(self, peer: int) -> int:
        """How many views a peer of the plan has adopted."""
        return (self.run_dir / "logs" / f"peer_{peer}.log").read_text().count(" adopted view=")


@pytest.fixture
def churning(tmp_path):
    """Starts fleets; none outlives its test, nor do their newcomers."""
    fleets = []

    def start(*flags, **options):
        fleets.append(Churning(tmp_path, *flags, **options))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.process.kill()
        fleet.process.wait()
        if fleet.newcomer:
            fleet.newcomer.kill()
            fleet.newcomer.wait()


@pytest.fixture(scope="session")
def alone(tmp_path_factory) -> Launched:
    """One process that did the same steps, undisturbed; every second version is kept."""
    if not ALONE:
        keep = f"--config.train.keep_checkpoints={N_STEPS}"
        ALONE.append(Launched(tmp_path_factory.mktemp("alone"), *STEPS, *ONE_PROCESS, keep))
        assert ALONE[0].ended() == 0, ALONE[0].output
    return ALONE[0]


@pytest.fixture
def slow_links(tmp_path) -> str:
    """A network on which a step of this little model takes about half a second."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps(networks.to_json(networks.uniform(4, 0.05, 1.0))))
    return f"--emulate={path}"


def parameters(run_dir: Path, version: int = N_STEPS) -> dict:
    return {name: entry["params"] for name, entry in load_entries(step_folder(run_dir, version)).items()}


def relative_l2(got, expected) -> float:
    square = lambda tree: sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in jax.tree.leaves(tree))  # noqa: E731
    difference = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), got, expected)
    return (square(difference) / square(expected)) ** 0.5


def assert_equal(fleet: Launched, one: Launched) -> None:
    """The same losses and the same parameters at the end."""
    assert fleet.losses() == pytest.approx(one.losses(), rel=1e-5)
    assert len(fleet.losses()) == N_STEPS
    assert relative_l2(parameters(fleet.run_dir), parameters(one.run_dir)) < 1e-4


def test_equality_under_fire(churning, slow_links, alone):
    """kill -9 of a peer, a newcomer, kill -9 of the coordinator, SIGTERM, SIGSTOP longer than any deadline."""
    fleet = churning(*STEPS, *SWARM, slow_links, run_dir="swarm")
    fleet.wait_for_step(3)
    pids = fleet.children()
    os.kill(pids[3], signal.SIGKILL)
    fleet.wait_for(lambda: fleet.views(0) == 2, "a view without peer 3")
    fleet.join()  # for the stage that has lost a peer
    os.kill(fleet.coordinator(), signal.SIGKILL)
    fleet.wait_for_step(len(fleet.losses()) + 2)
    os.kill(pids[1], signal.SIGTERM)
    fleet.wait_for(lambda: "left the run" in fleet.last_line(1), "peer 1 to leave")
    n_views = fleet.views(0)
    os.kill(pids[2], signal.SIGSTOP)
    fleet.wait_for(lambda: fleet.views(0) > n_views, "a view without peer 2")
    os.kill(pids[2], signal.SIGCONT)
    fleet.wait_for(lambda: fleet.views(0) > n_views + 1, "peer 2 to come back")
    assert fleet.ended() == 0, fleet.output
    assert fleet.newcomer.wait(timeout=20) == 0, fleet.log.read_text()
    assert_equal(fleet, alone)


def test_a_pipeline_that_loses_a_peer_borrows_and_is_whole_again(churning, slow_links, alone):
    """Fixed wiring: kill -9 of a peer, and a newcomer that takes its place."""
    fleet = churning(*STEPS, *QUICK, slow_links)
    fleet.wait_for_step(3)
    os.kill(fleet.children()[3], signal.SIGKILL)
    fleet.wait_for(lambda: fleet.views(0) == 2, "a view without peer 3")
    fleet.join()
    n = len(fleet.losses()) + 2
    fleet.wait_for(lambda: int(newest(fleet.run_dir).name) >= n, "a checkpoint with the newcomer's share")
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.ended() == 130, fleet.output
    assert fleet.newcomer.wait(timeout=20) == 130, fleet.log.read_text()
    assert "peer 3 (stage 1): lost" in fleet.output
    losses, version = fleet.losses(), int(newest(fleet.run_dir).name)
    assert losses == pytest.approx(alone.losses()[: len(losses)], rel=1e-5)
    assert relative_l2(parameters(fleet.run_dir, version), parameters(alone.run_dir, version)) < 1e-4
