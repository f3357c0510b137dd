"""Scripts whose output nobody reads any more, as in `script | head`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/two_hosts.py'}"]


def without_reader(command):
    """(exit code, standard error) of a command whose standard output is a pipe that nobody reads."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=100)
    return done.returncode, done.stderr


def test_a_job_is_written_as_a_whole(tmp_path):
    code, said = without_reader([*LAUNCH, f"--emit={tmp_path / 'two'}", "--hosts=127.0.0.1,127.0.0.1"])
    assert (code, said) == (0, "")
    assert {"coordinator.flags", "host_0.flags", "host_1.flags"} <= {path.name for path in (tmp_path / "two").iterdir()}


def test_a_script_that_has_more_to_say_ends_without_a_traceback():
    words = ["simulate.py", "--model=debug", "--flops=1e9"]
    code, said = without_reader([sys.executable, str(ROOT / "scripts" / words[0]), *words[1:]])
    assert code in (0, 141) and said == ""


@pytest.mark.parametrize("script", ["launch.py", "train.py"])
def test_help_that_nobody_reads_ends_without_a_traceback(script):
    code, said = without_reader([sys.executable, str(ROOT / "scripts" / script), "--help"])
    assert (code, said) == (141, "")
