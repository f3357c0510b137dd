"""Scripts whose output nobody reads any more, as in `script | head`, or goes where not all text can be shown."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdt.cli import script_main
from planner import __main__ as planner

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


def says(*_):
    print("caf\u00e9 \udcff")
    return 0


def run_script(monkeypatch):
    monkeypatch.setattr(script_main, "_parse_flags", lambda argv: [])
    with pytest.raises(SystemExit) as ended:
        script_main.run(says)
    return ended.value.code


def run_planner(monkeypatch):
    monkeypatch.setitem(sys.modules, planner.COMMANDS["devices"], SimpleNamespace(run=says))
    return planner.main(["devices"])


@pytest.mark.parametrize("run", [run_script, run_planner])
@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"caf\\xe9 \\udcff\n"), ("utf-8", b"caf\xc3\xa9 \\udcff\n")])
def test_text_that_the_terminal_does_not_have_is_escaped_and_ends_nothing(monkeypatch, run, encoding, shown):
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    monkeypatch.setattr(sys, "argv", ["script"])
    assert run(monkeypatch) == 0
    sys.stdout.flush()
    assert output.getvalue() == shown
