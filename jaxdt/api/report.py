"""The report of a run that has ended, as a picture that a notebook shows."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from jaxdt.cli.local_run import SCRIPTS
from jaxdt.run.errors import BadInput


@dataclass(frozen=True, repr=False)
class Picture:
    """A PNG file; a notebook shows it inline. `text`: what was said when it was drawn."""

    path: Path
    text: str = ""

    def __repr__(self) -> str:
        return f"Picture({self.path.name})"

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


def report(run_dir: str | Path) -> Picture:
    """Write trace.jsonl, timeline.json and report.png into the folder of a run that has ended: loss, timeline of a
    step, bytes per link, predicted and measured step times. BadInput for any other folder.

    A process of its own draws, so that this one need not hold the trace and matplotlib."""
    command = [sys.executable, str(SCRIPTS / "report.py"), f"--run_dir={run_dir}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BadInput((done.stderr.strip().splitlines() or [f"{run_dir}: cannot be reported"])[-1])
    return Picture(Path(run_dir) / "report.png", done.stdout.strip())
