"""Fleets of real processes that are disturbed while they train: the vocabulary of trials, and what plays them.

A trial's disturbances are streams of (seconds after the beginning, what happens):

    at(s, what)           once; s may be (least, most), of which one moment is drawn
    AtShare(0.5, what)    once, when such a share of the steps is committed
    every(s, *whats)      all of them, again and again
    often(s, *whats)      one of them, drawn, at random moments that are s apart in the mean

A victim is named, such as "peer 3", or one is drawn of a kind: "coordinator", "peer" (of the plan, and newcomers),
"worker" (of a pool, ready to compute), "server" (a pool's other peers). Who is paused is not drawn. An expectation is a
function of what was played; it returns the problem, or ''. Needs no jax, but for the parameters of a checkpoint.
"""

import contextlib
import heapq
import importlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leak_check
from churn_comparison.results import is_alone

from jaxdt.cli import local_run
from jaxdt.run import network as networks
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput
from jaxdt.runtime.reporting import counts

POLL_S, SAMPLE_S = 0.05, 2.0
BEGINS_S, TIMEOUT_S = 300.0, 1800.0
READY = " is ready on "  # in the log of a worker that can compute


@dataclass(frozen=True)
class Kill:
    """SIGKILL, or SIGTERM for `by` "term". With `back_s` the process comes back within so many seconds, a worker as
    often as a new one in its place. `spared`: never these. `spares_alone`: not a peer that is alone at its stage."""

    who: str
    back_s: float | None = None
    by: str = "kill"
    spared: Collection[str] = ()
    spares_alone: bool = False


@dataclass(frozen=True)
class Pause:
    """SIGSTOP for `least_s` to `most_s`."""

    who: str
    most_s: float
    least_s: float = 0.0


@dataclass(frozen=True)
class Join:
    """A newcomer joins the run."""


Disturbance = Kill | Pause | Join
Stream = Callable[[random.Random], Iterator[tuple[float, tuple[Disturbance, ...]]]]


@dataclass(frozen=True)
class AtShare:
    """Happens once such a share of the trial's steps is committed."""

    share: float
    what: Disturbance


def at(seconds: float | tuple[float, float], *whats: Disturbance) -> Stream:
    return lambda rng: iter([(rng.uniform(*seconds) if isinstance(seconds, tuple) else seconds, whats)])


def every(seconds: float, *whats: Disturbance) -> Stream:
    return lambda rng: ((seconds * n, whats) for n in itertools.count(1))


def often(seconds: float, *whats: Disturbance) -> Stream:
    def stream(rng: random.Random) -> Iterator[tuple[float, tuple[Disturbance, ...]]]:
        at_s = 0.0
        while True:
            yield at_s, (rng.choice(whats),)
            at_s += rng.expovariate(1 / seconds)

    return stream


@dataclass(frozen=True)
class Trial:
    """config, flags: of the run. seconds: the driver ends the run then; 0: it ends by itself. steps: of the run; 0: as
    the config says. begins: disturbances begin after so many steps. forward_s: an emulated forward takes at least so
    long. latency_s: of each emulated link, with which machines of one host are apart. watched: processes that are
    sampled all the time."""

    config: str
    disturbances: Sequence[Stream | AtShare]
    expected: Sequence["Expectation"]
    flags: tuple[str, ...] = ()
    seconds: float = 0.0
    steps: int = 0
    tries: int = 1
    begins: int = 1
    forward_s: float = 0.0
    latency_s: float | None = None
    watched: Collection[str] = ()


