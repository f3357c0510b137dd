"""`replan --run_dir`: what it reads in a run's folder, what it refuses, and the command that takes its plan.
test_churn.py has a real run that is planned for."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run import serialize
from jaxdt.run.config import PlanConfig, RunConfig, default_plan
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.profile import Profile, from_flops, stage_seconds
from jaxdt.run.work import Work, WorkKind
from jaxdt.runtime.run_dir import write_config_and_plan
from jaxdt.runtime.storage.durable import FileStore, write_json
from planner.__main__ import main
from planner.commands.run_folder import RunToReplan, device_kind, read

pytestmark = pytest.mark.xdist_group("kernels")

CITIES = Path("configs/networks/four_cities.json").resolve()
CONFIG = RunConfig(GPTConfig.of("debug", n_layers=4), PlanConfig(2, 2, microbatches=8))
PLAN = default_plan(CONFIG)  # pipelines 0 - 1 and 2 - 3
PROFILE = from_flops(CONFIG.model, 1, {"": 1e9}, 0.5)
SECONDS = {peer: stage_seconds(PROFILE, "", *PLAN.stages[PLAN.seat(peer)[0]]) for peer in PLAN.peers}
KINDS = (WorkKind.FORWARD, WorkKind.BACKWARD, WorkKind.GATHER, WorkKind.UPDATE)


def works_of(peer, stage=None, kinds=KINDS):
    """The Work of a peer, of which the first is slow: it compiles, or reads a cold cache."""
    stage = PLAN.seat(peer)[0] if stage is None else stage
    return [
        (Work(stage, kind, 0, peer, step), (9.0 if step == 0 else SECONDS[peer][kind]))
        for step in range(3)
        for kind in kinds
    ]


def write_run(folder, members, config=CONFIG, launch=None):
    write_config_and_plan(folder, config, PLAN)
    stages = {peer: PLAN.seat(peer)[0] if peer in PLAN.peers else 0 for peer in members}
    view = ev.View(
        2, 1, 0, tuple(ev.Member(peer, stage, 1, f"10.0.0.{peer}:7") for peer, stage in stages.items()), (), 3
    )
    FileStore(folder / "coordinator").put("view", serialize.write(view))
    write_json(folder / "launch.json", {"emulate": str(CITIES)} if launch is None else launch)
    (folder / "trace").mkdir(exist_ok=True)
    for peer in set(members) & set(PLAN.peers):
        with (folder / "trace" / f"peer_{peer}.jsonl").open("w") as file:
            trace = Trace(file.write)
            for work, seconds in works_of(peer):
                trace.run(peer, 1.0, seconds, work)
    return folder


def refused(capsys, *flags):
    assert main(["replan", *map(str, flags)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("peer", PLAN.peers)
def test_the_seconds_of_a_device_follow_from_those_of_its_stage(peer):
    profile = Profile(CONFIG.model, 1, {"": device_kind(CONFIG, PLAN, peer, works_of(peer))})
    found = stage_seconds(profile, "", *PLAN.stages[PLAN.seat(peer)[0]])
    for kind in KINDS:
        assert found[kind] == pytest.approx(SECONDS[peer][kind]), kind


def test_a_peer_that_has_moved_is_as_fast_as_at_its_new_stage():
    at_both = [*works_of(0), *works_of(1)]
    assert device_kind(CONFIG, PLAN, 0, at_both) == device_kind(CONFIG, PLAN, 1, works_of(1))


def test_where_replicas_may_differ_a_local_step_counts_as_an_update():
    works = [(replace(work, kind=WorkKind.LOCAL_STEP) if work.kind == "U" else work, s) for work, s in works_of(0)]
    assert device_kind(CONFIG, PLAN, 0, works) == device_kind(CONFIG, PLAN, 0, works_of(0))


def test_the_folder_says_who_is_left_and_how_fast(tmp_path):
    run = read(str(write_run(tmp_path, [0, 1, 2])), None)
    names = [device.name for device in networks.load(CITIES).devices]
    assert (run.config, run.without) == (CONFIG, (names[3],))
    assert [device.kind for device in run.network.devices] == names
    assert list(run.profile.kinds) == names[:3] and run.plan.devices == tuple(names)


def test_a_better_plan_is_written_with_the_command_that_takes_it(tmp_path, capsys):
    """Peer 3 is gone, and peer 2 far away: without it a step takes no trip across the ocean."""
    folder, out, after = write_run(tmp_path / "run", [0, 1, 2]), tmp_path / "plan.json", tmp_path / "after.json"
    flags = ["replan", f"--run_dir={folder}", "--time_limit_s=1"]
    assert main([*flags, f"--out={out}", f"--out_network={after}"]) == 0
    told = capsys.readouterr().out
    plan = plans.load(out)
    assert len(plan.peers) == 2 and plan.found["step_s"] < 0.9 * plan.found["replan"]["unchanged_s"]
    assert "without a new plan: " in told
    before, launch = told.splitlines()[-1].split(" && ")
    gain, _, stop = before.removeprefix("to take this plan (").partition("%): ")
    assert int(gain) < -10 and shlex.split(stop) == ["python", "scripts/fleet.py", "stop", f"--run_dir={folder}"]
    resume = [f"--run_dir={folder}", "--resume", f"--plan={out}", f"--emulate={after}"]
    assert shlex.split(launch) == ["python", "scripts/launch.py", *resume]
    assert main(flags) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("a better plan of these members: --out=")


def test_no_better_plan_is_said(tmp_path, capsys):
    """Links that are all alike, and so slow that layers may as well be where they are."""
    network = tmp_path / "network.json"
    network.write_text(json.dumps(networks.to_json(networks.uniform(4, 100.0, 1.0))))
    folder = write_run(tmp_path / "run", range(4), launch={"network": str(network)})
    assert main(["replan", f"--run_dir={folder}", "--time_limit_s=1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no better plan of these members was found"


@pytest.mark.parametrize(
    ("is_running", "has_ended", "before"), [(True, False, "stop"), (False, False, "interrupt"), (True, True, "")]
)
@pytest.mark.parametrize("is_emitted", [False, True])
def test_the_command_names_the_run_as_it_is_resumed_and_is_quoted(tmp_path, is_running, has_ended, before, is_emitted):
    job = tmp_path / "b's two"
    run_dir = job / "run_dir" if is_emitted else job
    run_dir.mkdir(parents=True)
    if is_emitted:
        (job / "coordinator.flags").touch()
    if has_ended:
        (run_dir / "summary.json").touch()
    write_run(run_dir, [0, 1], launch={"network": str(CITIES)})
    write_json(job / "launch.json", {"network": str(CITIES)})
    run: RunToReplan = read(str(run_dir), None)
    command = run.command(PLAN, "a b.json", "after.json", is_running)
    if before == "stop":
        stop, _, command = command.partition(" && ")
        assert shlex.split(stop) == ["python", "scripts/fleet.py", "stop", f"--run_dir={run_dir}"]
    if before == "interrupt":
        interrupt, _, command = command.partition(", then ")
        assert interrupt == "interrupt the run"
    where = f"--emit={job}" if is_emitted else f"--run_dir={run_dir}"
    words = ["python", "scripts/launch.py", where, "--resume", "--plan=a b.json", "--network=after.json"]
    assert shlex.split(command) == words


def test_the_hosts_are_those_of_the_devices_that_the_plan_uses_and_all_networks_are_cut(tmp_path):
    """Peers are numbered anew without the device of peer 1, and one was added."""
    launch = {"emulate": str(CITIES), "network": "measured.json", "hosts": "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"}
    run = read(str(write_run(tmp_path, [0, 2, 3], launch=launch)), None)
    first, _, third, fourth = run.plan.devices
    found = replace(PLAN, devices=(first, third, fourth, "new"))
    words = shlex.split(run.command(found, "plan.json", "after.json", is_running=True).partition(" && ")[2])
    assert words[-3:] == [
        "--emulate=after.json",
        "--network=after.json",
        "--hosts=10.0.0.1,10.0.0.3,10.0.0.4,ADDRESS_OF_new",
    ]


def test_what_is_missing_is_named(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [0, 1, 2], launch={})
    assert "--network: missing, since" in refused(capsys, f"--run_dir={folder}")
    flags = (f"--run_dir={folder}", f"--network={CITIES}")
    (folder / "trace" / "peer_2.jsonl").unlink()
    assert "peer_2.jsonl: missing, expected the timings of peer 2; bring it from 10.0.0.2" in refused(capsys, *flags)
    (folder / "coordinator" / "view.json").unlink()
    assert "view.json: missing, expected the folder of a run that has begun" in refused(capsys, *flags)
    (folder / "config.json").unlink()
    assert "config.json: cannot be read" in refused(capsys, *flags)
    assert "--from: missing" in refused(capsys)


def test_what_does_not_fit_is_refused(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [0, 1, 2, 7])
    assert "which devices the newcomers 7 are" in refused(capsys, f"--run_dir={folder}")
    write_run(folder, [0])
    assert "1 devices are left for 2 stages" in refused(capsys, f"--run_dir={folder}")
    assert "--without: got x with --run_dir" in refused(capsys, f"--run_dir={folder}", "--without=x")
    (folder / "trace" / "peer_0.jsonl").write_text('{"what": "run", "peer": 0, "t": 1.0, "s": 1.0, "work": "?"}\n')
    assert "peer_0.jsonl: line 1: got" in refused(capsys, f"--run_dir={folder}")
    (folder / "trace" / "peer_0.jsonl").write_text("")
    assert "the trace of peer 0 has no forward and backward" in refused(capsys, f"--run_dir={folder}")
    small = tmp_path / "small.json"
    small.write_text(json.dumps(networks.to_json(networks.uniform(3, 0.1, 1.0))))
    assert "has 3 devices, the plan uses device 3" in refused(capsys, f"--run_dir={folder}", f"--network={small}")
    named = replace(PLAN, devices=("a", "b", "c", "d"))
    (folder / "plan.json").write_text(json.dumps(plans.to_json(named)))
    assert "differ from those of the run's plan, expected a, b, c, d" in refused(capsys, f"--run_dir={folder}")


def test_a_damaged_file_is_refused_in_one_line(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [0, 1, 2])
    view = folder / "coordinator" / "view.json"
    view.write_text(view.read_text().replace("10.0.0.1", "10.0.0.9"))
    told = refused(capsys, f"--run_dir={folder}")
    assert "view.json: damaged" in told and told.count("\n") == 1


def test_a_trace_of_no_stage_of_the_plan_is_refused():
    with pytest.raises(BadInput, match="no forward and backward of a stage"):
        device_kind(CONFIG, PLAN, 0, works_of(0, stage=2))
