"""The command line: a plan from start to picture, the errors people make, and what may be imported."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from planner_cases import NETWORKS, case

from jaxdt.run import plan as plans
from jaxdt.run.config import WiringConfig
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.memory import MemoryOptions, most_retained, stage_memory
from jaxdt.run.model_facts import MicrobatchShape
from jaxdt.run.network import parse, to_json
from planner.__main__ import main
from planner.cost.reference import cost_of
from planner.model.generate import GENERATORS, generate

ROOT = Path(__file__).resolve().parents[2]
SIZES = ["--c_dp_bytes", "65e7", "--c_pp_bytes", "471249220"]


def solve(network, *flags, stages=4, pipelines=4):
    shape = ["--stages", str(stages), "--pipelines", str(pipelines)]
    return main(["solve", "--network", str(network), *shape, *flags])


@pytest.fixture
def planned(tmp_path):
    out = tmp_path / "plan.json"
    assert solve(NETWORKS / "small_gaming16.json", *SIZES, "--evaluations", "20000", "--out", str(out)) == 0
    return out


def test_a_plan_from_start_to_picture(planned, capsys):
    data = json.loads(planned.read_text())
    plan = plans.load(planned)
    assert sorted(plan.peers) == list(range(16))
    assert data["proved"]
    assert data["gap"] <= 1e-6
    assert data["solver"] == "auto"
    assert "found" not in data  # all that this solver says has a name in the plan's format
    cost = cost_of(case("small_gaming16"), data["placement"], 65e7, 471249220)
    assert data["cost"] == {"total_s": cost.total_s, "datap_s": cost.datap_s, "pipelinep_s": cost.pipelinep_s}
    assert main(["explain", str(planned)]) == 0
    text = capsys.readouterr().out
    assert "Slowest group: stage" in text
    assert "Slowest hop: stage" in text
    assert "proved" in text
    assert main(["plot", str(planned)]) == 0
    assert planned.with_suffix(".png").stat().st_size > 10_000


def test_two_plans_side_by_side(planned, tmp_path, capsys):
    other = tmp_path / "other.json"
    flags = ["--solver", "random", "--evaluations", "3", "--out", str(other)]
    assert solve(NETWORKS / "small_gaming16.json", *SIZES, *flags) == 0
    capsys.readouterr()
    assert main(["compare", str(planned), str(other)]) == 0
    assert "devices hold another stage" in capsys.readouterr().out
    assert main(["compare", str(planned), str(planned)]) == 0
    assert "0 of 16 devices" in capsys.readouterr().out


def test_bench_writes_its_table_and_picture(tmp_path, capsys):
    names = [str(NETWORKS / f"small_{name}.json") for name in ("gaming16", "jitter16", "random24")]
    flags = ["--stages", "4", "--pipelines", "4", "--solvers", "evolve,random", "--time_limit_s", "0.3"]
    assert main(["bench", *names, *flags, "--out", str(tmp_path / "bench")]) == 0
    table = (tmp_path / "bench" / "bench.md").read_text()
    assert "| network | best bound | `evolve` | `random` |" in table
    assert "| gaming_16_seed1 |" in table and "| jitter_16_seed1 |" in table and "random_24" not in table
    runs = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert [(run["solver"], run["seed"]) for run in runs] == 2 * [("evolve", 0), ("random", 0)]
    assert (tmp_path / "bench" / "bench.png").exists()


def test_four_cities_are_two_pairs_of_neighbours(tmp_path):
    out = tmp_path / "plan.json"
    flags = ["--c_dp_bytes", "1.7e6", "--c_pp_bytes", "1.05e6", "--layers", "4", "--microbatches", "8"]
    network = NETWORKS / "four_cities.json"
    assert solve(network, *flags, "--evaluations", "2000", "--out", str(out), stages=2, pipelines=2) == 0
    plan = plans.load(out)
    pipelines = {frozenset(plan.devices[row[p]] for row in plan.placement) for p in range(2)}
    assert pipelines == {frozenset({"london", "frankfurt"}), frozenset({"newyork", "sanfrancisco"})}
    assert plan.shares == (4, 4)
    assert plan.stages == ((0, 2), (2, 4))


@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_networks_can_be_read_back(kind, tmp_path):
    out = tmp_path / "n.json"
    assert main(["network", "generate", "--kind", kind, "--devices", "12", "--seed", "3", "--out", str(out)]) == 0
    network = parse(out.read_text(), "n")
    assert network.n_devices == 12
    assert to_json(network) == to_json(generate(kind, 12, 3))


def test_measurements_are_imported(tmp_path):
    table = tmp_path / "links.csv"
    table.write_text("src,dst,latency_ms,bandwidth_gbps\neu/a,us/b,40,0.5\nus/b,eu/a,42,0.4\neu/a,eu/c,5,1\n")
    out = tmp_path / "n.json"
    assert main(["network", "import", "--csv", str(table), "--out", str(out)]) == 0
    network = parse(out.read_text(), "n")
    assert [d.name for d in network.devices] == ["eu/a", "us/b", "eu/c"]
    assert [d.region for d in network.devices] == ["eu", "us", "eu"]
    assert network.link(0, 1).latency_s == 0.040
    assert network.link(1, 0).latency_s == 0.042
    assert network.link(2, 0) == network.link(0, 2)
    assert network.link(1, 2).bandwidth_gbps == 0


def changed(tmp_path, change) -> Path:
    data = json.loads((NETWORKS / "four_cities.json").read_text())
    change(data)
    path = tmp_path / "network.json"
    path.write_text(json.dumps(data))
    return path


def put(*keys, value):
    def change(data):
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = value

    return change


BAD_NETWORKS = {
    "NaN": (put("latency_ms", 0, 1, value=float("nan")), "latency_ms[0][1]"),
    "negative": (put("latency_ms", 2, 1, value=-1), "latency_ms[2][1]"),
    "rows": (put("latency_ms", value=[[0]]), "latency_ms"),
    "columns": (put("bandwidth_gbps", 1, value=[0, 1]), "bandwidth_gbps[1]"),
    "names": (put("devices", 1, "name", value="london"), "'london' occurs 2 times"),
    "memory": (put("devices", 2, "memory_bytes", value=10**9), "devices[2].memory_bytes"),
    "no links": (put("bandwidth_gbps", value=[[0] * 4] * 4), "zero bandwidth"),
}


@pytest.mark.parametrize("name", BAD_NETWORKS)
def test_bad_networks_are_one_line_and_exit_code_2(name, tmp_path, capsys):
    change, expected = BAD_NETWORKS[name]
    assert solve(changed(tmp_path, change), *SIZES, "--evaluations", "500", stages=2, pipelines=2) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert error.count("\n") == 0


BAD_FLAGS = {
    "sizes that do not multiply": ([*SIZES], 3, "2 x 3 = 6"),
    "no sizes": ([], 2, "--c_dp_bytes"),
    "negative bytes": (["--c_dp_bytes", "-1", "--c_pp_bytes", "1"], 2, "--c_dp_bytes"),
    "both": ([*SIZES, "--model", "small"], 2, "--model"),
    "unknown model": (["--model", "smal"], 2, 'did you mean "small"'),
    "fewer layers than stages": ([*SIZES, "--layers", "1"], 2, "at least one layer a stage"),
    "microbatches": (["--model", "small", "--global_batch", "1"], 2, "at least one for each"),
    "time": ([*SIZES, "--time_limit_s", "0"], 2, "--time_limit_s"),
    "exact on many": ([*SIZES, "--solver", "exact", "--time_limit_s", "nan"], 2, "--time_limit_s"),
}


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_bad_flags_are_one_line_and_exit_code_2(name, capsys):
    flags, pipelines, expected = BAD_FLAGS[name]
    assert solve(NETWORKS / "four_cities.json", *flags, stages=2, pipelines=pipelines) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert error.count("\n") == 0


def test_a_missing_link_is_avoided_where_a_plan_can(tmp_path):
    out = tmp_path / "plan.json"

    def cut(data):
        data["bandwidth_gbps"][0][1] = 0

    network = changed(tmp_path, cut)
    assert solve(network, *SIZES, "--evaluations", "1000", "--out", str(out), stages=2, pipelines=2) == 0
    plan = plans.load(out)
    assert plan.seat(0)[0] != plan.seat(1)[0]
    assert plan.seat(0)[1] != plan.seat(1)[1]


def test_memory_cuts_the_layers_and_too_little_is_refused(tmp_path, capsys):
    model = GPTConfig.of("small")
    shape = MicrobatchShape(1, model.max_len)

    def needs(lo, hi, in_flight):
        retained = min(16, most_retained(model, lo, hi, shape, "bfloat16", WiringConfig().retain_bytes))
        return stage_memory(model, lo, hi, shape, in_flight, MemoryOptions("bfloat16"), retained).total

    room = needs(0, 3, 4)

    def shrink(n_bytes):
        def change(data):
            for device in data["devices"][:2]:
                device["memory_bytes"] = n_bytes

        return change

    flags = ["--model", "small", "--global_batch", "16", "--evaluations", "500"]
    out = tmp_path / "plan.json"
    assert solve(changed(tmp_path, shrink(room)), *flags, "--out", str(out), stages=4, pipelines=1) == 0
    plan = plans.load(out)
    for stage, (lo, hi) in enumerate(plan.stages):
        if plan.placement[stage][0] < 2:
            assert needs(lo, hi, plan.depth(stage)) <= room
    assert solve(changed(tmp_path, shrink(1000)), *flags, stages=4, pipelines=1) == 2
    assert "memory_bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("objective", "number"),
    [
        (SIZES, signal.SIGINT),
        (["--model", "small", "--flops", "1e12", "--objective", "step_time"], signal.SIGTERM),
    ],
)
def test_an_interrupted_search_writes_its_best_plan(objective, number, tmp_path):
    out = tmp_path / "plan.json"
    shape = ["--network", str(NETWORKS / "small_random24.json"), "--stages", "4", "--pipelines", "6"]
    flags = [*shape, *objective, "--solver", "random", "--time_limit_s", "3600", "--out", str(out)]
    command = [sys.executable, "-m", "planner", "solve", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert "best" in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(60) == 0
    assert sorted(plans.load(out).peers) == list(range(24))


def test_the_planner_imports_neither_jax_nor_the_runtime_and_help_imports_little():
    code = (
        "import sys, pkgutil, importlib, planner\n"
        "import planner.__main__\n"
        "assert not {'numpy', 'ortools', 'numba', 'matplotlib'} & set(sys.modules)\n"
        "for m in pkgutil.walk_packages(planner.__path__, 'planner.'):\n"
        "    importlib.import_module(m.name)\n"
        "bad = [m for m in sys.modules if m == 'jax' or m.startswith(('jaxdt.runtime', 'jaxdt.model'))]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


WITHOUT_SOLVERS = """
import contextlib, sys
sys.modules.update(numba=None, ortools=None)  # importing either raises ImportError
from planner.__main__ import main
from planner.report.plan_file import read
path = sys.argv[1]
assert read(path).plan.n_stages == 4
assert main(["explain", path]) == 0
assert "numpy" not in sys.modules  # starting takes most of the time of `explain`
assert main(["compare", path, path]) == 0
for command in ("", "solve", "explain", "bench"):
    with contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
