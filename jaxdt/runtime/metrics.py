"""metrics.jsonl: one line of JSON for each committed step, in order. The steps are not kept in memory."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO


class Metrics:
    """The committed steps in one file. A context manager: opening it keeps the steps below `n_committed` that an
    earlier process has written, and counts them in `n_resumed`. After a crash only the last line can be incomplete."""

    def __init__(self, path: Path, n_committed: int):
        self._path = path
        self._n_committed = n_committed
        self._file: TextIO | None = None
        self.n_resumed = 0

    def __enter__(self):
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self._truncate(line for line, step in whole_lines(self._path) if step["step"] < self._n_committed)
        self.n_resumed = sum(1 for _ in self)
        return self

    def __exit__(self, *exception):
        self._open_file.close()

    @property
    def _open_file(self) -> TextIO:
        assert self._file is not None, "the file is open inside the context"
        return self._file

    def __iter__(self) -> Iterator[dict]:
        return (step for _, step in self._lines())

    def add(self, step: dict) -> None:
        """Append the next step."""
        file = self._open_file
        file.write(json.dumps(step) + "\n")
        file.flush()

    def cut(self, n_steps: int) -> None:
        """Delete all but the first n_steps steps; durable on return."""
        self._truncate(line for line, step in self._lines() if step["step"] < n_steps)

    def _lines(self) -> Iterator[tuple[bytes, dict]]:
        with self._path.open("rb") as file:
            yield from ((line, json.loads(line)) for line in file)

    def _truncate(self, lines: Iterable[bytes]) -> None:
        """Cut the file behind these lines, with which it begins."""
        descriptor = self._open_file.fileno()
        os.ftruncate(descriptor, sum(map(len, lines)))
        os.fsync(descriptor)


def whole_lines(path: Path) -> Iterator[tuple[bytes, dict]]:
    """The lines of a file, each with its step. They end before the first line that a crash cut off, that is damaged, or
    that is not the next step."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                step = json.loads(line)
            except ValueError:
                return
            if not isinstance(step, dict) or step.get("step") != number or "loss" not in step or line[-1:] != b"\n":
                return
            yield line, step
