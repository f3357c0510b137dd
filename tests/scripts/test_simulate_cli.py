"""scripts/simulate.py and scripts/reproduce.py as people call them, with jax out of reach."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from forks import run_scripts

from jaxdt.run import plan as plans
from jaxdt.run import profile as profiles
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "configs/networks/dtfm_debug_8.json"
KINDS = "configs/networks/mixed24.json"
SMALL = ("--model=debug", "--flops=1e9", "--stages=2", "--pipelines=2", "--microbatches=8", "--steps=1")


def call(script, *arguments):
    (done,) = run_scripts([(f"scripts/{script}", *arguments)], ROOT, without_jax=True)
    return subprocess.CompletedProcess(arguments, *done)


def test_a_prediction_with_everything_that_it_writes(tmp_path):
    out = tmp_path / "out"
    sweep = ("--sweep=bandwidth_gbps=0.01:1", "--points=3", "--jitter_ms=1", "--access_gbps=0.5", "--tcp_ramp")
    done = call("simulate.py", *SMALL, f"--network={NETWORK}", f"--out={out}", *sweep)
    assert done.returncode == 0, done.stderr
    assert "2 stages x 2 pipelines" in done.stdout and done.stdout.count("bandwidth_gbps ") == 3
    result = json.loads((out / "prediction.json").read_text())
    assert sum(result["parts"].values()) == pytest.approx(result["step_s"])
    assert set(result["utilisation"]) == set(result["memory_bytes"]) == {"0", "1", "2", "3"}
    assert "0>1" in result["bytes_per_link"]
    steps = [point["step_s"] for point in json.loads((out / "sweep.json").read_text())]
    assert steps == sorted(steps, reverse=True)
    assert any(event["ph"] == "X" for event in json.loads((out / "timeline.json").read_text())["traceEvents"])
    assert all((out / name).read_bytes()[:4] == b"\x89PNG" for name in ("simulation.png", "sweep.png"))


def test_a_pool_with_all_that_is_drawn_of_it(tmp_path):
    pool = (
        "--config=configs/small.py",
        "--config.wiring.kind=pool",
        "--config.plan.workers=1",
        "--flops=1e9",
        "--steps=1",
    )
    done = call("simulate.py", *pool, f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "prediction.json").read_text())
    assert set(result["utilisation"]) == {"0", "1", "2", "3"} and min(result["utilisation"].values()) > 0.2
    assert (tmp_path / "simulation.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plan_and_a_profile_say_everything(tmp_path):
    model = GPTConfig.of("debug")
    plan = Plan(2, ((0, 1), (1, 2)), ((5,), (2,)), (6,), schedule="gpipe")
    (tmp_path / "plan.json").write_text(json.dumps(plans.to_json(plan)))
    profile = profiles.from_flops(model, 2, {"": 1e9}, 0.5)
    (tmp_path / "profile.json").write_text(json.dumps(profiles.to_json(profile)))
    files = [f"--plan={tmp_path}/plan.json", f"--profile={tmp_path}/profile.json", f"--network={NETWORK}"]
    done = call("simulate.py", *files, "--steps=1")
    assert done.returncode == 0, done.stderr
    assert "2 stages x 1 pipelines, 6 microbatches, gpipe" in done.stdout


def test_a_run_under_faults_says_what_came_of_them(tmp_path):
    """Drawn faults leave every stage a peer, so the run gets to its end; a trace may take all of them."""
    run = ("simulate.py", "--model=debug", "--flops=3e6", "--stages=2", "--pipelines=3", "--steps=2")
    done = call(*run, "--faults=7:4")
    assert done.returncode == 0, done.stderr
    assert done.stdout == call(*run, "--faults=7:4").stdout != call(*run, "--faults=8:4").stdout
    assert done.stdout.startswith("no network is given: ")
    assert " cannot reach " in done.stdout and done.stdout.endswith("code 0, done: 2 steps\n")
    (tmp_path / "trace.json").write_text(json.dumps({"t_s": [0, 5, 6], "nodes": [6, 0, 0]}))
    done = call(*run, f"--trace={tmp_path}/trace.json", "--trace_speed=2")
    assert done.stdout.count("2.500 s: the process of peer ") == 6 and "code 3, " in done.stdout.splitlines()[-1]


def test_machines_of_a_trace_that_come_back_join_the_run(tmp_path):
    """Two of six go, one stage loses a peer or two, and both come back, over links of 10 Mb/s."""
    (tmp_path / "trace.json").write_text(json.dumps({"t_s": [0, 10, 60], "nodes": [6, 4, 6]}))
    run = ("--model=debug", "--flops=1e7", "--stages=2", "--pipelines=3", "--steps=6", f"--network={NETWORK}")
    done = call("simulate.py", *run, f"--trace={tmp_path}/trace.json", f"--out={tmp_path}/out")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("code 0, done: 6 steps\n")
    assert done.stdout.count(" asks to join, ") == done.stdout.count(" has the state of step ") == 2
    found = json.loads((tmp_path / "out" / "faults.json").read_text())
    assert [sum(at["peers"]) for at in found["peers_per_stage"]] == [6, 4, 6]
    assert [step["step"] for step in found["steps"]] == list(range(6)) and len(found["faults"]) == 4
    assert (tmp_path / "out" / "faults.png").read_bytes()[:4] == b"\x89PNG"


def test_the_schedule_of_a_step_is_printed_as_a_grid(tmp_path):
    """First the schedule of each pipeline by itself, then a simulated step, which has the updates too."""
    done = call("simulate.py", *SMALL, "--grid", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "stage 0   0F0 0F1   . 0B0 0F2 0B1 0F3 0B2   . 0B3\n" in done.stdout
    assert done.stdout.count("no deadlock, 10 ticks\n") == 2
    simulated = done.stdout.partition("as simulated, in the order of each peer:\n")[2].splitlines()
    assert [line.split()[0] for line in simulated] == ["p0", "p1", "p2", "p3"]
    assert simulated[0].split()[1:4] == ["0F0", "0F1", "0B0"] and simulated[0].endswith(" 0U")
    again = call("simulate.py", f"--orders={tmp_path}/orders.txt")
    assert again.returncode == 0 and done.stdout.startswith(again.stdout)


def test_a_wiring_without_a_schedule_prints_the_simulated_step_alone(tmp_path):
    (tmp_path / "swarm.py").write_text(
        "from ml_collections import ConfigDict\n\n"
        "def get_config():\n"
        "    plan = dict(stages=2, pipelines=1, microbatches=2)\n"
        "    return ConfigDict(dict(model=dict(preset='debug'), plan=plan, wiring=dict(kind='swarm')))\n"
    )
    done = call("simulate.py", f"--config={tmp_path}/swarm.py", "--flops=1e9", "--grid")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("step 1 as simulated") and "1B1" in done.stdout


def test_orders_that_deadlock_are_shown_and_bad_ones_refused(tmp_path):
    orders = tmp_path / "orders.txt"
    orders.write_text("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1\n")
    done = call("simulate.py", f"--orders={orders}")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[1:] == [
        "stage 0   0F0   0B0 waits for 1B0",
        "stage 1     .   1F1 waits for 0F1",
        "deadlocks after 1 ticks: 0B0 waits for 1B0; 1F1 waits for 0F1",
    ]
    for text, line in (
        ("0F0 0B0\n1F0\n", "pipeline 0: stage 1: B of [], expected each of [0] once"),
        ("0F0 0B0 oops\n", "orders.txt: line 1: work: got 'oops'"),
        ("\n", "is empty, expected a line per stage"),
    ):
        orders.write_text(text)
        done = call("simulate.py", f"--orders={orders}")
        assert done.returncode == 2 and line in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert "cannot be read" in call("simulate.py", f"--orders={tmp_path}/none.txt").stderr


REFUSALS = [
    (("--flops=1e9",), "--config, --profile, --model: got none of them"),
    (("--model=debug",), "--profile, --flops: got neither"),
    ((*SMALL, "--sweep=bandwith_gbps=1:2"), "did you mean"),
    ((*SMALL, "--sweep=latency_ms=5"), "expected latency_ms=LOW:HIGH"),
    ((*SMALL, "--flops=fast"), "--flops: got 'fast', expected FLOP/s of all devices, or KIND=FLOP/s"),
    ((*SMALL, "--flops=1e9,2e9"), "--flops: got '1e9,2e9', expected FLOP/s of all devices, or KIND=FLOP/s, each"),
    ((*SMALL, "--flops=A=1e9,2e9"), "--flops: got 'A=1e9,2e9', expected"),
    ((*SMALL, "--flops=A=1e9,A=2e9"), "--flops: got 'A=1e9,A=2e9', expected"),
    (
        (*SMALL, "--flops=A100=1e12"),
        "--flops: got one for the kind A100, of which a network that is not given has none",
    ),
    ((*SMALL, "--flops=A100=1e12", f"--network={NETWORK}"), "has none, expected FLOP/s without a kind"),
    ((*SMALL, "--flops=A10O=1e12", f"--network={KINDS}"), '(did you mean "A100"?), expected one for each of'),
    ((*SMALL, "--flops=1e-300"), "flops[]: got 1e-300, of which the maths reaches 0.35: profile: forward_s: got "),
    ((*SMALL, "--efficiency=1e-300"), "expected seconds from 0 to 1e+07"),
    ((*SMALL, "--jitter_ms=1e300"), "--jitter_ms: got 1e+300, expected a number from 0 to 1e+10"),
    ((*SMALL, "--exchange_ms=nan"), "--exchange_ms: got nan, expected a number"),
    ((*SMALL, "--access_gbps=1e-300"), "--access_gbps: got 1e-300, expected a number from 1e-06 to inf"),
    ((*SMALL, "--stall=0.5,1e300,0"), "stall: got 1e+300 seconds, expected seconds from 0 to 1e+07"),
    ((*SMALL, "--sweep=bandwidth_gbps=1e-300:1"), "bandwidth_gbps: got 1e-300, expected a number from 1e-06"),
    ((*SMALL, "--sweep=latency_ms=1:1e300"), "latency_ms: got 1e+300, expected a number from 0 to 100000"),
    ((*SMALL, "--sweep=latency_ms=1:2", "--points=9999999"), "--points: got 9999999, expected an integer in 2..1000"),
    ((*SMALL, "--microbatches=100000000000"), "plan.microbatches: got 100000000000, expected an integer in 1.."),
    (
        (*SMALL, "--microbatches=1000000", "--steps=9"),
        "events to simulate, expected at most 2e+07: fewer or shorter steps",
    ),
    ((*SMALL, "--steps=100000000000"), "events to simulate, expected at most 2e+07"),
    ((*SMALL, "--faults=7:4", "--flops=1e3", "--steps=99"), "events to simulate, expected at most 2e+07"),
    ((*SMALL, "--faults=7:4", "--steps=100000000000"), "events to simulate, expected at most 2e+07"),
    ((*SMALL, "--pipelines=100000000000"), "plan.pipelines: got 100000000000, expected an integer in 1..4096"),
    ((*SMALL, "--pipelines=2048", "--microbatches=2048", "--steps=9"), "events to simulate, expected at most 2e+07"),
    ((*SMALL, f"--microbatch_size={10**20}"), f"train.microbatch_size: got {10**20}, expected an integer in 1.."),
    ((*SMALL, "--steps=0"), "--steps: got 0"),
    ((*SMALL, "--faults=7"), "--faults: got '7', expected SEED:N"),
    ((*SMALL, "--faults=7:1000000000"), "--faults: got '7:1000000000', expected SEED:N with N in 1..1000"),
    ((*SMALL, "--trace=none.json"), "none.json: cannot be read"),
    ((*SMALL, "--network=none.json"), "none.json: cannot be read"),
    ((*SMALL, "--stages=8", f"--network={NETWORK}"), "expected at most n_layers 2"),
    ((*SMALL, "--pipelines=5", f"--network={NETWORK}"), "has 8 devices, the plan uses device 9"),
]


def test_bad_input_is_one_line_and_code_2():
    commands = [("scripts/simulate.py", *arguments) for arguments, _ in REFUSALS]
    results = run_scripts(commands, ROOT, without_jax=True)
    for (arguments, line), (code, _, err) in zip(REFUSALS, results, strict=True):
        assert code == 2 and line in err and len(err.splitlines()) == 1, (arguments, err)


def test_reproduce_writes_a_page_with_its_picture_from_its_values(tmp_path):
    committed = ROOT / "configs/reproduce/hybrid_ps_table1"
    (tmp_path / "hybrid_ps_table1").mkdir()
    shutil.copy(committed / "results.jsonl", tmp_path / "hybrid_ps_table1")
    done = call("reproduce.py", "hybrid_ps_table1", f"--out={tmp_path}", "--from_results")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hybrid_ps_table1" / "README.md").read_text() == (committed / "README.md").read_text()
    assert (tmp_path / "hybrid_ps_table1" / "hybrid_ps_table1.png").stat().st_size < 150_000


def test_reproduce_refuses_what_it_does_not_know():
    done = call("reproduce.py", "dtmf")
    assert done.returncode == 2 and 'did you mean "dtfm"' in done.stderr
