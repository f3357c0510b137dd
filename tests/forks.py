"""Scripts as a user starts them, but in forks of one process that has imported what most of them need: an import of jax
takes longer than what such a test asks of a script."""

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
results = []
for script, *arguments in json.load(sys.stdin):
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        results.append((code, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err))))
print(json.dumps(results))
"""


def run_scripts(
    commands: Sequence[Sequence[str]], imports: str, cwd: Path, env: dict[str, str] | None = None
) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each command, a script with its arguments. `imports` are the
    statements that the forked process begins with. Scripts that compute find their allocator's settings, so that none
    starts itself anew."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(imports=imports)]
    env = (os.environ if env is None else env) | MALLOC_ENVIRONMENT
    run = dict(capture_output=True, text=True, timeout=200, cwd=cwd, env=env)
    done = subprocess.run(command, input=json.dumps(commands), **run)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
