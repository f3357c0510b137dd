"""A run as processes of this machine, for scripts that kill and add peers while it goes on. Needs no jax."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # as the launcher has it for peers that share CPUs
CONFIG = '''"""Written by a script for a run of its own."""

from jaxdt.config_file import base_config


def get_config():
    config = base_config("debug")
    config.update_from_flattened_dict({fields})
    return config
'''


def write_config(path: Path, fields: dict[str, dict]) -> None:
    """A config file: the debug preset with fields[group][name]."""
    flat = {f"{group}.{name}": value for group, own in fields.items() for name, value in own.items()}
    path.write_text(CONFIG.format(fields=flat))


def start(log: Path, script: str, *arguments: str, **options) -> subprocess.Popen:
    """One of our scripts; what it says goes to `log`. From now on SIGTERM ends us as Ctrl-C does: by way of `end`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with log.open("w") as file:
        said = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        return subprocess.Popen([sys.executable, str(SCRIPTS / script), *arguments], **said, **options)


def join(run_dir: Path, log: Path, *more: str) -> subprocess.Popen:
    """A newcomer to the run in run_dir."""
    address = f"--join={(run_dir / 'coordinator_address').read_text()}"
    own = f"--credential={run_dir / 'credential.pem'}", f"--run_dir={run_dir}"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD}"}
    return start(log, "train.py", address, *own, *more, env=environment)


def end(launcher: subprocess.Popen, newcomers: Iterable[subprocess.Popen]) -> None:
    """Nothing of a run is left behind."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
    launcher.wait()
    for newcomer in newcomers:
        newcomer.kill()
        newcomer.wait()


def children(launcher: int) -> dict[str, int]:
    """Process ids of a launcher's children by name: coordinator, peer 0, ..."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has just ended
        if parent == launcher:
            peer = next((word.partition("=")[2] for word in words if word.startswith("--peer=")), None)
            found[f"peer {peer}" if peer else "coordinator"] = int(entry.name)
    return found


def idle_s() -> float:
    """Seconds that this machine's cores have had nothing to do, all together, since it was started."""
    idle, waiting = Path("/proc/stat").read_text().split()[4:6]
    return (int(idle) + int(waiting)) / os.sysconf("SC_CLK_TCK")


def objects(path: Path) -> list[dict]:
    """The whole lines of a file of JSON lines that is being written, or is not there yet."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]
