"""Each peer of a GPU host gets its GPUs, its part of a GPU's memory, and its caller's environment."""

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxdt.cli import gpu_flags
from jaxdt.model.stage import computes_on
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.runtime import fleet, jax_setup

ROOT = Path(__file__).resolve().parents[2]
TWO = ["0", "1"]
FOUR_PEERS = Plan(2, ((0, 1), (1, 2)), ((0, 2), (1, 3)), (1, 1))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """An environment of this test alone, without what the caller of the tests says of GPUs."""
    own = dict(os.environ)
    for name in ("CUDA_VISIBLE_DEVICES", *gpu_flags.MEMORY_VARIABLES):
        own.pop(name, None)
    monkeypatch.setattr(os, "environ", own)
    return own


@pytest.mark.parametrize(("text", "number"), [("", None), ("2", Fraction(2)), ("1/4", Fraction(1, 4))])
def test_gpus_per_peer_is_an_integer_or_a_share(text, number):
    assert gpu_flags.parse_gpus_per_peer(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "2/3", "1.5", "1/0", "many"])
def test_gpus_per_peer_refuses_what_cannot_be_shared_out(text):
    with pytest.raises(BadInput, match=f"--gpus_per_peer: got '{text}', expected an integer >= 1, or 1/N"):
        gpu_flags.parse_gpus_per_peer(text)


@pytest.mark.parametrize(
    ("peers", "gpus", "per_peer", "flags"),
    [
        ([0, 1], TWO, Fraction(1), {0: ["--gpus=0"], 1: ["--gpus=1"]}),
        ([3, 5], ["4", "5", "6", "7"], Fraction(2), {3: ["--gpus=4,5"], 5: ["--gpus=6,7"]}),
        (
            [0, 1, 2],
            TWO,
            Fraction(1, 2),
            {
                0: ["--gpus=0", "--gpu_memory_frac=0.3750"],
                1: ["--gpus=0", "--gpu_memory_frac=0.3750"],
                2: ["--gpus=1", "--gpu_memory_frac=0.3750"],
            },
        ),
    ],
)
def test_peers_get_gpus_of_their_own_or_equal_parts_of_one(peers, gpus, per_peer, flags):
    assert gpu_flags.flags_of_peers(peers, gpus, per_peer) == flags


def test_too_many_gpus_are_refused_with_what_there_is():
    for per_peer, most in ((Fraction(2), "1"), (Fraction(1), "1/2")):
        n_peers = 2 if per_peer == 2 else 3
        with pytest.raises(
            BadInput, match=f"for each of {n_peers} peers, this machine has 2 GPUs, expected at most {most}"
        ):
            gpu_flags.flags_of_peers(range(n_peers), TWO, per_peer)


def test_the_callers_share_of_the_memory_stays(environment):
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.1"
    assert gpu_flags.flags_of_peers([0, 1], ["0"], Fraction(1, 2)) == {0: ["--gpus=0"], 1: ["--gpus=0"]}


def test_hosts_number_their_gpus_each_from_zero():
    host_of = {0: "a", 1: "b", 2: "a", 3: "b"}
    assert gpu_flags.flags_of_hosts(host_of, Fraction(1)) == {
        0: ["--gpus=0"],
        2: ["--gpus=1"],
        1: ["--gpus=0"],
        3: ["--gpus=1"],
    }


def found(n_gpus, monkeypatch):
    """jax finds so many GPUs on this machine."""
    monkeypatch.setattr(gpu_flags, "may_have_gpus", lambda: n_gpus > 0)
    monkeypatch.setattr(gpu_flags, "gpus_here", lambda: [str(n) for n in range(n_gpus)])


@pytest.mark.parametrize(
    ("n_gpus", "visible"),
    [(0, None), (1, [["0"]] * 4), (2, [["0"], ["0"], ["1"], ["1"]]), (8, [["0"], ["1"], ["2"], ["3"]])],
)
def test_without_a_flag_the_peers_of_a_machine_divide_its_gpus(n_gpus, visible, monkeypatch):
    """Nobody computes on the CPU beside a GPU, and no two peers each take a whole one."""
    found(n_gpus, monkeypatch)
    flags = gpu_flags.flags_of_local_peers(range(4), "any", None)
    assert [flags[peer][0] for peer in flags] == [f"--gpus={','.join(names)}" for names in visible or ()]
    assert all(("--gpu_memory_frac" in "".join(words)) == (n_gpus < 4) for words in flags.values())
    assert gpu_flags.flags_of_local_peers(range(4), "cpu", None) == {}


def test_a_run_that_needs_gpus_is_refused_where_there_are_none(monkeypatch):
    found(0, monkeypatch)
    with pytest.raises(BadInput, match="platform: got gpu, but jax finds no GPU on this machine"):
        gpu_flags.flags_of_local_peers(range(2), "gpu", None)
    with pytest.raises(BadInput, match="--gpus_per_peer: got 1, but jax finds no GPU on this machine"):
        gpu_flags.flags_of_local_peers(range(2), "any", Fraction(1))


