"""Simulated values of a page, each with what it was simulated from: results.jsonl beside the page.

A page is written from these values alone. With the committed ones it is written again in a second, without a
simulation, so a test compares every page with its text. A value that the page asks for and the file does not hold means
that the page's inputs have changed; a sample that is simulated again tells whether the simulator has. The file's first
line names the commit at which its values were simulated; a value that was added later names its own.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import MISSING, dataclass, fields
from multiprocessing import get_context
from pathlib import Path

from jaxdt.run.cpus import usable_cores
from jaxdt.run.errors import BadInput

FILE = "results.jsonl"
POOL_WORKS_MIN = 50_000  # in less time than these take a process hardly starts
DIGITS = 9  # of a value. The last bits of a sum differ between Python 3.11 and 3.12


@dataclass(frozen=True)
class Job:
    """A simulation. `inputs` names all that decides its values; `n_works` is its size, in computations."""

    inputs: str
    n_works: int
    compute: Callable[[], Sequence[float]]


class Results:
    """The values of jobs, simulated at `commit`, or at that of `added` where it has one for a job's inputs. Without
    `known` jobs are computed; otherwise their values are those of `known`. `adds`: the commit at which values are
    computed that `known` lacks; if empty, none may be lacking."""

    def __init__(
        self,
        known: dict[str, list[float]] | None = None,
        commit: str = "",
        added: Mapping[str, str] | None = None,
        adds: str = "",
    ):
        self.commit = commit
        self.added = dict(added or {})
        self._adds = adds
        self._known = known
        self._values: dict[str, list[float]] = {}
        self._jobs: dict[str, Job] = {}

    def get(self, job: Job) -> list[float]:
        """The values of a job. BadInput if they have to be known and are not."""
        self.fill([job])
        return self._values[job.inputs]

    def fill(self, jobs: Iterable[Job]) -> None:
        """Get the values of many jobs, on all cores if there are several to compute."""
        new = {job.inputs: job for job in jobs if job.inputs not in self._values}
        self._jobs |= new
        if self._known is None:
            self._values |= computed(list(new.values()))
            return
        lacking = [job for inputs, job in new.items() if inputs not in self._known]
        if lacking and not self._adds:
            inputs = lacking[0].inputs
            raise BadInput(f"{FILE}: has no values for {inputs}: the page's inputs have changed, write it again")
        self.added |= {job.inputs: self._adds for job in lacking}
        self._values |= {inputs: self._known[inputs] for inputs in new.keys() & self._known.keys()} | computed(lacking)

    def sample(self, n: int, n_works_max: int) -> list[Job]:
        """About `n` jobs of at most `n_works_max` computations among those that were asked for, evenly spaced."""
        small = [job for job in self._jobs.values() if job.n_works <= n_works_max]
        return small[:: max(1, -(-len(small) // n))]

    def lines(self) -> str:
        """The file's text: the commit, and the values that were asked for, in that order."""
        entries: list[dict] = [{"commit": self.commit}]
        for inputs in self._jobs:
            own = {"commit": self.added[inputs]} if inputs in self.added else {}
            entries.append({"of": inputs, "values": self._values[inputs]} | own)
        return "".join(json.dumps(entry) + "\n" for entry in entries)

    def commits(self) -> str:
        """Where the values that were asked for were simulated, for people."""
        told = self.commit or "unknown"
        for name, group in itertools.groupby(
            sorted(self.added[inputs] for inputs in self._jobs if inputs in self.added)
        ):
            told += f", {len(list(group))} of {len(self._jobs)} at {name}"
        return told


def read(folder: Path, adds: str = "") -> Results:
    """The committed results of a page, to which those are added at the commit `adds` that it lacks. BadInput if there
    are none."""
    if not (folder / FILE).is_file():
        raise BadInput(f"{folder / FILE}: there is no such file, expected the values of a page")
    head, *entries = map(json.loads, (folder / FILE).read_text().splitlines())
    added = {entry["of"]: entry["commit"] for entry in entries if "commit" in entry}
    return Results({entry["of"]: entry["values"] for entry in entries}, head["commit"], added, adds)


def computed(jobs: Sequence[Job]) -> dict[str, list[float]]:
    """The values of jobs by their inputs, rounded. The longest begin first."""
    jobs = sorted(jobs, key=lambda job: -job.n_works)
    n_processes = max(1, min(len(jobs), int(usable_cores())))
    if n_processes < 2 or sum(job.n_works for job in jobs) < POOL_WORKS_MIN:
        return {job.inputs: _values(job) for job in jobs}
    with ProcessPoolExecutor(n_processes, get_context("spawn")) as pool:
        return dict(zip((job.inputs for job in jobs), pool.map(_values, jobs), strict=True))


def _values(job: Job) -> list[float]:
    return [float(f"{value:.{DIGITS}g}") for value in job.compute()]


def described(instance) -> str:
    """The fields of a dataclass instance that have no default or another value than it."""
    told = []
    for field in fields(instance):
        value = getattr(instance, field.name)
        if field.default is MISSING or value != field.default:
            told.append(f"{field.name}={_text(value)}")
    return f"{type(instance).__name__}({', '.join(told)})"


def _text(value) -> str:
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else repr(value)
