"""A mistake of a person or a file gives one line and exit code 2, and nothing is started or overwritten.

The scripts run as a user starts them, except that one process imports the slow modules and is then forked for every
case."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forks import run_scripts

from jaxdt.model.data import HEADER_BYTES, open_data, write_tokens
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.model import recorded
from jaxdt.run.network import to_json, uniform
from jaxdt.run.plan import Plan
from jaxdt.runtime.identity import credential
from jaxdt.runtime.identity.certificate import new_key
from jaxdt.runtime.run_dir import clear, hold
from jaxdt.runtime.storage.durable import write_json

pytestmark = pytest.mark.xdist_group("bad_input")  # they share a folder of files

ROOT = Path(__file__).resolve().parents[2]
FORKS = """
import importlib, json, os, sys
folder, name = sys.argv[1:]
sys.path.insert(0, folder)
script, script_main = importlib.import_module(name), importlib.import_module("jaxdt.cli.script_main")
results = []
for arguments in json.load(sys.stdin):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        sys.argv = [f"{name}.py", *arguments]
        script_main.run(script.main)
    os.close(write)
    with os.fdopen(read) as output:
        text = output.read()
    results.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text))
print(json.dumps(results))
"""
CONFIG = """
from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.plan.stages = 2
    config.data.path = {tokens!r}
    return config
"""
PLAN = plans.to_json(Plan(2, ((0, 1), (1, 2)), ((0,), (1,)), (1,)))
EMITTED = ("--emit={dir}/run", "--run_dir={dir}/run/run_dir")  # every case has a --run_dir
MODEL = recorded(GPTConfig.of("debug"))


def network(n: int, gbps: float = 1.0) -> str:
    return json.dumps(to_json(uniform(n, 0.01, gbps)))


def tokens(folder: Path, name: str, n_eval: int = 2000, vocab_size: int = 256) -> bytes:
    numbers = np.arange(5000) % vocab_size
    return write_tokens(folder / name, "bytes", vocab_size, numbers, numbers[:n_eval]).path.read_bytes()


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def checkpoint(folder: Path, data: str, model: dict | None = None, **changes) -> None:
    """A run's folder with the mark of a checkpoint of 7 steps."""
    about = {"model": model or MODEL, "optimizer": "adamw", "data": data}
    checkpoint_7 = {"version": 7, "generation": 0, "parts": []}
    mark = {"format": "2.0", "checkpoint": checkpoint_7, "copies": 0, "about": about} | changes
    (folder / "checkpoints/00000007").mkdir(parents=True)
    write_json(folder / "checkpoints/00000007/complete.json", mark)
    (folder / "config.json").write_text("{}")


