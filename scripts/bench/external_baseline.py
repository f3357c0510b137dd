"""An external baseline: another system's program, run beside a benchmark. Its last line of output is a JSON object."""

import json
import shlex
import shutil
import subprocess

from jaxdt.run.errors import BadInput


def check_command(command: str | None) -> None:
    """BadInput for a command that cannot be started; called before anything is timed."""
    if command is not None and not shutil.which((shlex.split(command) or [""])[0]):
        raise BadInput(f"--rival: got {command!r}, expected a command whose program is there")


def baseline_seconds(command: str, key: str) -> float:
    """Run the baseline and return the value of `key` in its JSON object, in seconds."""
    done = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise BadInput(f"--rival: {command!r} ended with exit code {done.returncode}, expected 0")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        return float(json.loads(last)[key])
    except (ValueError, TypeError, KeyError):
        raise BadInput(f"--rival: its last line is {last!r:.60}, expected JSON with seconds under {key!r}") from None
