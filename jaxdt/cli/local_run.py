"""A run as processes of this machine, for scripts that kill and add peers meanwhile. Needs no jax."""

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxdt.run.errors import read_text
from jaxdt.run.run_folder import ADDRESS
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT, ONE_THREAD
from jaxdt.runtime.run_dir import peer_credential, token_flag

POLL_S = 0.05
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CONFIG = '''"""Written by a script for a run of its own."""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.update_from_flattened_dict({fields})
    return config
'''


def write_config(path: Path, fields: dict[str, dict]) -> None:
    """Write a config file: the debug preset with the values fields[group][name]."""
    flat = {f"{group}.{name}": value for group, values in fields.items() for name, value in values.items()}
    path.write_text(CONFIG.format(fields=flat))


def start(
    log: Path, script: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> subprocess.Popen:
    """Start one of the scripts, with its output in `log`. From then on SIGTERM ends this process as Ctrl-C does, so
    that its `finally` clauses can call `end`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    with log.open("w") as file:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)


def join(run_dir: Path, log: Path, more_arguments: Sequence[str] = ()) -> subprocess.Popen:
    """Start a newcomer that joins the run in run_dir."""
    arguments = [
        f"--join={read_text(run_dir / ADDRESS)}",
        token_flag(run_dir, f"newcomer_{secrets.token_hex(4)}"),
        f"--run_dir={run_dir}",
        *more_arguments,
    ]
    return start(log, "train.py", arguments, of_one_thread())


def worker(run_dir: Path, log: Path, peer: str, more_arguments: Sequence[str] = ()) -> subprocess.Popen:
    """Start a process for this worker of the plan of the run in run_dir; for '' a worker outside the plan."""
    if not peer:
        return join(run_dir, log, ["--as=worker", *more_arguments])
    arguments = [f"--peer={peer}", f"--join={read_text(run_dir / ADDRESS)}", "--as=worker"]
    arguments += [peer_credential(run_dir, int(peer)), f"--run_dir={run_dir}", *more_arguments]
    return start(log, "train.py", arguments, of_one_thread())


def of_one_thread() -> dict[str, str]:
    """The environment of a process that shares this machine with others."""
    xla_flags = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}".strip()
    return os.environ | MALLOC_ENVIRONMENT | {"XLA_FLAGS": xla_flags, "PYTHONUNBUFFERED": "1"}


def end(launcher: subprocess.Popen, newcomers: Iterable[subprocess.Popen]) -> None:
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
    launcher.wait()
    for newcomer in newcomers:
        newcomer.kill()
        newcomer.wait()


def children(launcher: int) -> dict[str, int]:
    """Process ids of a launcher's children by name: coordinator, peer 0, ..."""
    found = {}
    for pid, words in _commands(launcher):
        peer = _peer_of(words)
        found[f"peer {peer}" if peer else "coordinator"] = pid
    return found


def workers(launcher: int) -> dict[str, int]:
    """Process ids of a launcher's children that are workers of a pool, by their peer ids."""
    return {_peer_of(words): pid for pid, words in _commands(launcher) if "--as=worker" in words}


def _peer_of(words: Sequence[str]) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith("--peer=")), "")


def _commands(launcher: int) -> Iterator[tuple[int, list[str]]]:
    """Process id and command line of a launcher's children."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # the process has ended meanwhile
        if parent == launcher:
            yield int(entry.name), words


def objects(path: Path) -> list[dict]:
    """The complete lines of a file of JSON lines. The file may still be written to, or not exist yet."""
    lines = read_text(path).splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def metrics(run_dir: Path) -> list[dict]:
    """An object for each committed step of a run so far."""
    return objects(run_dir / "metrics.jsonl")


def losses(run_dir: Path) -> list[float]:
    return [step["loss"] for step in metrics(run_dir)]


def step_seconds(run_dir: Path) -> list[float]:
    return [step["step_s"] for step in metrics(run_dir)]


def summary(run_dir: Path) -> dict:
    """The content of summary.json, empty until the run has ended."""
    path = run_dir / "summary.json"
    return json.loads(read_text(path)) if path.exists() else {}


def config_flags() -> list[str]:
    return [word for word in sys.argv[1:] if word.startswith("--config")]


def losses_alone(run_dir: Path, config: Sequence[str], n_steps: int) -> list[float]:
    """The losses of the same training in one process, undisturbed. `config`: the flags --config and --config.FIELD."""
    fields = {"plan.stages": 1, "plan.pipelines": 1, "train.steps": n_steps}
    fields |= {"plan.workers": 0, "wiring.kind": "fixed", "wiring.rebalance_s": 0}
    words = [*config, *(f"--config.{name}={value}" for name, value in fields.items())]
    start(run_dir.with_suffix(".log"), "launch.py", [*words, f"--run_dir={run_dir}", "--report=false"]).wait()
    return losses(run_dir)