@dataclass
class Played:
    """A run that has been played. code: its exit code; None if the driver ended it. Times are seconds after began_s, a
    moment of the monotonic clock. events: (when, what, whom). rows_s: when each row of the metrics was seen. samples:
    of the watched processes. held_up_s: the longest time between two polls, less the sleep between them. cores_busy:
    the mean number of busy cores, with all that ran on the machine. figures: what expectations have measured."""

    trial: Trial
    run_dir: Path
    code: int | None = None
    began_s: float = 0.0
    seconds: float = 0.0
    events: list[tuple[float, str, str]] = field(default_factory=list)
    rows_s: list[float] = field(default_factory=list)
    samples: dict[str, list[leak_check.Sample]] = field(default_factory=dict)
    held_up_s: float = 0.0
    cores_busy: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.run_dir.with_suffix(".log")

    def alone(self, n_steps: int) -> Path:
        """The folder of a run of one process with so many steps."""
        folder = self.run_dir.with_name("alone")
        if len(local_run.losses(folder)) < n_steps:
            local_run.losses_alone(folder, self.trial.flags, n_steps)
        return folder

    def reports(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """The fields of all reports of a kind, of all processes."""
        for path in sorted((self.run_dir / "trace").glob("*.jsonl")):
            for record in local_run.objects(path):
                if record["what"] == "report" and record["kind"] == kind:
                    yield record["fields"]


Expectation = Callable[[Played], str]


class Fleet:
    """The processes of a run: the launcher's children, and those that have been started since, by name."""

    def __init__(self, trial: Trial, run_dir: Path, rng: random.Random):
        self.trial, self.run_dir, self._rng = trial, run_dir, rng
        self.started: dict[str, subprocess.Popen] = {}
        self.killed: set[int] = set()  # ids of peers
        self._paused: dict[int, float] = {}  # process -> when it goes on
        self._coming: list[tuple[float, str]] = []  # when which worker comes, '' for a new one
        words = [*trial.flags, f"--run_dir={run_dir}", "--report=false", *self._slow()]
        if trial.steps or trial.seconds:
            words.append(f"--config.train.steps={trial.steps or 100_000_000}")
        if trial.latency_s is not None:
            words.append(f"--emulate={self._network(trial.latency_s)}")
        self.launcher = local_run.start(run_dir.with_suffix(".log"), "launch.py", words)

    def _slow(self) -> list[str]:
        return [f"--emulate_forward_s={self.trial.forward_s}"] if self.trial.forward_s else []

    def _network(self, latency_s: float) -> Path:
        path = self.run_dir.with_suffix(".network.json")
        path.write_text(json.dumps(networks.to_json(networks.uniform(64, latency_s, 1.0))))
        return path

    @property
    def n_rows(self) -> int:
        return len(local_run.objects(self.run_dir / "metrics.jsonl"))

    def pids(self) -> dict[str, int]:
        """Process ids by name: coordinator, peer 3, newcomer 0. Whoever is gone is not among them."""
        started = {name: process.pid for name, process in self.started.items() if process.poll() is None}
        return local_run.children(self.launcher.pid) | started

    def of_kind(self, kind: str, pids: Mapping[str, int]) -> list[str]:
        """The names of the processes of a kind."""
        workers = (
            {f"peer {peer}" for peer in local_run.workers(self.launcher.pid)} if kind in ("worker", "server") else ()
        )
        match kind:
            case "coordinator":
                return [name for name in pids if name == kind]
            case "peer":
                return [name for name in pids if name != "coordinator"]
            case "server":
                return [name for name in pids if name.startswith("peer") and name not in {*workers, *self.started}]
        own = [name for name in pids if name in workers or name in self.started]
        return [name for name in own if READY in self._log(name).read_text()]

    def _log(self, name: str) -> Path:
        if name in self.started or name.startswith("newcomer"):
            return self._log_of_started(name)
        return self.run_dir / "logs" / f"{name.replace(' ', '_')}.log"

    def _log_of_started(self, name: str) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}_{name.replace(' ', '_')}.log")

    def apply(self, what: Disturbance, now_s: float) -> list[tuple[str, str]]:
        """Let something happen. Returns what was done, and to whom; nothing if there is no victim."""
        if isinstance(what, Join):
            return [("join", self.start())]
        pids = self.pids()
        named = [what.who] if what.who in pids or " " in what.who else self.of_kind(what.who, pids)
        spared = what.spared if isinstance(what, Kill) else ()
        candidates = sorted(name for name in named if name not in spared and pids.get(name) not in self._paused)
        if not candidates:
            return []
        victim = self._rng.choice(candidates)
        if victim not in pids:
            raise BadInput(f"{self.run_dir}: {victim} has ended before it was to leave; see its log")
        if isinstance(what, Pause):
            os.kill(pids[victim], signal.SIGSTOP)
            self._paused[pids[victim]] = now_s + self._rng.uniform(what.least_s, what.most_s)
            return [("pause", victim)]
        peer = self.peer_of(victim)
        if what.spares_alone and peer is not None and is_alone(self.records(), peer, self.killed):
            return [("spared", victim)]
        os.kill(pids[victim], signal.SIGTERM if what.by == "term" else signal.SIGKILL)
        self.killed |= set() if peer is None else {peer}
        if what.back_s is not None:
            self.started.pop(victim, None)
            same = str(peer) if victim.startswith("peer") else ""
            self._coming.append((now_s + self._rng.uniform(0.0, what.back_s), self._rng.choice((same, ""))))
        return [("leave", victim)]

    def records(self) -> list[dict]:
        """The coordinator's trace, which is written line by line."""
        return local_run.objects(self.run_dir / "trace" / "coordinator.jsonl")

    def peer_of(self, name: str) -> int | None:
        """The id by which the run knows a process; None if it has none yet."""
        if name.startswith("peer "):
            return int(name.removeprefix("peer "))
        if not name.startswith("newcomer "):
            return None
        first = self._log(name).read_text().partition(": joins for stage")[0]
        return int(first.rpartition("peer ")[2]) if "peer " in first else None

    def start(self, worker: str | None = None) -> str:
        """Start a newcomer; or a worker: the one of this id, for '' a new one. Returns its name."""
        name = f"peer {worker}" if worker else f"newcomer {sum(n.startswith('newcomer') for n in self.started)}"
        log = self._log_of_started(name)
        if worker is None:
            self.started[name] = local_run.join(self.run_dir, log, self._slow())
        else:
            self.started[name] = local_run.worker(self.run_dir, log, worker, self._slow())
        return name

    def follow_up(self, now_s: float) -> list[tuple[str, str]]:
        """Let processes go on, and come back, whose time has come."""
        for pid in [pid for pid, until_s in self._paused.items() if until_s <= now_s]:
            del self._paused[pid]
            with contextlib.suppress(ProcessLookupError):  # its launcher may have ended it meanwhile
                os.kill(pid, signal.SIGCONT)
        due = [entry for entry in self._coming if entry[0] <= now_s]
        self._coming = [entry for entry in self._coming if entry[0] > now_s]
        return [("back", self.start(worker)) for _, worker in due]

    def sample(self, name: str, pid: int, now_s: float) -> leak_check.Sample | None:
        """A sample of a process; None if it is gone."""
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            n_fds = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return None
        if "VmRSS" not in status:
            return None
        n_members = len(json.loads((self.run_dir / "coordinator" / "view.json").read_bytes())["value"]["members"])
        return now_s, 1024 * int(status["VmRSS"].split()[0]), n_fds, int(status["Threads"]), n_members

    def wait_for_rows(self, n: int, until_s: float) -> None:
        while self.n_rows < n:
            self.check()
            if time.monotonic() > until_s:
                raise BadInput(
                    f"{self.run_dir}: {n} steps were not done in time; see {self.run_dir.with_suffix('.log')}"
                )
            time.sleep(POLL_S)

    def check(self) -> None:
        if self.launcher.poll() is not None:
            code = self.launcher.returncode
            raise BadInput(f"{self.run_dir}: the run ended with code {code}; see {self.run_dir.with_suffix('.log')}")

    def end(self) -> None:
        self.follow_up(float("inf"))
        local_run.end(self.launcher, self.started.values())


