"""metrics.jsonl: one line of JSON for each committed step, in order. The steps are not kept in memory."""

import json
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from jaxdt.run.errors import why
from jaxdt.run.serialize import parse_json
from jaxdt.runtime.storage.durable import append_whole, naming


class Metrics:
    """The committed steps in one file. A context manager: opening it keeps the steps below `n_committed` that an
    earlier process has written, and counts them in `n_resumed`; `written_s` is the file system's time at which
    it has written last, None if there are none. After a crash only the last line can be incomplete.

    A line that the disk refuses waits in memory, and is written before the next one: a file with a gap could not be
    resumed. `failed` is called with the reason when the first of them has to wait."""

    def __init__(self, path: Path, n_committed: int, failed: Callable[[str], None] | None = None):
        self._path = path
        self._n_committed = n_committed
        self._failed = failed
        self._file: BinaryIO | None = None
        self._ends = array("Q", [0])  # where each line of the file ends, after the 0 where the first one begins
        self._waiting: deque[bytes] = deque()
        self.n_resumed = 0
        self.written_s: float | None = None

    def __enter__(self):
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written_s = self._path.stat().st_mtime if self._path.exists() else None
        self._file = self._path.open("ab", buffering=0)
        for line, step in whole_lines(self._path):
            if step["step"] < self._n_committed:
                self._ends.append(self._ends[-1] + len(line))
        self.n_resumed = len(self._ends) - 1
        self.written_s = written_s if self.n_resumed else None
        self._truncate()
        return self

    def __exit__(self, *exception):
        self._write_waiting()
        self._open_file.close()

    @property
    def _open_file(self) -> BinaryIO:
        assert self._file is not None, "the file is open inside the context"
        return self._file

    def __iter__(self) -> Iterator[dict]:
        with self._path.open("rb") as file:
            yield from map(json.loads, chain(file, self._waiting))

    def add(self, step: dict) -> bool:
        """Append the next step. False if an earlier process has written it."""
        if step["step"] < len(self._ends) - 1 + len(self._waiting):
            return False
        self._waiting.append((json.dumps(step) + "\n").encode())
        self._write_waiting()
        return True

    def cut(self, n_steps: int) -> None:
        """Delete all but the first n_steps steps; durable on return."""
        while self._waiting and len(self._ends) - 1 + len(self._waiting) > n_steps:
            self._waiting.pop()
        del self._ends[n_steps + 1 :]
        self._truncate()

    def _write_waiting(self) -> None:
        was_waiting = len(self._waiting) > 1
        try:
            while self._waiting:
                append_whole(self._open_file, self._waiting[0], self._ends[-1])
                self._ends.append(self._ends[-1] + len(self._waiting.popleft()))
        except OSError as error:
            if self._failed and not was_waiting:
                self._failed(f"{self._path}: {why(error)}")

    def _truncate(self) -> None:
        """Cut the file behind the lines that count."""
        descriptor = self._open_file.fileno()
        with naming(self._path):
            os.ftruncate(descriptor, self._ends[-1])
            os.fsync(descriptor)


def plain_steps(steps: Sequence[dict], n_measuring: int = 1) -> list[dict]:
    """The steps without those that took longer for a held-out loss: it is measured in the step after the one of whose
    row it is, or with delayed updates in one of the next `n_measuring`."""
    before = [steps[max(0, i - n_measuring) : i] for i in range(len(steps))]
    return [step for step, last in zip(steps, before, strict=True) if not any("eval_loss" in one for one in last)]


def whole_lines(path: Path) -> Iterator[tuple[bytes, dict]]:
    """The lines of a file, each with its step. They end before the first line that a crash cut off, that is damaged, or
    that is not the next step."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                step = parse_json(line)
            except ValueError:
                return
            if not isinstance(step, dict) or step.get("step") != number or "loss" not in step or line[-1:] != b"\n":
                return
            yield line, step
