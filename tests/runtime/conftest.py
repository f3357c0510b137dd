"""Fixtures of tests with real processes."""

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from fleets import N_STEPS, ONE_PROCESS, STEPS, Churning, Finished, Launched, versions

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
        fleet.end()


@pytest.fixture(scope="session")
def alone(tmp_path_factory, worker_id) -> Finished:
    """The run of one process that did the same steps, undisturbed; every fourth version is kept. All workers of a test
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
def resumable(alone, tmp_path) -> Callable[..., Path]:
    """Makes the folder of a run of one process that has done the steps of the last of some versions, with the
    checkpoints of these, to be resumed by `launched`."""

    def make(*kept: int) -> Path:
        others = shutil.ignore_patterns(*(f"{version:08d}" for version in {*versions(alone.run_dir)} - {*kept}))
        folder = shutil.copytree(alone.run_dir, tmp_path / "run", ignore=others)
        rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
        (folder / "metrics.jsonl").write_text("".join(rows[: kept[-1]]))
        return folder

    return make


@pytest.fixture
def slow_links(tmp_path) -> str:
    """A network on which a step of this little model takes about half a second."""
    path = tmp_path / "network.json"
    path.write_text(json.dumps(networks.to_json(networks.uniform(4, 0.05, 1.0))))
    return f"--emulate={path}"
