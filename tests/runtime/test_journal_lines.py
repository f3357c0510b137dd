"""The lines that the coordinator prints for people who wait, or who have to do something."""

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdt.protocol.reports import LeavingReport, StillWaitingReport
from jaxdt.runtime.reporting.counts import ExpertLoads, expert_lines
from jaxdt.runtime.reporting.journal import Journal, still_waiting
from jaxdt.testing.cases import draw_case

PLAN = draw_case(0).plan


def shown(capsys, report, on_stage_lost="wait"):
    wiring = SimpleNamespace(on_stage_lost=on_stage_lost)
    net = SimpleNamespace(heartbeat_s=0.5)
    config = SimpleNamespace(wiring=wiring, train=SimpleNamespace(steps=9), net=net)
    job = SimpleNamespace(run_dir=Path("runs/x"), config=config, plan=PLAN, run="r")
    Journal(job, SimpleNamespace(n_committed=0), SimpleNamespace(), live=False).report(report)
    return capsys.readouterr().out


@pytest.mark.parametrize(("on_stage_lost", "cost"), [("wait", "goes back to its last checkpoint"), ("stop", "code 3")])
def test_the_last_peer_of_a_stage_that_wants_to_leave_hears_what_a_second_interrupt_costs(on_stage_lost, cost, capsys):
    assert shown(capsys, LeavingReport(1, False)) == "peer 1: wants to leave\n"
    line = shown(capsys, LeavingReport(1, True), on_stage_lost)
    assert line.startswith("peer 1: wants to leave; it is the last of its stage, and stays until another joins; ")
    assert "a second interrupt ends it at once" in line and cost in line
    assert line.endswith(": python scripts/fleet.py stop --run_dir=runs/x\n")


def test_a_run_that_waits_says_for_whom_who_was_refused_and_what_to_start(tmp_path):
    job = tmp_path / "b's two"  # what is to be typed is quoted for a shell
    job.mkdir()
    (job / "coordinator.flags").touch()
    run_dir, train = job / "run_dir", ["python", "scripts/train.py"]
    line = still_waiting(StillWaitingReport([1, 2], [1], [], "an expired credential", 10.2), run_dir, PLAN)
    told, _, start = line.partition("; to start: ")
    assert told == (
        "the run has waited 10 s for peers 1 and 2 to get ready (a peer loads jax and "
        "compiles its stage); peer 1 is not connected; refused meanwhile: an "
        "expired credential"
    )
    assert shlex.split(start) == [*train, f"--flagfile={job}/host_1.flags"]
    line = still_waiting(StillWaitingReport([], [], [1], "", 30.0), run_dir, PLAN)
    told, of_hosts, newcomer = re.split("; to start: |; to start a newcomer: ", line)
    assert told == "the run has waited 30 s; stage 1 has no peer"
    flag_files = [f"--flagfile={job}/host_{peer}.flags" for peer in PLAN.placement[1]]
    assert shlex.split(of_hosts.replace(", ", " ")) == [word for file in flag_files for word in (*train, file)]
    assert shlex.split(f"echo {newcomer}")[1:3] == train
    (job / "coordinator_address").write_text("10.0.0.1:7700\n")
    shell = 'python() { printf "%s\n" "$@"; }; ' + newcomer
    words = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    token = ["--token=scripts/tools/credential.py", "token", f"--run_dir={run_dir}"]
    assert words == ["scripts/train.py", "--join=10.0.0.1:7700", *token, f"--run_dir={run_dir}"]


def test_the_load_of_experts_is_told_by_peer():
    loads = ExpertLoads()
    loads.counted(0, {"step": 3.0})
    assert loads.fields is None and expert_lines(loads.fields) == []
    loads.counted(1, {"step": 3.0, "auxiliary_loss": 0.5, "expert_load_max": 3.0})
    loads.counted(1, {"step": 4.0, "auxiliary_loss": 0.0201, "expert_load_max": 1.25})
    loads.counted(0, {"step": 4.0, "auxiliary_loss": 0.02, "expert_load_max": 1.5})
    loads.counted(0, {"step": 5.0})  # of a process that has just been started again
    assert loads.fields == {
        "0": {"auxiliary_loss": 0.02, "expert_load_max": 1.5},
        "1": {"auxiliary_loss": 0.0201, "expert_load_max": 1.25},
    }
    (line,) = expert_lines(loads.fields)
    assert line.endswith("1.50 x the mean load of its layer, on peer 0; largest auxiliary loss of a stage 0.02")
