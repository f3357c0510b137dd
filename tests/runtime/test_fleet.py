"""The launcher's processes: a coordinator that dies again and again, and a run that all its peers have left."""

import json
import subprocess

import pytest

from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS
from jaxdt.runtime import fleet

# Its n-th start does DEATHS[n]: it dies before it has an address, or after; or it ends as it is told on standard input.
COORDINATOR = """
import os, signal, sys
from pathlib import Path

run_dir = Path(next(word for word in sys.argv if word.startswith("--run_dir=")).partition("=")[2])
starts = run_dir / "starts"
n = int(starts.read_text()) if starts.exists() else 0
starts.write_text(str(n + 1))
what = DEATHS[n]
if what == "early":
    os.kill(os.getpid(), signal.SIGKILL)
(run_dir / "new").write_text("127.0.0.1:1")
(run_dir / "new").replace(run_dir / "coordinator_address")
(run_dir / "coordinator").mkdir(exist_ok=True)
(run_dir / "coordinator" / "view.json").touch()
if what == "late":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "told":
    line = sys.stdin.readline()
    (run_dir / "told").write_text(line)
    sys.exit(int(line.partition(" ")[0]))
sys.exit(0)
"""
TWO_STAGES = Plan(2, ((0, 1), (1, 2)), ((0,), (1,)), (1,))
LIVES = "import sys; sys.stdin.read()"
DIES = "import sys; print('peer: no memory'); sys.exit(70)"


@pytest.fixture
def fleet_of(tmp_path, monkeypatch):
    """Makes a fleet whose coordinator dies as described, and whose peers run this text."""
    monkeypatch.setattr(fleet, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(fleet, "DESERTED_S", 0.2)
    monkeypatch.setattr(fleet, "ASKS_EVERY_S", 0.01)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run").write_text("r")

    def make(peer, *deaths):
        (tmp_path / "coordinate.py").write_text(f"DEATHS = {deaths!r}\n{COORDINATOR}")
        (tmp_path / "train.py").write_text(peer)
        options = dict(flags=[], began_s=0.0, lock=lock.fileno(), log=tmp_path / "log", n_cpus=1)
        return fleet.LocalFleet(run_dir, TWO_STAGES, tmp_path, **options)

    with (tmp_path / "lock").open("w") as lock:
        yield make


def test_a_coordinator_that_dies_before_it_has_an_address_is_started_again(fleet_of, tmp_path):
    local = fleet_of(LIVES, "late", "early", "early", "done")
    assert local.run() == 0
    assert (tmp_path / "run" / "starts").read_text() == "4"
    said = [line for line in (tmp_path / "log").read_text().splitlines() if "started again" in line]
    assert [line.partition(" again")[2] for line in said] == ["", " in 0 s", " in 0 s"]
    assert local._restart_pause_s == pytest.approx(0.04)


def test_its_address_stays_where_operators_read_it(fleet_of, tmp_path, monkeypatch):
    """A script that asks meanwhile names the coordinator, and no missing file."""
    address, seen = tmp_path / "run" / ADDRESS, []

    class Popen(subprocess.Popen):
        def __init__(self, command, **options):
            if command[1].endswith("coordinate.py"):
                seen.append(address.exists())
            super().__init__(command, **options)

    monkeypatch.setattr(fleet.subprocess, "Popen", Popen)
    address.write_text("127.0.0.1:2")  # of an earlier run
    assert fleet_of(LIVES, "late", "done").run() == 0
    assert seen == [False, True]


def test_a_coordinator_for_which_no_peer_waits_is_not_started_again(fleet_of, tmp_path):
    assert fleet_of(DIES, "late", "late", *["late"] * 50).run() == ExitCode.LOST
    assert "coordinator: lost, its process ended with exit code -9" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("present", [{"members": [{"silent_s": 0.1}]}, {"coming": [7]}, {"candidates": [7]}])
def test_a_run_ends_when_all_its_peers_have_ended_and_no_other_is_there(fleet_of, tmp_path, monkeypatch, present):
    nobody = {"members": [{"silent_s": None}, {"silent_s": 30.0}], "coming": [], "candidates": []}
    answers = [nobody | present] * 5
    asked = []

    def ask(*arguments, **options):
        asked.append(answers.pop() if answers else nobody)
        return json.dumps(asked[-1])

    monkeypatch.setattr(fleet, "ask_as_operator", ask)
    monkeypatch.setattr(fleet, "DESERTED_S", 0.5)
    assert fleet_of(DIES, "told").run() == ExitCode.LOST
    told = (tmp_path / "run" / "told").read_text()
    assert told == "3 all peers have ended, and no other is on its way; of peer 0: peer: no memory\n"
    assert not answers and len(asked) > 6
