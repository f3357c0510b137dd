"""Facts of models (jaxdt.run.model_facts) for processes that do not import jax.

A child process derives them: the first answer takes as long as jax to be imported, each further one a fraction of a
second. It ends with its parent, or when nothing was asked for a while. Answers are kept in the user's folder of caches,
so that only the first process that meets a model starts a child. A file's name is a digest of all that its facts depend
on. One that is damaged is written anew; where none can be written, each process asks its child.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.model_facts import ModelFacts
from jaxdt.run.model_spec import ModelSpec

DERIVATION = "jaxdt.model.derive"
PACKAGE = Path(__file__).parents[1]
SOURCES = ("model", "run")  # the folders of the package whose modules a derivation imports
LIBRARIES = ("jax", "flax")


def facts(model: ModelSpec) -> ModelFacts:
    """The facts of a model with these options."""
    path = _path(model)
    known = path and _kept(path)
    if known is None:
        known = _child(os.getpid()).ask(model)
        if path:
            _keep(path, known)
    return serialize.read(ModelFacts, known, str(path or "facts"))


@functools.cache
def sources() -> str:
    """A digest of the functions that facts are read off, with the libraries that trace them."""
    digest = hashlib.sha256()
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # the child says what it lacks
            digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    for path in sorted(path for folder in SOURCES for path in (PACKAGE / folder).rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE)} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _path(model: ModelSpec) -> Path | None:
    """The file of a model's facts; None for a user who has no folder of caches, and for functions that the digest of
    sources does not cover."""
    if model.has_own_sources:
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not folder.is_absolute():
        return None
    text = json.dumps([sources(), serialize.write(model)])
    return folder / "jaxdt" / "facts" / f"{_digest(text)}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _kept(path: Path) -> Any:
    """The facts in the file as plain data; None if it cannot be read, or is not what was written."""
    try:
        kept = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    is_whole = isinstance(kept, dict) and kept.get("digest") == _digest(json.dumps(kept.get("facts")))
    return kept["facts"] if is_whole else None


def _keep(path: Path, known: Any) -> None:
    """Write the file for later processes, where the user's folder of caches can be written. Of several processes that
    do so at once the last one wins."""
    text = json.dumps({"digest": _digest(json.dumps(known)), "facts": known})
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, written = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with open(descriptor, "w") as file:
                file.write(text)
            os.replace(written, path)
        finally:
            Path(written).unlink(missing_ok=True)


@functools.cache
def _child(pid: int) -> "_Child":
    """One child for each process: a forked process does not share its parent's."""
    del pid
    return _Child()


class _Child:
    """A process with jax that derives facts: options as a line of JSON in, facts as a line of JSON out. Threads ask one
    after another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._said: Any = None  # a file: a pipe that nobody reads would stop a process that says much
        self._lock = threading.Lock()
        atexit.register(self.close)

    def ask(self, model: ModelSpec) -> Any:
        """Facts as plain data. BadInput if they cannot be derived, or not from the sources of this process."""
        question = json.dumps(serialize.write(model)).encode()
        with self._lock:
            process, line = self._answer(question)
            if not line and process.wait() == 0:  # it ended for want of questions, at that moment
                process, line = self._answer(question)
            if not line:
                self._said.seek(0)
                lines = self._said.read().decode(errors="replace").strip().splitlines() or ["no message"]
                raise BadInput(f"model: its facts could not be derived ({lines[-1]})")
        answer = json.loads(line)
        if "refused" in answer:
            raise BadInput(answer["refused"])
        if answer["sources"] != sources():
            raise BadInput(f"model: its facts were derived from other sources than those in {PACKAGE}")
        return answer["facts"]

    def _answer(self, question: bytes) -> tuple[subprocess.Popen[bytes], bytes]:
        """The process, and what it says: nothing if it has ended."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin and process.stdout
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(question + b"\n")
            process.stdin.flush()
        return process, process.stdout.readline()

    def _start(self) -> subprocess.Popen[bytes]:
        """It imports what this process would: from the same folders, and not first of all from the current one (-P)."""
        self.close()
        folders = os.pathsep.join(map(os.path.abspath, sys.path))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", DERIVATION],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"PYTHONPATH": folders, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # a signal for the parent is not for this process, which ends with its input
        )
        return self._process

    def close(self) -> None:
        if process := self._process:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, self._said):
                assert pipe
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
