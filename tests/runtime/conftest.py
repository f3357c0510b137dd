"""Fixtures of tests with real processes."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from fleets import N_STEPS, ONE_PROCESS, STEPS, Churning, Finished, Launched

from jaxdt.run import network as networks


@pytest.fixture
def launched(tmp_path):
    """Starts fleets; none outlives its test."""
    fleets = []

    def start(*flags, **options):
        fleets.append(Launched(tmp_path, *flags, **options))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.kill()


@pytest.fixture
def churning(tmp_path):
    """Starts fleets; none outlives its test, nor do their newcomers."""
    fleets = []

    def start(*flags, **options):
        fleets.append(Churning(tmp_path, *flags, **options))
        return fleets[-1]

    yield start
    for fleet in fleets:
        fleet.kill()
        if fleet.newcomer:
            fleet.newcomer.kill()
            fleet.newcomer.wait()


@pytest.fixture(scope="session")
def alone(tmp_path_factory, worker_id) -> Finished:
    """The run of one process that did the same steps, undisturbed; every second version is kept. All workers of a test
    session share it: the first that asks runs it."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder if worker_id == "master" else folder.parent) / "alone"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        finished = Finished(folder / "run")
        if len(finished.losses()) < N_STEPS:
            run = Launched(folder, *STEPS, *ONE_PROCESS, f"--config.train.keep_checkpoints={N_STEPS}")
            assert run.ended() == 0, run.output
    return finished


@pytest.fixture
def ended(alone, tmp_path) -> Path:
    """The folder of a run of one process that has done N_STEPS, with its last two checkpoints, to be resumed by
    `launched`."""
    older = shutil.ignore_patterns(*(f"{version:08d}" for version in range(2, N_STEPS - 2, 2)))
    return shutil.copytree(alone.run_dir, tmp_path / "run", ignore=older)


@pytest.fixture
def slow_links(tmp_path) -> str:
    """A network on which a step of this little model takes about half a second."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps(networks.to_json(networks.uniform(4, 0.05, 1.0))))
    return f"--emulate={path}"
