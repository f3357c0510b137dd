"""metrics.jsonl: a line for each committed step, in order. They stay on the disk: a run has more steps than memory."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO


class Metrics:
    """The steps of a file. A context manager: once open, it holds those of the first `n_committed` steps that an
    earlier process left whole, `n_resumed` of them, and what is added. A crash leaves whole lines, and at most one that
    is cut off."""

    def __init__(self, path: Path, n_committed: int):
        self._path, self._n_committed = path, n_committed
        self._file: TextIO | None = None
        self.n_resumed = 0

    def __enter__(self):
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a")
        self._keep(line for line, step in left_whole(self._path) if step["step"] < self._n_committed)
        self.n_resumed = sum(1 for _ in self)
        return self

    def __exit__(self, *_):
        self._file.close()

    def __iter__(self) -> Iterator[dict]:
        return (step for _, step in self._lines())

    def add(self, step: dict) -> None:
        """The next step."""
        self._file.write(json.dumps(step) + "\n")
        self._file.flush()

    def cut(self, n_steps: int) -> None:
        """Only the first n_steps steps count from now on; durable on return."""
        self._keep(line for line, step in self._lines() if step["step"] < n_steps)

    def _lines(self) -> Iterator[tuple[bytes, dict]]:
        with self._path.open("rb") as file:
            yield from ((line, json.loads(line)) for line in file)

    def _keep(self, lines: Iterable[bytes]) -> None:
        os.ftruncate(self._file.fileno(), sum(map(len, lines)))
        os.fsync(self._file.fileno())


def left_whole(path: Path) -> Iterator[tuple[bytes, dict]]:
    """Lines and steps of a file that a process left. What a crash cut off or a disk damaged is left out, and all after
    it: the steps stand in order."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                step = json.loads(line)
            except ValueError:
                return
            if not isinstance(step, dict) or step.get("step") != number or "loss" not in step or line[-1:] != b"\n":
                return
            yield line, step