"""


def test_help_explain_and_reading_a_plan_need_neither_numba_nor_ortools(planned):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SOLVERS, str(planned)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Slowest group: stage" in done.stdout
    assert "0 of 16 devices" in done.stdout
    assert "{auto,evolve,types,exact,kl,dtfm,dtfm_kl,metis_like,amp_like,random,block,cluster}" in done.stdout


# ----------------------------------------------------------------------------------------------- the config of a run

CONFIG = """
from jaxdt.config_file import base_config


def get_config():
    config = base_config("small")
    config.plan.stages = 2
    config.plan.pipelines = 2
    config.plan.microbatches = 6
    config.train.microbatch_size = 2
    config.sync.delay = 1
    config.dtype = "bfloat16"
    config.codec = "int8"
    return config
"""


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(CONFIG)
    return str(path)


def test_a_plan_takes_sizes_and_options_from_the_config_of_its_run(config_file, tmp_path):
    out = tmp_path / "plan.json"
    flags = ["--config", config_file, "--evaluations", "500", "--out", str(out)]
    assert main(["solve", "--network", str(NETWORKS / "four_cities.json"), *flags]) == 0
    plan = plans.load(out)
    model = GPTConfig.of("small", vocab_size=256)
    assert (plan.n_stages, plan.n_pipelines, plan.n_microbatches) == (2, 2, 6)
    assert plan.codec == ("int8",)
    numbers = model.facts.boundary_numbers(2 * model.max_len)
    assert 3 * numbers < plan.found["c_pp_bytes"] < 3 * 1.1 * numbers  # three microbatches of a byte a number
    assert plan.found["c_dp_bytes"] == 4 * max(model.facts.stage_params(lo, hi) for lo, hi in plan.stages)
    step = ["--objective", "step_time", "--flops", "1e12"]
    assert main(["solve", "--network", str(NETWORKS / "four_cities.json"), *flags, *step]) == 0
    assert plans.load(out).found["step_s"] > 0


def test_memory_of_a_delayed_run_is_what_its_plan_must_fit(config_file, tmp_path, capsys):
    """Devices for the run without delay do not hold the run with it."""
    model = GPTConfig.of("small", vocab_size=256)
    shape = MicrobatchShape(2, model.max_len)

    def need(delay):
        retained = min(3, most_retained(model, 0, 4, shape, "bfloat16", WiringConfig().retain_bytes))
        return stage_memory(model, 0, 4, shape, 2, MemoryOptions("bfloat16", delay=delay), retained).total

    def shrink(data):
        for device in data["devices"]:
            device["memory_bytes"] = need(0) + (need(1) - need(0)) // 8

    flags = ["--config", config_file, "--evaluations", "500"]
    assert main(["solve", "--network", str(changed(tmp_path, shrink)), *flags]) == 2
    assert "memory_bytes" in capsys.readouterr().err
    Path(config_file).write_text(CONFIG.replace("sync.delay = 1", "sync.delay = 0"))
    assert main(["solve", "--network", str(changed(tmp_path, shrink)), *flags]) == 0


WRONG_CONFIGS = {
    "both": (CONFIG, ["--model", "small"], "--model"),
    "batch": (CONFIG, ["--global_batch", "8"], "--global_batch"),
    "bytes": (CONFIG, SIZES, "--config"),
    "syntax": ("def", [], "config.py"),
    "no function": ("x = 1", [], "get_config()"),
    "field": (CONFIG.replace('config.codec = "int8"', "config.train.steps = 0"), [], "train.steps"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_wrong_config_is_one_line(name, config_file, capsys):
    text, flags, expected = WRONG_CONFIGS[name]
    Path(config_file).write_text(text)
    network = str(NETWORKS / "four_cities.json")
    assert main(["solve", "--network", network, "--config", config_file, *flags, "--evaluations", "9"]) == 2
    error = capsys.readouterr().err.strip()
    assert expected in error
    assert error.count("\n") == 0


# --------------------------------------------------------------------------------------- files that cannot be written


def test_out_is_checked_before_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("planner.commands.solve.solve", None)  # a search would fail
    for out, expected in ((tmp_path, "is a folder"), (tmp_path / "none" / "plan.json", "does not exist")):
        assert solve(NETWORKS / "four_cities.json", *SIZES, "--out", str(out), stages=2, pipelines=2) == 2
        assert expected in capsys.readouterr().err


def test_network_and_plot_end_in_one_line(planned, tmp_path, capsys):
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({**json.loads(planned.read_text()), "cost": 3}))
    generate_flags = ["network", "generate", "--kind", "spot", "--devices", "8", "--out"]
    commands = [
        [*generate_flags, str(tmp_path)],
        [*generate_flags, str(tmp_path / "none" / "n.json")],
        ["network", "import", "--csv", str(tmp_path / "none.csv"), "--out", str(tmp_path / "n.json")],
        ["plot", str(planned), "--out", str(tmp_path / "plan.nosuchformat")],
        ["plot", str(planned), "--out", str(tmp_path / "none" / "plan.png")],
        ["plot", str(broken)],
        ["explain", str(broken)],
    ]
    capsys.readouterr()
    for command in commands:
        assert main(command) == 2, command
        error = capsys.readouterr().err.strip()
        assert error.startswith("error: "), command
        assert error.count("\n") == 0


def test_plans_of_different_sizes_are_not_compared(planned, tmp_path, capsys):
    other = tmp_path / "other.json"
    network = NETWORKS / "small_gaming16.json"
    flags = ["--solver", "random", "--evaluations", "3", "--out", str(other)]
    for sizes, stages, pipelines in ((SIZES, 2, 8), (["--c_dp_bytes", "1", "--c_pp_bytes", "1"], 4, 4)):
        assert solve(network, *sizes, *flags, stages=stages, pipelines=pipelines) == 0
        capsys.readouterr()
        assert main(["compare", str(planned), str(other)]) == 2
        assert "expected the" in capsys.readouterr().err


def test_no_sentinel_reaches_a_table(tmp_path, capsys):
    """Layouts without thought use a missing link; the plan does not."""

    def cut(data):
        for a, b in ((0, 1), (1, 0), (0, 2), (2, 0)):
            data["bandwidth_gbps"][a][b] = 0

    network = changed(tmp_path, cut)
    assert solve(network, *SIZES, "--evaluations", "1000", stages=4, pipelines=1) == 0
    for shape in ((4, 1), (1, 4)):  # four devices in one stage need the links that are missing
        shape_flags = ["--stages", str(shape[0]), "--pipelines", str(shape[1])]
        flags = [*SIZES, *shape_flags, "--solvers", "random", "--evaluations", "20", "--out", str(tmp_path)]
        assert main(["bench", str(network), *flags]) == 0
    words = capsys.readouterr().out.replace("|", " ").split()
    assert words.count("-") > 4
    assert "inf" not in words
    assert max(float(word) for word in words if "." in word and word.replace(".", "").isdigit()) < 1e3