def clear(folder: Path, mark: str, overwrites: bool) -> None:
    """Make the folder of a trial, without what an earlier one left there if that may go. `mark`: a file or folder by
    which one is known."""
    if folder.exists() and any(folder.iterdir()):
        if not overwrites or not (folder / mark).exists():
            raise BadInput(
                f"--run_dir: {folder} is not empty, expected a new one, or --overwrite for an earlier trial's"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def play(trial: Trial, run_dir: Path, rng: random.Random) -> Played:
    """Play a trial once."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    fleet, played = Fleet(trial, run_dir, rng), Played(trial, run_dir)
    try:
        fleet.wait_for_rows(trial.begins, time.monotonic() + BEGINS_S)
        played.began_s = time.monotonic()
        _disturb(trial, fleet, played, rng)
        if trial.seconds:
            fleet.wait_for_rows(fleet.n_rows + 1, time.monotonic() + BEGINS_S)  # the current step counts in part
        else:
            fleet.follow_up(float("inf"))
            played.code = fleet.launcher.wait(timeout=TIMEOUT_S)
    finally:
        fleet.end()
    played.figures = {"steps": len(played.rows_s)} | dict(Counter(what for _, what, _ in played.events))
    return played


def _disturb(trial: Trial, fleet: Fleet, played: Played, rng: random.Random) -> None:
    """Let all happen in time, until the time is over, all steps are done, or the run has ended."""
    streams = [stream(rng) for stream in trial.disturbances if not isinstance(stream, AtShare)]
    due = [(at_s, n, whats) for n, stream in enumerate(streams) for at_s, whats in itertools.islice(stream, 1)]
    heapq.heapify(due)
    shares = [one for one in trial.disturbances if isinstance(one, AtShare)]
    idle_before_s, before_s, sampled_s = counts.idle_s(), 0.0, 0.0

    def happened(events: list[tuple[str, str]]) -> None:
        for what, whom in events:
            played.events.append((time.monotonic() - played.began_s, what, whom))
            print(f"{played.events[-1][0]:6.1f} s, {len(played.rows_s)} steps: {what} {whom}", flush=True)

    def has_come(at_s: float) -> bool:
        return time.monotonic() >= played.began_s + at_s

    while True:
        now_s = time.monotonic() - played.began_s
        played.held_up_s = max(played.held_up_s, now_s - before_s - POLL_S)
        before_s = now_s
        played.rows_s += [now_s] * (fleet.n_rows - len(played.rows_s))
        is_over = has_come(trial.seconds) if trial.seconds else 0 < trial.steps <= len(played.rows_s)
        while due and has_come(due[0][0]):
            at_s, n, whats = heapq.heappop(due)
            for what in whats:
                happened(fleet.apply(what, now_s))
            for next_s, more in itertools.islice(streams[n], 1):
                heapq.heappush(due, (max(next_s, at_s), n, more))
        for one in [one for one in shares if one.share * trial.steps <= len(played.rows_s)]:
            shares.remove(one)
            happened(fleet.apply(one.what, now_s))
        happened(fleet.follow_up(now_s))
        if is_over or (not trial.seconds and fleet.launcher.poll() is not None):
            break
        if trial.seconds:
            fleet.check()
        if trial.watched and now_s >= sampled_s:
            sampled_s = now_s + SAMPLE_S
            for name, pid in fleet.pids().items():
                if name in trial.watched and (sample := fleet.sample(name, pid, now_s)):
                    played.samples.setdefault(name, []).append(sample)
        until_s = min([now_s + POLL_S, *(due[0][:1] if due else ()), *([trial.seconds] if trial.seconds else [])])
        time.sleep(max(0.0, played.began_s + until_s - time.monotonic()))
    played.seconds = time.monotonic() - played.began_s
    played.cores_busy = len(allowed_cpus()) - (counts.idle_s() - idle_before_s) / max(played.seconds, 1e-9)


# -------------------------------------------------------------------------------------------------------- expectations


def goes_on(seconds: float, rows: float, watched: int = 10) -> Expectation:
    """None of the next rows after a loss comes later after the one before than `seconds`, or `rows` times the longest
    row before."""

    def expect(played: Played) -> str:
        lost_s = next(at_s for at_s, what, _ in played.events if what == "leave")
        after = [lost_s, *(at_s for at_s in played.rows_s if at_s > lost_s)][: watched + 1]
        gap_s = max((b - a for a, b in itertools.pairwise(after)), default=0.0)
        before = local_run.objects(played.run_dir / "metrics.jsonl")[: sum(at_s <= lost_s for at_s in played.rows_s)]
        most_s = max(seconds, rows * max((row["step_s"] for row in before), default=0.0))
        played.figures["gap_s"] = round(gap_s, 2)
        return f"no row for {gap_s:.2f} s, expected at most {most_s:.2f}" if gap_s > most_s else ""

    return expect


def has_all_rows(played: Played) -> str:
    """The metrics have a row for each step."""
    n_rows = len(local_run.losses(played.run_dir))
    n_steps = json.loads((played.run_dir / "config.json").read_text())["train"]["steps"]
    return f"the metrics have {n_rows} rows, expected {n_steps}" if n_rows != n_steps else ""


def is_replayed(played: Played) -> str:
    """No number of the last checkpoint differs from the replay of the run's log in one process."""
    script = local_run.SCRIPTS / "tools/replay.py"
    words = [sys.executable, script, f"--run_dir={played.run_dir}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"replay.py: {done.stdout}{done.stderr}" if done.returncode else ""


def has_views(*numbers: int) -> Expectation:
    """The run has these views."""

    def expect(played: Played) -> str:
        views = sorted({report["view"] for report in played.reports("view")})
        return f"it had views {views}, expected {list(numbers)}: workers are in none" if views != list(numbers) else ""

    return expect


def has_losses_of_one(most: float, first: int = 0) -> Expectation:
    """Losses are those of one process: of the first steps only, where training doubles the difference of two sums in
    another order every fifty steps."""

    def expect(played: Played) -> str:
        losses = local_run.losses(played.run_dir)
        losses = losses[: first or len(losses)]
        alone = local_run.losses(played.alone(len(losses)))
        difference = max((abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=False)), default=float("inf"))
        played.figures |= {"loss_difference": difference, "steps_compared": min(len(losses), len(alone))}
        if len(alone) < len(losses):
            return f"{len(losses)} steps to compare, alone {len(alone)}"
        return "" if difference <= most else f"losses differ by {difference:.1e}, expected at most {most:.0e}"

    return expect


def has_parameters_of_one(most: float) -> Expectation:
    """The norm of the parameters' difference to those of one process, over the norm of these."""

    def expect(played: Played) -> str:
        import numpy as np

        got, alone = (
            parameters(folder, played.trial.steps) for folder in (played.run_dir, played.alone(played.trial.steps))
        )
        difference = float(np.linalg.norm(got - alone) / np.linalg.norm(alone))
        played.figures["parameter_difference"] = difference
        return "" if difference <= most else f"parameters differ by {difference:.1e}, expected at most {most:.0e}"

    return expect


def parameters(run_dir: Path, step: int) -> Any:
    """All parameters of a checkpoint, as one vector."""
    import numpy as np

    from jaxdt.runtime.storage.entries import load_entries
    from jaxdt.runtime.storage.parts import step_folder

    def leaves_of(tree: Any) -> Iterator[Any]:
        for value in (tree[name] for name in sorted(tree)) if isinstance(tree, Mapping) else ():
            yield from leaves_of(value)
        if not isinstance(tree, Mapping):
            yield np.asarray(tree)

    entries = load_entries(step_folder(run_dir, step))
    leaves = (leaf for name in sorted(entries) for leaf in leaves_of(entries[name]["params"]))
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in leaves])


