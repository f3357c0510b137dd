"""Facts of models (jaxdt.run.model_facts) for processes that do not import jax.

A child process derives them: the first answer takes as long as jax to be imported, each further one a fraction of a
second. It ends with its parent, or when nothing was asked for a while. Answers are kept in the user's folder of caches,
so that only the first process that meets a model starts a child.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from jaxdt.run import model_facts, serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.model_facts import ModelFacts, ModelSpec

DERIVATION = "jaxdt.model.derive"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxdt" / "facts"


def facts(model: ModelSpec) -> ModelFacts:
    """The facts of a model with these options."""
    path = CACHE / f"{_digest(model)}.json"
    known = path.read_text() if path.exists() else _child(os.getpid()).ask(model)
    found = serialize.read(ModelFacts, json.loads(known), str(path))
    if not path.exists():
        _keep(path, known)
    return found


def _digest(model: ModelSpec) -> str:
    """Of everything that facts depend on: the options, and the sources of the functions."""
    digest = hashlib.sha256(json.dumps([model.family, serialize.write(model)]).encode())
    for path in (Path(model_facts.__file__), *sorted(Path(__file__).parent.rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _keep(path: Path, text: str) -> None:
    """Write the file for later processes, where the user's folder of caches can be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(f".{os.getpid()}.tmp")
        written.write_text(text)
        written.replace(path)


@functools.cache
def _child(pid: int) -> "_Child":
    """One child for each process: a forked process does not share its parent's."""
    del pid
    return _Child()


class _Child:
    """A process with jax that derives facts: options as a line of JSON in, facts as a line of JSON out."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def ask(self, model: ModelSpec) -> str:
        if self._process is None or self._process.poll() is not None:
            self._start()
        process = self._process
        assert process and process.stdin and process.stdout and process.stderr
        question = {"family": model.family, "options": serialize.write(model)}
        with contextlib.suppress(BrokenPipeError):  # of one that has ended; its answer is empty
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        answer = process.stdout.readline().decode()
        if not answer and process.wait() == 0:
            return self.ask(model)  # it ended for want of questions, at that moment
        if not answer:
            lines = process.stderr.read().decode(errors="replace").strip().splitlines() or ["no message"]
            raise BadInput(f"model: its facts could not be derived ({lines[-1]})")
        return answer

    def _start(self) -> None:
        self.close()
        root = str(Path(__file__).parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", DERIVATION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # a signal for the parent is not for this process, which ends with its input
        )

    def close(self) -> None:
        if process := self._process:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                assert pipe
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