def test_jax_is_asked_for_gpus_in_the_callers_environment(environment, monkeypatch):
    asked = []

    def answer(command, env, **_):
        asked.append(env)
        return SimpleNamespace(returncode=0, stdout="2\n", stderr="")

    monkeypatch.setattr(subprocess, "run", answer)
    assert gpu_flags.gpus_here() == ["0", "1"]
    environment |= {"CUDA_VISIBLE_DEVICES": "5,7", "JAX_PLATFORMS": "cuda"}
    assert gpu_flags.gpus_here() == ["5", "7"]
    assert asked[1]["JAX_PLATFORMS"] == "cuda" and asked[1]["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stdout="", stderr="a\nno driver\n")
    )
    with pytest.raises(BadInput, match="jax cannot look for GPUs here: no driver"):
        gpu_flags.gpus_here()


def test_a_cpu_host_starts_no_process_to_look_for_gpus(environment, monkeypatch):
    monkeypatch.setattr(gpu_flags.importlib.metadata, "entry_points", lambda group: ["cuda"])
    environment["JAX_PLATFORMS"] = "cpu"
    assert not gpu_flags.may_have_gpus()
    environment["JAX_PLATFORMS"] = ""
    assert gpu_flags.may_have_gpus()
    monkeypatch.setattr(gpu_flags.importlib.metadata, "entry_points", lambda group: [])
    assert not gpu_flags.may_have_gpus()


def test_a_peer_sets_what_the_driver_and_jax_read(environment):
    environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.9"  # with both names set jax would not start
    gpu_flags.set_gpus(["2", "3"], 0.25)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3" and environment["XLA_CLIENT_MEM_FRACTION"] == "0.25"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment


def test_without_gpus_a_peer_leaves_its_environment_alone(environment):
    before = dict(environment)
    gpu_flags.set_gpus([], None)
    assert environment == before


@pytest.mark.parametrize("platforms", [None, "cuda"])
def test_each_child_of_the_launcher_gets_its_gpus_and_its_callers_platform(
    platforms, environment, monkeypatch, tmp_path
):
    environment.pop("JAX_PLATFORMS")
    if platforms:
        environment["JAX_PLATFORMS"] = platforms
    started = []
    monkeypatch.setattr(fleet.subprocess, "Popen", lambda command, env, **_: started.append((command, env)))
    flags = gpu_flags.flags_of_peers(FOUR_PEERS.peers, TWO, Fraction(1, 2))
    (tmp_path / "logs").mkdir()
    (tmp_path / "run").write_text("r")
    local = fleet.LocalFleet(tmp_path, FOUR_PEERS, tmp_path, flags=[], began_s=0.0, lock=0, gpu_flags=flags)
    for peer in FOUR_PEERS.peers:
        local._start(peer, [])
    gpus = [next(word for word in command if word.startswith("--gpus=")) for command, _ in started]
    assert gpus == ["--gpus=0", "--gpus=0", "--gpus=1", "--gpus=1"]
    assert all("--gpu_memory_frac=0.3750" in command for command, _ in started)
    assert {env.get("JAX_PLATFORMS") for _, env in started} == {platforms}


LAUNCH = """
import os, sys
sys.path.insert(0, "{scripts}")
import launch
from jaxdt.api import launch as api
from jaxdt.cli import script_main

class Fleet:
    def __init__(self, *arguments, **options):
        jax = sys.modules.get("jax")
        print("launcher on", jax and jax.config.jax_platforms, "children on", os.environ.get("JAX_PLATFORMS"))

    def run(self):
        return 0

api.LocalFleet = Fleet
script_main.run(launch.main)
"""


def launched(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    code = LAUNCH.format(scripts=ROOT / "scripts")
    command = [sys.executable, "-c", code, f"--config={ROOT}/configs/quickstart.py", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("flags", "platforms"),
    [((), None), (("--config.codec=auto", f"--emulate={ROOT}/configs/networks/four_cities.json"), "cpu")],
    ids=["without jax", "with jax"],
)
def test_the_launcher_stays_off_the_gpus_and_does_not_keep_its_children_off_them(flags, platforms, tmp_path):
    """It imports jax only where it measures a codec."""
    done = launched(f"--run_dir={tmp_path / 'run'}", "--report=false", *flags)
    expected = f"launcher on {platforms} children on None"
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, expected), done.stderr


def test_emitted_flag_files_name_the_gpus_of_each_peer(tmp_path):
    hosts = "--hosts=a,a,b,b"
    done = launched(f"--emit={tmp_path}", hosts, "--gpus_per_peer=1/2", "--overwrite")
    assert done.returncode == 0, done.stderr
    for peer in range(4):
        lines = (tmp_path / f"host_{peer}.flags").read_text().splitlines()
        assert lines[-2:] == ["--gpus=0", "--gpu_memory_frac=0.3750"]
    assert "--gpus" not in (tmp_path / "coordinator.flags").read_text()


def test_a_peer_on_another_platform_than_the_runs_is_refused_in_one_line(monkeypatch):
    jax_setup.check_platform("any")
    jax_setup.check_platform("cpu")
    with pytest.raises(BadInput, match="platform: here jax computes on cpu: . x cpu, this run expects gpu"):
        jax_setup.check_platform("gpu")
    kinds = [SimpleNamespace(device_kind="NVIDIA H100"), SimpleNamespace(device_kind="NVIDIA H100")]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: kinds)
    jax_setup.check_platform("gpu")
    assert computes_on() == "gpu: 2 x NVIDIA H100" and computes_on(1) == "gpu: 1 x NVIDIA H100"
    with pytest.raises(BadInput, match="computes on gpu: 2 x NVIDIA H100, this run expects cpu"):
        jax_setup.check_platform("cpu")
