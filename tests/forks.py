"""Scripts as a user starts them, but in forks of one process that has imported what they need: an import of jax takes
longer than what such a test asks of a script."""

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT

PROGRAM = """
import json, os, runpy, sys, tempfile
{imports}
for line in sys.stdin:
    environment, folder, (script, *arguments) = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        result = (code, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)))
        print(json.dumps(result), flush=True)
"""
WITHOUT_JAX = "sys.modules['jax'] = None; import matplotlib.pyplot, jaxdt.config_file, jaxdt.sim.fault_report"
WITH_JAX = """
import flax, jax, matplotlib.pyplot, optax, orbax.checkpoint, ortools
import jaxdt.api.launch, jaxdt.api.simulate, jaxdt.cli.plots, jaxdt.config_file, planner.commands.solve
import jaxdt.runtime.coordinator_process, jaxdt.runtime.peer_process
"""


@functools.cache
def _server(imports: str) -> subprocess.Popen[str]:
    """A process that has done these imports, and forks for each script."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(imports=imports)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.__exit__, None, None, None)  # closes its pipes, at which it ends
    return process


def run_scripts(commands: Sequence[Sequence[str]], cwd: Path, without_jax: bool = False) -> list[list]:
    """Exit code, standard output and standard error of each command, a script with its arguments. Scripts that compute
    find their allocator's settings, so that none starts itself anew."""
    server, results = _server(WITHOUT_JAX if without_jax else WITH_JAX), []
    environment = dict(os.environ | MALLOC_ENVIRONMENT)
    environment.pop("PYTEST_CURRENT_TEST", None)
    for command in commands:
        server.stdin.write(json.dumps([environment, str(cwd), [*map(str, command)]]) + "\n")
        server.stdin.flush()
        line = server.stdout.readline()
        assert line, "the process that forks for the scripts has ended"
        results.append(json.loads(line))
    return results
