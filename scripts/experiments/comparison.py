"""Measured runs that are compared on a page: the vocabulary of comparisons, and their raw data.

A comparison is a file of scripts/experiments/comparisons. Its raw data are a file of JSON lines, one for each run. A
line with `about` instead says where the runs were made. The page is written from these data and a template.
"""

import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import TEMPLATE, append, commit, filled

from jaxdt.cli import local_run
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput

NAMES = tuple(sorted(path.stem for path in (Path(__file__).parent / "comparisons").glob("[a-z]*.py")))
PAGE = "README.md"

Line = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """What the command line says of the runs. steps: of a run."""

    seeds: Sequence[int]
    steps: int


@dataclass(frozen=True)
class Comparison:
    """page: the folder of the template, and of committed raw data and page. cases: the names of all runs, in their
    order. made: makes the runs of these names in a folder, and yields the line of each. values: what the page of a
    folder shows, with pictures drawn into the second folder; None where the data do not suffice for a page. result: of
    all lines, printed as JSON; under `bad` what the runs must not show. n_seeds: by default. steps: by default, 0 where
    the config says them. file: of the raw data. fields: a line has them."""

    page: Path
    cases: Callable[[Given], list[Line]]
    made: Callable[[Sequence[Line], Given, Path], Iterator[Line]]
    values: Callable[[Path, Path], dict[str, Any] | None]
    n_seeds: int
    steps: int = 0
    seeds_min: int = 1
    steps_min: int = 1
    file: str = "runs.jsonl"
    fields: tuple[str, ...] = ()
    result: Callable[[Sequence[Line]], dict[str, Any]] = lambda lines: {"runs": len(lines)}

    def lacks(self, case: Mapping[str, Any], lines: Sequence[Line]) -> bool:
        """Whether no line is that of the case: none has its values, where it has its fields. A line may keep the
        figures of its run under `run`."""
        known = (line | line.get("run", {}) for line in lines)
        return not any(all(line.get(name, value) == value for name, value in case.items()) for line in known)

    def read(self, folder: Path) -> tuple[Any, list[Line]]:
        """(where the runs were made, their lines); nothing where there is no file. BadInput for a line that is not of
        one."""
        about, lines, path = "", [], folder / self.file
        for number, text in enumerate(path.read_text().splitlines() if path.exists() else (), start=1):
            line = json.loads(text)
            if "about" in line:
                about = line["about"]
            elif not set(self.fields) <= set(line):
                raise BadInput(f"{path}: line {number}: got {text:.40}, expected {', '.join(self.fields)}")
            else:
                lines.append(line)
        return about, lines

    def add(self, folder: Path, about: Any, line: Line) -> None:
        """Add a run to the raw data; the first one after where it was made."""
        path = folder / self.file
        if about and not path.exists():
            append(path, {"about": about})
        append(path, line)

    def write(self, folder: Path, out: Path) -> bool:
        """Write the page of the raw data in `folder`, and its pictures, to `out`. Returns whether the data suffice."""
        values = self.values(folder, out)
        if values is None:
            return False
        module = importlib.import_module(self.values.__module__)
        (out / PAGE).write_text(filled((self.page / TEMPLATE).read_text(), module, values))
        return True


def comparison_of(name: str) -> Comparison:
    return importlib.import_module(f"comparisons.{name}").COMPARISON


def rotated(names: Sequence[str], number: int) -> list[str]:
    """An order of runs, another one from number to number: each name is first, second and so on equally often."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def launched(run_dir: Path, words: Sequence[str]) -> dict[str, Any]:
    """Make a run as processes of this machine. Returns its summary."""
    log = run_dir.with_suffix(".log")
    words = [*words, f"--run_dir={run_dir}", "--report=false", "--overwrite"]
    launcher = local_run.start(log, "launch.py", words)
    try:
        code = launcher.wait()
    finally:
        local_run.end(launcher, [])
    if code:
        raise BadInput(f"{run_dir.name}: the run ended with code {code}, {log} says why")
    return local_run.summary(run_dir)


def this_machine(given: Given) -> dict[str, Any]:
    """Where runs are made, and by which commit."""
    return {
        "cores": len(allowed_cpus()),
        "load before": os.getloadavg()[0],
        "Linux": platform.release(),
        "Python": platform.python_version(),
        "JAX": importlib.metadata.version("jax"),
        "commit": commit() or "unknown",
        "runs of a case": len(given.seeds),
    }


def told(about: Any) -> str:
    """Where runs were made, for people."""
    return about if isinstance(about, str) else "; ".join(f"{name}: {value}" for name, value in about.items()) + "."
