"""The end of train.py when its peer has ended, with stand-ins for everything that needs JAX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, runpy, sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from jaxdt.cli import process_job
from jaxdt.protocol import events as ev
from jaxdt.runtime import joining

code, refused, *argv = sys.argv[1:]
config = SimpleNamespace(platform="any", train=SimpleNamespace(steps=9), sync=SimpleNamespace(kind="allreduce"))
job = SimpleNamespace(config=config, run_dir=Path("no folder"))
process_job.job = lambda options, coordinator, peer: job
process_job.newcomer = lambda options, coordinator, data: (job, ev.Welcome("r", 7, 1, "f", {}, 5))
joining.claim_peer = lambda *_: ev.Stop(2, refused) if refused else None
jax_setup, peer_process = ModuleType("jax_setup"), ModuleType("peer_process")
jax_setup.set_up_jax = lambda *_: print("sets up jax", flush=True)
jax_setup.check_platform = lambda *_: None
peer_process.run_peer = lambda *_, **options: ev.Stop(int(code), "its end")
sys.modules |= {"jaxdt.runtime.jax_setup": jax_setup, "jaxdt.runtime.peer_process": peer_process}
def again(program, words):
    print("again" if (program, words) == (sys.executable, sys.orig_argv) else words)
    sys.exit(99)
os.execv = again
sys.argv = argv
sys.path.insert(0, str(Path(argv[0]).parent))  # as where the script is run
runpy.run_path(argv[0], run_name="__main__")
"""
JAX = "sets up jax\n"
ASKS = "peer 1: asks the coordinator at 127.0.0.1:9 whether it may be peer 1\n"
LOADS = "peer 1: loads jax\n" + JAX
JOINS = "peer 7: joins for stage 1, after 5 steps of the run\npeer 7: loads jax\n" + JAX
JOIN = "--join=127.0.0.1:9"
PLANNED = ("--peer=1", "--coordinator=127.0.0.1:9")


@pytest.mark.parametrize(
    ("code", "flags", "ends_with", "prints"),
    [
        (6, (JOIN,), 99, JOINS + "peer 7: its end; it asks again\nagain\n"),
        (3, (JOIN,), 3, JOINS + "peer 7: its end\n"),
        (6, PLANNED, 6, ASKS + LOADS + "peer 1: its end\n"),
    ],
    ids=["a newcomer that is forgotten", "a newcomer that is lost", "a peer of the plan"],
)
def test_a_newcomer_that_the_run_has_forgotten_asks_again(tmp_path, code, flags, ends_with, prints):
    assert trained(tmp_path, code, "", *flags) == (ends_with, prints)


def test_a_second_process_of_a_peer_ends_before_it_loads_jax(tmp_path):
    assert trained(tmp_path, 0, "runs at h:1 and answers", *PLANNED) == (2, ASKS + "peer 1: runs at h:1 and answers\n")


def trained(run_dir, code, refused, *flags):
    """The exit code of train.py and what it prints, where a peer of the plan is `refused` for a reason, or not for '',
    and a peer ends with `code`."""
    environment = os.environ | MALLOC_ENVIRONMENT  # with these settings train.py does not start itself anew
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(code),
        refused,
        str(ROOT / "scripts/train.py"),
        f"--run_dir={run_dir}",
        *flags,
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, done.stdout + done.stderr
