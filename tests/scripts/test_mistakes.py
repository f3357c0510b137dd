"""54 mistakes that people make in their first hour: each is refused in one line that names the remedy, with exit code
2, and nothing is started or written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forks import run_scripts

from jaxdt.model.prepare import EVAL_TEXTS, prepare
from jaxdt.run import plan as plans
from jaxdt.run.network import to_json, uniform
from jaxdt.run.plan import Plan
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "launch --config=configs/quickstart.py --run_dir=new"
# A command with a mistake, and words of the line that it prints. `planner` is python -m planner, others are in
# scripts/.
MISTAKES = {
    "a flag that does not exist": (
        f"{TRAIN} --emulat=four_cities.json",
        '--emulat: unknown flag (did you mean "--emulate"?)',
    ),
    "a file for the run's folder": (
        "launch --config=configs/quickstart.py --run_dir=plan3.json",
        "run_dir: plan3.json is not a folder, expected one, or a name for a new one",
    ),
    "a flag file that is not there": (
        "train --flagfile=host_7.flags",
        "--flagfile: host_7.flags is not there, expected a file of flags; launch.py --emit=DIR writes flag files",
    ),
    "a flag file that is not there, for the simulator": (
        "simulate --flagfile=host_7.flags",
        "--flagfile: host_7.flags is not there, expected a file of flags",
    ),
    "a folder for a flag file": ("fleet status --flagfile=thesis", "--flagfile: thesis is a folder, expected a file"),
    "a folder for a network": (f"{TRAIN} --emulate=thesis", "thesis: is a folder, expected a file"),
    "a misspelt field": (
        f"{TRAIN} --config.train.stpes=3",
        '--config.train.stpes: unknown field (did you mean "steps"?)',
    ),
    "a value out of range": (f"{TRAIN} --config.train.steps=0", "train.steps: got 0, expected an integer >= 1"),
    "a word for a number": (
        f"{TRAIN} --config.optim.lr=fast",
        "--config.optim.lr: got 'fast', expected a number",
    ),
    "no folder": ("launch --config=configs/quickstart.py", "--run_dir: missing, expected --run_dir=..."),
    "the folder of another run": (
        "launch --config=configs/quickstart.py --run_dir=other",
        "holds another run, expected a new one, or --overwrite",
    ),
    "a folder of something else": (f"{TRAIN} --run_dir=thesis --overwrite", "expected a new or empty one"),
    "a network that is elsewhere": (f"{TRAIN} --emulate=four_cities.json", '"configs/networks/four_cities.json"'),
    "a network that is too small": (f"{TRAIN} --emulate=small.json", "has 1 devices, the plan uses device 3"),
    "a plan of another model": (f"{TRAIN} --plan=plan3.json", "made for 3 layers, the model has 4"),
    "more CPUs than there are": (f"{TRAIN} --pin=5000", "--pin: got 5000 for each of 4 peers, this machine has "),
    "nothing to resume": ("launch --resume --run_dir=new", "holds no run, expected the folder of one"),
    "hosts without a folder for them": (
        "launch --config=configs/two_hosts.py --run_dir=new --hosts=a,b",
        "--hosts: is read with --emit=DIR only, which writes what each host needs",
    ),
    "a folder that the emitted one has": (
        "launch --config=configs/two_hosts.py --run_dir=new --emit=new --hosts=a,b",
        "--run_dir: got new, expected none with --emit, whose run is in new/run_dir",
    ),
    "the flag file of another script": (
        "coordinate --flagfile=host_0.flags",
        "--peer: unknown flag, given by host_0.flags: is it another script's?",
    ),
    "a command in another folder": ("launch --config=jaxdt/configs/quickstart.py --run_dir=new", "(no such file in /"),
    "a token file for another one": (
        "prepare_data --train=novel.txt --out=made.tok",
        "made.tok: holds tokens of other texts, expected a new file; or delete it",
    ),
    "no flag at all": ("launch", "--config: missing, expected a file whose get_config() returns a ConfigDict, such as"),
    "a folder for a config": (f"{TRAIN} --config=thesis", "--config: thesis: is a folder, expected a file"),
    "a folder for a config, with a field": (
        "launch --config=thesis --config.train.steps=3 --run_dir=new",
        "--config: thesis: is a folder, expected a file",
    ),
    "a folder for a config, for the simulator": (
        "simulate --config=thesis",
        "--config: thesis: is a folder, expected a file",
    ),
    "a misspelt file for the simulator": (
        "simulate --config=configs/quikstart.py",
        'cannot be read (no such file; did you mean "configs/quickstart.py"?)',
    ),
    "a misspelt file": (f"{TRAIN} --config=configs/quikstart.py", 'did you mean "configs/quickstart.py"'),
    "a field without its name": (f"{TRAIN} --steps=3", "--steps: unknown flag (did you mean --config.train.steps?)"),
    "a flag without its dashes": (f"{TRAIN} resume", 'expected flags only (did you mean "--resume"?)'),
    "a text for a token file": (
        f"{TRAIN} --config.data.path=novel.txt",
        "python scripts/prepare_data.py --train=novel",
    ),
    "no links to decide on": (
        f"{TRAIN} --config.codec=auto",
        "expected --emulate=NETWORK.json or --network=NETWORK.json",
    ),
    "one host for two peers": (
        "launch --config=configs/two_hosts.py --emit=new --hosts=a",
        "got 1 addresses, expected 2",
    ),
    "a text in UTF-16": ("prepare_data --train=wide.txt --out=new", "iconv -f UTF-16 -t UTF-8 wide.txt"),
    "a misspelt tokenizer": ("prepare_data --tokenizer=gpt3 --out=new", 'did you mean "gpt2"'),
    "chats for a tokenizer without a template": (
        "prepare_data --chat --train=novel.txt --eval=novel.txt --out=new",
        "--chat: the tokenizer bytes has no chat template, expected a model's folder, or",
    ),
    "chats beside the committed corpus": (
        "prepare_data --chat --train=novel.txt --out=new",
        "--chat: expected --train and --eval with files of conversations (--eval= for none held out)",
    ),
    "devices of unknown speed": ("simulate --model=debug", "--profile, --flops: got neither, expected one that says"),
    "a misspelt command": ("planner sovle", '(did you mean "solve"?); see python -m planner --help'),
    "a misspelt flag of a command": (
        "planner solve --netwrok=small.json",
        'unrecognized arguments: --netwrok (did you mean "--network"?); see python -m planner solve --help',
    ),
    "a word too many": ("planner devices now", "unrecognized arguments: now; see python -m planner devices --help"),
    "a network that the planner does not find": (
        "planner solve --network=four_citis.json --stages=2 --pipelines=2 --c_dp_bytes=1 --c_pp_bytes=1",
        '(no such file; did you mean "configs/networks/four_cities.json"?)',
    ),
    "a misspelt plan": ("planner explain plan.json", 'cannot be read (no such file; did you mean "plan3.json"?)'),
    "a folder of results by its name elsewhere": (
        "simulate --model=debug --flops=1e9 --run_dir=new",
        '--run_dir: unknown flag (did you mean "--out"?)',
    ),
    "a folder without its flag": ("report other", 'expected flags only (did you mean "--run_dir=other"?)'),
    "a flag that nothing resembles": ("sample --run_dir=other --step=7", "--step: unknown flag, see --help"),
    "a flag that only a process of a run reads": (f"{TRAIN} --token=new_1.token", "--token: unknown flag, see --help"),
    "a flag of a run for one that has ended": (
        "report --run_dir=other --resume_from=other",
        "--resume_from: unknown flag, see --help",
    ),
    "fewer tokens than none": ("sample --run_dir=other --n_tokens=-4", "--n_tokens: got -4, expected an integer >= 1"),
    "a text of no run": ("sample --run_dir=thesis", "thesis has no config.json, expected the folder of a run"),
    "an ablation into a run": (
        "ablate --config=configs/ablation.py --run_dir=other",
        "other is the folder of a run, expected a new one, or that of an ablation",
    ),
    "a token file for a text": (
        "prepare_data --train=made.tok --out=new",
        "is a token file already, expected a text; to train on it: --config.data.path=made.tok",
    ),
    "a word for a number of stages": (
        "planner solve --network=configs/networks/four_cities.json --stages=two",
        "argument --stages: got 'two', expected a number, or auto",
    ),
    "a shape for other devices": (
        "planner solve --network=configs/networks/four_cities.json --stages=8 --pipelines=8"
        " --c_dp_bytes=1 --c_pp_bytes=1",
        "got 8 x 8 = 64, expected the 4 devices of four_cities",
    ),
}


@pytest.fixture
def folder(tmp_path):
    """Where somebody works: the repository's configs, a run, a text, and some files that do not fit."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    plan = Plan(3, ((0, 1), (1, 3)), ((0,), (1,)), (1,))
    files = {
        "other/config.json": b"{}",
        "thesis/chapter.txt": b"years of work",
        "novel.txt": b"It is a truth universally acknowledged",
        "wide.txt": "It is a truth".encode("utf-16"),
        "plan3.json": json.dumps(plans.to_json(plan)).encode(),
        "host_0.flags": b"--peer=0\n--coordinator=127.0.0.1:9\n--run_dir=new\n",
        "coordinator.flags": b"--listen=127.0.0.1:9\n--run_dir=new\n",
        "small.json": json.dumps(to_json(uniform(1, 0.01, 1.0))).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "other.txt").write_text("of a truth")
    prepare([tmp_path / "other.txt"], EVAL_TEXTS, "bytes", tmp_path / "made.tok")
    return tmp_path


