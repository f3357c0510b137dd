"""Scripts as a user starts them, but in forks of one process that has imported what most of them need: an import of jax
takes longer than what such a test asks of a script."""

import atexit
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
    folder, (script, *arguments) = json.loads(line)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.chdir(folder)
            sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
            runpy.run_path(script, run_name="__main__")
            sys.exit()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        result = (code, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in (out, err)))
        print(json.dumps(result), flush=True)
"""


class Server:
    """A process that has done its imports, and forks for each script."""

    def __init__(self, imports: str, env: dict[str, str]):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM.format(imports=imports)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.of = imports, env
        self._process = subprocess.Popen(command, env=env, **pipes)

    def run(self, command: Sequence[str], cwd: Path) -> list:
        self._process.stdin.write(json.dumps([str(cwd), [*map(str, command)]]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process of {self.of[0]} has ended"
        return json.loads(line)

    def end(self) -> None:
        with self._process:  # closes its pipes, at which it ends
            pass


_last: list[Server] = []  # one, which the next tests find if they need the same imports


def run_scripts(
    commands: Sequence[Sequence[str]], imports: str, cwd: Path, env: dict[str, str] | None = None
) -> list[list]:
    """Exit code, standard output and standard error of each command, a script with its arguments. `imports` are the
    statements that the forked process begins with. Scripts that compute find their allocator's settings, so that none
    starts itself anew."""
    of = imports, dict((os.environ if env is None else env) | MALLOC_ENVIRONMENT)
    of[1].pop("PYTEST_CURRENT_TEST", None)
    if not _last or _last[0].of != of:
        end_last()
        _last.append(Server(*of))
    return [_last[0].run(command, cwd) for command in commands]


@atexit.register
def end_last() -> None:
    while _last:
        _last.pop().end()