def counts_lost_workers(played: Played) -> str:
    """How often servers have lost workers and computed microbatches again: a figure, no limit."""
    lost = list(played.reports("worker_lost"))
    played.figures |= {"workers_lost": len(lost), "computed_again": sum(report["n_redone"] for report in lost)}
    return ""


def does_not_grow(most: float, period_s: float) -> Expectation:
    """rss (resident memory), fds and threads of the watched processes grow by no more than this fraction after the
    warm-up (leak_check.py)."""

    def expect(played: Played) -> str:
        grown = {name: leak_check.growth(samples, period_s) for name, samples in sorted(played.samples.items())}
        means = {
            name: dict(
                zip(leak_check.FIGURES, map(statistics.mean, list(zip(*samples, strict=True))[1:]), strict=False)
            )
            for name, samples in sorted(played.samples.items())
        }
        played.figures |= {"growth": grown, "means": means}
        bad = [
            f"{name}: {figure} grows by {100 * by:.1f} %"
            for name, by_figure in grown.items()
            for figure, by in by_figure.items()
            if by > most
        ]
        return "; ".join(bad) if grown else "no process was watched"

    return expect


# ---------------------------------------------------------------------------------------------------- trials by name

NAMES = tuple(sorted(path.stem for path in (Path(__file__).parent / "trials").glob("[a-z]*.py")))


def trial_of(name: str) -> Trial:
    return importlib.import_module(f"trials.{name}").TRIAL


def with_config(argv: list[str]) -> list[str]:
    """The command line, with the trial's config and flags where it names no config."""
    named = [word for word in argv[1:] if word in NAMES]
    if not named or any(word.startswith("--config=") for word in argv):
        return argv
    trial = trial_of(named[0])
    return [argv[0], f"--config={local_run.SCRIPTS.parent / trial.config}", *trial.flags, *argv[1:]]


def judged(trial: Trial, played: Played) -> tuple[dict, list[str]]:
    """What a try has measured, and what is wrong with it. Nothing is compared if the run itself has failed."""
    if played.code:
        return played.figures, [f"the run ended with code {played.code}, {played.log} says why"]
    if not played.events:
        return played.figures, ["nothing was disturbed: the run was over before"]
    problems = [expect(played) for expect in trial.expected]
    return played.figures, [problem for problem in problems if problem]