def script_of(name: str) -> str:
    return str(ROOT / ("planner/__main__.py" if name == "planner" else f"scripts/{name}.py"))


def test_each_mistake_is_one_line_that_names_the_remedy(folder):
    assert __doc__.startswith(f"{len(MISTAKES)} mistakes "), "the number at the head of this file"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    commands = [typed.split() for typed, _ in MISTAKES.values()]
    results = run_scripts([[script_of(name), *rest] for name, *rest in commands], folder)
    for (mistake, (typed, remedy)), (code, out, err) in zip(MISTAKES.items(), results, strict=True):
        assert (code, out) == (2, ""), (mistake, typed, out, err)
        assert remedy in err and err.count("\n") == 1 and "Traceback" not in err, (mistake, typed, err)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (folder / "new").exists()


@pytest.mark.parametrize(
    ("typed", "remedy"),
    [
        ("--flagfile=coordinator.flags", "coordinator.flags does not give it: is it another script's?"),
        ("--join=127.0.0.1:9 --run_dir=new --token=abc", "NAME.token; python scripts/tools/credential.py token "),
        ("--join= --run_dir=new", "--join: got '', expected the coordinator's host:port"),
        ("--join=127.0.0.1 --run_dir=new --token=abc", "--join: got '127.0.0.1', expected host:port"),
    ],
    ids=[
        "the coordinator's flags for a host",
        "a token that is none",
        "the address of no run",
        "an address without a port",
    ],
)
def test_a_mistake_at_a_host_is_one_line_before_jax_is_loaded(typed, remedy, folder):
    environment = os.environ | MALLOC_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    command = [sys.executable, script_of("train"), *typed.split()]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    imports = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert imports and not [line for line in imports if line.endswith("| jax")]
    lines = [line for line in done.stderr.splitlines() if line not in imports]
    assert (done.returncode, done.stdout) == (2, "") and len(lines) == 1 and remedy in lines[0], (lines, done.stdout)


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_without_the_environment_is_one_line(script):
    done = subprocess.run([sys.executable, "-S", script], cwd=ROOT, env={}, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert f"jaxdt is not installed for {sys.executable}: in a checkout, source .venv/bin/activate" in done.stderr


def test_the_planner_without_the_environment_is_one_line():
    flags = "--network=configs/networks/four_cities.json --stages=2 --pipelines=2 --c_dp_bytes=1 --c_pp_bytes=1"
    command = [sys.executable, "-S", "-m", "planner", "solve", *flags.split()]
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "has no numpy, expected the environment of this repository: source .venv/bin/activate" in done.stderr