def ended_runs() -> dict[str, str]:
    """Files of folders of runs that have ended, of which each but the first lacks something or has it wrong."""
    step = '{"step": 0, "loss": 1.5, "step_s": 0.1, "tokens_per_s": 10.0}\n'
    whole = {"plan.json": json.dumps(PLAN), "metrics.jsonl": step}
    whole["summary.json"] = json.dumps({"clock_offset_s": {"0": 0.0}, "step_s_measured": 0.1})
    damages = {
        "ended": {},
        "ended_unplanned": {"plan.json": "{"},
        "ended_cut": {"summary.json": whole["summary.json"][:9]},
        "ended_words": {"summary.json": '{"clock_offset_s": {}, "step_s_measured": "fast"}'},
        "ended_nan": {"summary.json": '{"clock_offset_s": {"0": NaN}}'},
        "ended_codec": {"summary.json": '{"clock_offset_s": {}, "codec_on_links": {"0->1": 8}}'},
        "ended_loss": {"metrics.jsonl": whole["metrics.jsonl"] + '{"step": 1, "loss": "low", "step_s": 0.1}\n'},
        "ended_traced": {"trace/peer_0.jsonl": '{"what": "run"}\n{}\n'},
    }
    return {f"{run}/{name}": text for run, other in damages.items() for name, text in (whole | other).items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with one of everything that can be wrong."""
    folder = tmp_path_factory.mktemp("files")
    good = tokens(folder, "good.tok")
    tokens(folder, "few.tok", n_eval=3)
    tokens(folder, "wide.tok", vocab_size=300)
    checksum = open_data(folder / "good.tok").checksum
    config = CONFIG.format(tokens=str(folder / "good.tok"))
    contents = {
        "good.py": config,
        "unknown.py": config.replace("plan.stages", "plan.stagse"),
        "syntax.py": "def get_config(:",
        "noise.py": b"\xff\xfe\x00",
        "raises.py": "def get_config():\n    return 1 / 0",
        "refuses.py": "def get_config():\n    raise ValueError('no such\\nsize')",
        "none.py": "def get_config():\n    return None",
        "empty.py": "",
        "cut.tok": good[:3000],
        "header.tok": flipped(good, 20),
        "payload.tok": flipped(good, HEADER_BYTES + 1000),
        "gap.json": json.dumps(PLAN | {"stages": [[0, 1], [2, 3]]}),
        "other.json": json.dumps(PLAN | {"n_layers": 3, "stages": [[0, 1], [1, 3]]}),
        "misspelt.json": json.dumps(PLAN | {"shedule": "gpipe"}),
        **ended_runs(),
        "cut.json": json.dumps(PLAN)[:50],
        "noise.json": b"\xff\xfe\x00{",
        "small.json": network(1),
        "halted.json": network(2, 0.0),
        "cut_network.json": network(2)[:80],
        "twice.json": network(2).replace('"name": ', '"name": "x", "name": ', 1),
        "plan_twice.json": json.dumps(PLAN).replace('"codec"', '"codec": [], "codec"'),
        "ended_noise/summary.json": '{"clock_offset_s": {"0": 0.0}}',
        "ended_noise/plan.json": json.dumps(PLAN),
        "ended_noise/metrics.jsonl": b"\xff\xfe\x00",
        "file": "no folder",
        "thesis/chapter.txt": "years of work",
        "broken.pem": "hello",
        "metrics.jsonl": '{"step": 0}\n',
        "over/coordinator_address": "127.0.0.1:1",
        "over/summary.json": '{"reason": "done: 7 steps"}',
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / "broken.pem").chmod(0o600)
    checkpoint(folder / "done", checksum)
    checkpoint(folder / "other_model", checksum, model=MODEL | {"d_model": 99})
    checkpoint(folder / "other_tokens", "abc")
    checkpoint(folder / "damaged", checksum, copies="two")
    credential.write(folder / "open.pem", new_key())
    (folder / "open.pem").chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        (folder / "port").write_text(str(server.getsockname()[1]))
        yield folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*.*") if path.is_file() and path.suffix != ".pyc"}


def refused(files: Path, script: str, cases: dict[str, tuple[list[str], str]]) -> None:
    """Each case ends with code 2 and one line that holds its words; the files are what they were."""
    before = content_of(files)
    values = {"dir": files, "port": (files / "port").read_text()}
    config, run_dir = [] if script == "report" else ["--config={dir}/good.py"], "--run_dir={dir}/run"
    flags = [own if own[0].startswith("--config=") else [*config, *own] for own, _ in cases.values()]
    arguments = [[word.format(**values) for word in (run_dir, *own)] for own in flags]
    command = [sys.executable, "-W", "ignore", "-c", FORKS, str(ROOT / "scripts"), script]
    done = subprocess.run(command, input=json.dumps(arguments), capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    for (name, (_, words)), (code, text) in zip(cases.items(), json.loads(done.stdout), strict=True):
        assert code == 2, (name, text)
        assert len(text.splitlines()) == 1, (name, text)
        assert words in text, (name, text)
    assert content_of(files) == before
    assert not (files / "run").exists()


def test_launching(files):
    cases = {
        "unknown field": (["--config.train.stpes=3"], '"steps"'),
        "field of another section": (["--config.train.microbatches=3"], "mean --config.plan.microbatches?"),
        "field of before": (["--config.wiring.replan=advise"], "python -m planner replan --run_dir=DIR"),
        "unknown field in the file": (["--config={dir}/unknown.py"], "stagse"),
        "out of range": (["--config.train.steps=0"], "train.steps: got 0, expected an integer >= 1"),
        "no number": (["--config.optim.lr=fast"], "--config.optim.lr: got 'fast', expected a number"),
        "no integer": (["--config.train.steps=3.5"], "--config.train.steps: got '3.5', expected an integer"),
        "not a program": (["--config={dir}/syntax.py"], "syntax.py:1: SyntaxError"),
        "no text": (["--config={dir}/noise.py"], "noise.py:"),
        "a program that fails": (["--config={dir}/raises.py"], "raises.py:2: ZeroDivisionError"),
        "a program that refuses": (["--config={dir}/refuses.py"], "refuses.py:2: ValueError: no such size"),
        "no config": (["--config={dir}/none.py"], "get_config() returned None"),
        "no get_config": (["--config={dir}/empty.py"], "no function get_config()"),
        "a heartbeat of no time": (
            ["--config.net.heartbeat_s=1e-300"],
            "net.heartbeat_s: got 1e-300, expected seconds",
        ),
        "a forward without an end": (
            ["--emulate_forward_s=1e300"],
            "--emulate_forward_s: got 1e+300, expected seconds",
        ),
        "a stall without an end": (["--stall=0.5,1e300,0"], "stall: got 1e+300 seconds, expected seconds from 0 to"),
        "layers": (["--config.plan.layers=3,2"], "plan.layers: 3,2 covers 5 layers, expected 2"),
        "plan with a gap": (["--plan={dir}/gap.json"], "gap.json: plan.stages[1]: got layers 2..2"),
        "plan of another model": (["--plan={dir}/other.json"], "other.json: plan: made for 3 layers"),
        "misspelt plan": (
            ["--plan={dir}/misspelt.json"],
            'misspelt.json: shedule: unknown field (did you mean "schedule"',
        ),
        "truncated plan": (["--plan={dir}/cut.json"], "cut.json: not JSON"),
        "plan of noise": (["--plan={dir}/noise.json"], "noise.json: cannot be read"),
        "network of another size": (["--emulate={dir}/small.json"], "small.json: has 1 devices"),
        "network without a link": (["--emulate={dir}/halted.json"], "halted.json: bandwidth_gbps[0][1]: got 0"),
        "a key twice in a network": (
            ["--emulate={dir}/twice.json"],
            "twice.json: not JSON (the key 'name' occurs 2 times",
        ),
        "a key twice in a plan": (
            ["--plan={dir}/plan_twice.json"],
            "plan_twice.json: not JSON (the key 'codec' occurs 2",
        ),
        "a folder that flag files cut": (["--emit={dir}/new\nline", "--hosts=a,b"], "new\\nline', which a flag file"),
        "a folder that flags expand": (["--emit=~", "--hosts=a,b"], "--emit: got '~', which a flag file does not keep"),
        "a folder that flags strip": (["--emit= lead", "--hosts=a,b"], "--emit: got ' lead', which a flag file does"),
        "loopback in another form": (
            [*EMITTED, "--hosts=0x7f000001,10.0.0.2"],
            "--hosts: got '0x7f000001', which no other host can resolve",
        ),
        "truncated network": (["--emulate={dir}/cut_network.json"], "cut_network.json: not JSON"),
        "truncated tokens": (["--config.data.path={dir}/cut.tok"], "cut.tok: got 3000 bytes"),
        "damaged header": (["--config.data.path={dir}/header.tok"], "header.tok: got header CRC"),
        "damaged tokens": (["--config.data.path={dir}/payload.tok"], "payload.tok: tokens have SHA256"),
        "tokens of another tokenizer": (
            ["--config.data.path={dir}/wide.tok", "--config.model.vocab_size=256"],
            "model.vocab_size: got 256, expected at least the token file's 300",
        ),
        "too little held-out text": (
            ["--config.data.path={dir}/few.tok", "--config.train.eval_every_steps=2"],
            "few.tok: got 3 held-out tokens",
        ),
        "another's folder": (["--run_dir={dir}/thesis", "--overwrite"], "not a run's folder"),
        "another run's folder": (["--run_dir={dir}/done"], "expected a new one, or --resume, or --overwrite"),
        "a file for a folder": (["--run_dir={dir}/file"], "is not a folder, expected one, or a name for a new one"),
        "nothing to resume": (["--resume"], "holds no complete checkpoint"),
        "nothing left to do": (["--resume", "--run_dir={dir}/done", "--config.train.steps=7"], "train.steps: got 7"),
        "checkpoint of another model": (
            ["--resume", "--run_dir={dir}/other_model"],
            "made with model.d_model 99, the config has 64",
        ),
        "checkpoint of other tokens": (
            ["--resume", "--run_dir={dir}/other_tokens"],
            "made with tokens of SHA256 abc, this run has",
        ),
        "damaged mark": (["--resume", "--run_dir={dir}/damaged"], "complete.json.copies: got 'two', expected int"),
        "hosts": ([*EMITTED, "--hosts=a"], "--hosts: got 1 addresses, expected 2"),
        "no port left": ([*EMITTED, "--hosts=a,b", "--port=65534"], "--port: got 65534"),
        "no GPU": (["--gpus_per_peer=1"], "--gpus_per_peer: got 1, but jax finds no GPU on this machine"),
        "no GPU for the run": (["--config.platform=gpu"], "platform: got gpu, but jax finds no GPU on this machine"),
        "a part of two GPUs": (["--gpus_per_peer=2/3"], "--gpus_per_peer: got '2/3', expected"),
        "GPUs for a run on CPUs": (
            ["--gpus_per_peer=1", "--config.platform=cpu"],
            "--gpus_per_peer: got 1, but platform is cpu",
        ),
        "more CPUs than there are": (["--pin=5000"], "--pin: got 5000 for each of 2 peers, this machine has"),
        "unknown flag": (["--steps=3"], "steps"),
        "a word": (["please"], "argument: got 'please'"),
    }
    refused(files, "launch", cases)


def test_reporting(files):
    cases = {
        "no such run": (["--run_dir={dir}/run"], "has no summary.json"),
        "a run that goes on": (["--run_dir={dir}/done"], "done has no summary.json"),
        "a file for a folder": (["--run_dir={dir}/file"], "file has no summary.json"),
        "damaged plan": (["--run_dir={dir}/ended_unplanned"], "ended_unplanned/plan.json: not JSON"),
        "truncated summary": (["--run_dir={dir}/ended_cut"], "ended_cut/summary.json: not JSON"),
        "words for a number": (["--run_dir={dir}/ended_words"], "summary.json: step_s_measured: got 'fast', expected"),
        "clock of no time": (["--run_dir={dir}/ended_nan"], "summary.json: clock_offset_s: got"),
        "no name of a codec": (["--run_dir={dir}/ended_codec"], "summary.json: codec_on_links: got"),
        "words for a loss": (["--run_dir={dir}/ended_loss"], "metrics.jsonl: line 2: got"),
        "a file that is no text": (["--run_dir={dir}/ended_noise"], "ended_noise/metrics.jsonl: cannot be read"),
        "no record": (["--run_dir={dir}/ended_traced"], "peer_0.jsonl: line 1: got"),
        "another run that is none": (["--run_dir={dir}/ended", "--against={dir}/thesis"], "--against: "),
        "another run that is damaged": (["--run_dir={dir}/ended", "--against={dir}/ended_words"], "got 'fast'"),
    }
    refused(files, "report", cases)


def test_coordinating(files):
    cases = {
        "a file for a folder": (["--run_dir={dir}/file"], "file is not a folder"),
        "port in use": (["--listen=127.0.0.1:{port}", "--run_dir={dir}/thesis"], "listen: cannot bind 127.0.0.1:"),
        "no address": (["--listen=here"], "listen: got 'here', expected host:port"),
        "no address at all": (["--listen="], "listen: got no address"),
        "no credential": (["--listen=0.0.0.0:0"], "listen: got 0.0.0.0 without a credential"),
        "missing credential": (["--credential={dir}/none.pem"], "none.pem: cannot be read"),
        "broken credential": (["--credential={dir}/broken.pem"], "broken.pem: broken"),
        "credential for all": (["--credential={dir}/open.pem"], "open.pem: mode is 0644, expected 0600"),
        "no checkpoint": (["--resume_from={dir}/thesis"], "thesis/complete.json: cannot be read"),
        "network of another size": (["--emulate={dir}/small.json"], "small.json: has 1 devices"),
    }
    refused(files, "coordinate", cases)


def test_a_flag_file_that_is_not_there_is_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/train.py"), f"--flagfile={tmp_path}/none.flags"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--flagfile: ") and done.stderr.count("\n") == 1 and "none.flags" in done.stderr


REFUSALS = [
    ("simulate", "--model=debug --flops=1e9 --out={dir}/file", "file: File exists"),
    ("simulate", "--model=debug --flops=1e9 --microbatch_size=0", "train.microbatch_size: got 0"),
    ("simulate", "--model=debug --flops=1e9 --frob", "frob"),
    (
        "train",
        "--config={dir}/good.py --config.platform=gpu --peer=0 --coordinator=127.0.0.1:1 --run_dir={dir}/run",
        "this run expects gpu",
    ),
    (
        "train",
        "--join=127.0.0.1:1 --run_dir={dir}/over",
        "--join: the run in {dir}/over has ended: done: 7 steps; ",
    ),
    ("doctor", "--run_dir={dir}/file", "file is not a folder"),
    ("ablate", "--config={dir}/none_such.py --run_dir={dir}/run", "none_such.py"),
    ("measure", "links --local=2 --out={dir}/thesis", "--out: {dir}/thesis is a folder, expected a file"),
    (
        "measure",
        "profile --config={dir}/good.py --out={dir}/none/p.json",
        "p.json: the folder {dir}/none does not exist",
    ),
    ("measure", "profile --config={dir}/good.py --out={dir}/p.json --codecs=int9", "--codecs: got 'int9'"),
    ("prepare_data", "--frob", "frob"),
    ("bench/bench_codec", "--codecs=auto", "--codecs: got auto"),
    ("bench/bench_codec", "--shapes=4x0", "--shapes: got '4x0'"),
    ("bench/bench_pipeline", "--rival=/none/such", "--rival: got '/none/such'"),
    ("bench/averaging", "time --n_peers=1", "n_peers"),
    ("bench/bench_simulator", "--rounds=0", "rounds"),
    ("experiments/compare", "delay --config={dir}/good.py --run_dir={dir}/run --seeds=1", "--seeds: got 1"),
    ("experiments/compare", "replicas --run_dir={dir}/run --steps=5", "--steps: got 5"),
    ("experiments/compare", "emulated --check --page={dir}", "has no runs"),
]


def test_every_script_refuses_in_one_line(files):
    before = content_of(files)
    scripts = [[str(ROOT / f"scripts/{name}.py"), *flags.format(dir=files).split()] for name, flags, _ in REFUSALS]
    results = run_scripts(scripts, files)
    for (name, flags, words), (code, out, err) in zip(REFUSALS, results, strict=True):
        assert code == 2 and out in ("", "peer 0: loads jax\n"), (name, flags, out, err)
        assert words.format(dir=files) in err and len(err.splitlines()) == 1, (name, flags, err)
    assert content_of(files) == before and not (files / "run").exists()


# --------------------------------------------------------------------------------------------------- the run's folder


def test_a_folder_is_held_by_one_run(tmp_path):
    """A lock is its open file's, so that killed processes leave none behind."""
    first = hold(tmp_path / "run")
    with pytest.raises(BadInput, match="run is in use: a run is under way there"):
        hold(tmp_path / "run", timeout_s=0.0)
    os.close(first)
    os.close(hold(tmp_path / "run", timeout_s=0.0))


def test_overwriting_takes_what_a_run_wrote(tmp_path):
    run_dir = tmp_path / "run"
    checkpoint(run_dir, "abc")
    with contextlib.suppress(OSError):
        (run_dir / "link").symlink_to(tmp_path)
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    said = clear(run_dir, overwrite=True)
    assert said == f"replaced {run_dir}: its run had 2 steps; left link, which no run wrote"
    assert sorted(path.name for path in run_dir.iterdir()) == ["link", "lock"]
    assert tmp_path.exists()
