"""Fleets of real processes that are disturbed while they train: the vocabulary of trials, and what plays them.

A trial's disturbances are streams of what happens, seconds after the beginning:

    at(s, what)           once; s may be (least, most), of which one moment is drawn
    AtShare(0.5, what)    once, when such a share of the steps is committed
    every(s, *whats)      all of them, again and again
    often(s, *whats)      one of them, drawn, at random moments that are s apart in the mean

A victim is named, such as "peer 3", or one is drawn of a kind: "coordinator", "peer" (of the plan, and newcomers),
"worker" (of a pool, ready to compute), "server" (a pool's other peers). Who is paused is not drawn. An expectation is a
function of what was played; it returns the problem, or ''. A stream and a disturbance are functions of the fleet,
generators that yield while they wait (trial_fleets.py); what a stream does before it waits is done before the processes
start. Needs no jax, but for the parameters of a checkpoint.
"""

import importlib
import itertools
import json
import math
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
from rollback_proof import Life
from trial_fleets import POLL_S, RECOVERED_S, Fleet, HostFleet, Script, Scripts

from jaxdt.cli import local_run
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import EMITTED_RUN_DIR
from jaxdt.runtime.reporting import counts

SAMPLE_S = 2.0
BEGINS_S, TIMEOUT_S = 300.0, 1800.0
FIRST_LOG = "0.log"  # by which the folder of a trial is known
PAUSE_S, HURRY_S = (1.0, 4.0), (2.0, 6.0)  # between two kinds, at least; and where the fleet need not recover


@dataclass(frozen=True)
class Kill:
    """SIGKILL, or SIGTERM for `by` "term". With `back_s` the process comes back within so many seconds, after
    `back_least_s` at least; a worker as often as a new one in its place. `spared`: never these. `spares_alone`: not a
    peer that is alone at its stage."""

    who: str
    back_s: float | None = None
    back_least_s: float = 0.0
    by: str = "kill"
    spared: Collection[str] = ()
    spares_alone: bool = False

    def __call__(self, fleet: Fleet) -> Script:
        if not (victim := fleet.victim(self.who, self.spared)):
            return
        if self.spares_alone and fleet.is_alone(victim):
            return fleet.happened("spared", victim)
        back_s = None if self.back_s is None else fleet.rng.uniform(self.back_least_s, self.back_s)
        yield from fleet.leaves(victim, signal.SIGTERM if self.by == "term" else signal.SIGKILL, back_s)


@dataclass(frozen=True)
class Pause:
    """SIGSTOP for `least_s` to `most_s`."""

    who: str
    most_s: float
    least_s: float = 0.0

    def __call__(self, fleet: Fleet) -> Script:
        if victim := fleet.victim(self.who):
            yield from fleet.pauses(victim, fleet.rng.uniform(self.least_s, self.most_s))


@dataclass(frozen=True)
class Join:
    """A newcomer joins the run."""

    def __call__(self, fleet: Fleet) -> Script:
        fleet.happened("join", fleet.join())
        yield from ()


Disturbance = Callable[[Any], Script]  # of a fleet of the kind that it needs; a stream of them is one, too


@dataclass(frozen=True)
class AtShare:
    """Happens once such a share of the trial's steps is committed."""

    share: float
    what: Disturbance

    def __call__(self, fleet: Fleet) -> Script:
        yield lambda: self.share * fleet.trial.steps <= len(fleet.rows_s)
        fleet.scripts.go(self.what(fleet))


def at(seconds: float | tuple[float, float], *whats: Disturbance) -> Disturbance:
    def stream(fleet: Fleet) -> Script:
        yield fleet.rng.uniform(*seconds) if isinstance(seconds, tuple) else seconds
        for what in whats:
            fleet.scripts.go(what(fleet))

    return stream


def every(seconds: float, *whats: Disturbance) -> Disturbance:
    def stream(fleet: Fleet) -> Script:
        for n in itertools.count(1):
            yield from at(seconds * n, *whats)(fleet)

    return stream


def often(seconds: float, *whats: Disturbance) -> Disturbance:
    def stream(fleet: Fleet) -> Script:
        at_s = 0.0
        while True:
            yield from at(at_s, fleet.rng.choice(whats))(fleet)
            at_s += fleet.rng.expovariate(1 / seconds)

    return stream


@dataclass(frozen=True)
class Trial:
    """config, flags: of the run. seconds: the driver ends the run then; 0: it ends by itself. steps: of the run; 0: as
    the config says. begins: disturbances begin after so many steps. forward_s: an emulated forward takes at least so
    long. latency_s: of each emulated link, with which machines of one host are apart. watched: processes that are
    sampled all the time. n_hosts: so many peers have a host, and a folder, of their own; 0: launch.py starts all
    processes in one folder. kinds: of disturbances that happen in turn, by name."""

    config: str
    expected: Sequence["Expectation"]
    disturbances: Sequence[Disturbance] = ()
    flags: tuple[str, ...] = ()
    seconds: float = 0.0
    steps: int = 0
    tries: int = 1
    begins: int = 1
    forward_s: float = 0.0
    latency_s: float | None = None
    watched: Collection[str] = ()
    n_hosts: int = 0
    kinds: Mapping[str, Disturbance] = field(default_factory=dict)


@dataclass
class Played:
    """A run that has been played. code: its exit code; None if the driver ended it. Times are seconds after began_s, a
    moment of the monotonic clock. events: (when, what, whom). rows_s: when each row of the metrics was seen. samples:
    of the watched processes. held_up_s: the longest time between two polls, less the sleep between them. cores_busy:
    the mean number of busy cores, with all that ran on the machine. lives: of the peers' processes, where each has a
    host. figures: what has been measured. problems: what has been seen that must not happen."""

    trial: Trial
    folder: Path
    code: int | None = None
    began_s: float = 0.0
    seconds: float = 0.0
    events: list[tuple[float, str, str]] = field(default_factory=list)
    rows_s: list[float] = field(default_factory=list)
    samples: dict[str, list[leak_check.Sample]] = field(default_factory=dict)
    held_up_s: float = 0.0
    cores_busy: float = 0.0
    lives: list[Life] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        """The run's folder; where each process has one, the coordinator's."""
        return self.folder / EMITTED_RUN_DIR if self.trial.n_hosts else self.folder

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def alone(self, n_steps: int) -> Path:
        """The folder of a run of one process with so many steps."""
        folder = self.folder.with_name("alone")
        if len(local_run.losses(folder)) < n_steps:
            local_run.losses_alone(folder, self.trial.flags, n_steps)
        return folder

    def records(self) -> list[dict]:
        """The coordinator's trace, which is written line by line."""
        return local_run.objects(self.run_dir / "trace" / "coordinator.jsonl")

    def reports(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """The fields of all reports of a kind, of all processes."""
        for path in sorted((self.run_dir / "trace").glob("*.jsonl")):
            for record in local_run.objects(path):
                if record["what"] == "report" and record["kind"] == kind:
                    yield record["fields"]


Expectation = Callable[[Played], str]


def clear(folder: Path, overwrites: bool) -> None:
    """Make the folder of a trial, without what an earlier one left there if that may go."""
    if folder.exists() and any(folder.iterdir()):
        if not overwrites or not (folder / FIRST_LOG).exists():
            raise BadInput(
                f"--run_dir: {folder} is not empty, expected a new one, or --overwrite for an earlier trial's"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def play(trial: Trial, folder: Path, rng: random.Random) -> Played:
    """Play a trial once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    played = Played(trial, folder)
    fleet = HostFleet(played, rng) if trial.n_hosts else Fleet(played, rng)
    streams = Scripts(fleet.has_come)
    for stream in [*trial.disturbances, *([in_turn] if trial.kinds else []), *([watch] if trial.watched else [])]:
        streams.go(stream(fleet))
    fleet.launch()
    try:
        fleet.wait_for_rows(trial.begins, BEGINS_S)
        fleet.begin()
        _disturb(fleet, streams)
        played.code = fleet.conclude(BEGINS_S if trial.seconds else TIMEOUT_S)
    finally:
        fleet.end()
    happened = Counter(what for _, what, _ in played.events)
    played.figures = {"steps": len(played.rows_s)} | dict(happened) | played.figures
    return played


def _disturb(fleet: Fleet, streams: Scripts) -> None:
    """Let all happen in time, until the time is over, all steps are done, or the run has ended."""
    played, trial = fleet.played, fleet.trial
    idle_before_s, before_s = counts.idle_s(), 0.0
    while True:
        now_s = fleet.now_s
        played.held_up_s = max(played.held_up_s, now_s - before_s - POLL_S)
        before_s = now_s
        fleet.poll()
        is_over = fleet.has_come(trial.seconds) if trial.seconds else 0 < trial.steps <= len(fleet.rows_s)
        streams.run()
        fleet.scripts.run()
        if trial.seconds and not is_over:
            fleet.check()
        if is_over or fleet.has_ended():
            break
        until_s = min(now_s + POLL_S, streams.next_s, trial.seconds or math.inf)
        time.sleep(max(0.0, played.began_s + until_s - time.monotonic()))
    played.seconds, played.rows_s = fleet.now_s, fleet.rows_s.copy()
    played.cores_busy = len(allowed_cpus()) - (counts.idle_s() - idle_before_s) / max(played.seconds, 1e-9)


def in_turn(fleet: Fleet) -> Script:
    """Each kind of the trial once, in a drawn order, and then one drawn again and again. In six cases of ten the fleet
    recovers in between."""
    rng, kinds = fleet.rng, fleet.trial.kinds
    counted = fleet.played.figures.setdefault("failures", {})
    first = rng.sample(sorted(kinds), len(kinds))
    yield 0.0
    while True:
        kind, n_before = first.pop(0) if first else rng.choice(sorted(kinds)), len(fleet.played.events)
        fleet.scripts.go(kinds[kind](fleet))
        if len(fleet.played.events) == n_before:  # it does not fit now
            first += [kind] if kind not in counted else []
            yield fleet.now_s + POLL_S
            continue
        counted[kind] = counted.get(kind, 0) + 1
        pause_s, patience_s = rng.uniform(*PAUSE_S), RECOVERED_S if rng.random() < 0.6 else rng.uniform(*HURRY_S)
        next_s, until_s = fleet.now_s + pause_s, fleet.now_s + patience_s
        yield lambda until_s=until_s: fleet.has_recovered() or fleet.now_s > until_s
        yield next_s


def watch(fleet: Fleet) -> Script:
    """Sample the watched processes all the time."""
    samples = fleet.played.samples
    yield 0.0
    while True:
        for name in fleet.trial.watched:
            if sample := fleet.sample(name):
                samples.setdefault(name, []).append(sample)
        yield fleet.now_s + SAMPLE_S


# -------------------------------------------------------------------------------------------------------- expectations


def goes_on(seconds: float, rows: float, watched: int = 10) -> Expectation:
    """None of the next rows after a loss comes later after the one before than `seconds`, or `rows` times the longest
    row before."""

    def expect(played: Played) -> str:
        lost_s = next(at_s for at_s, what, _ in played.events if what == "leave")
        after = [lost_s, *(at_s for at_s in played.rows_s if at_s > lost_s)][: watched + 1]
        gap_s = max((b - a for a, b in itertools.pairwise(after)), default=0.0)
        before = local_run.metrics(played.run_dir)[: sum(at_s <= lost_s for at_s in played.rows_s)]
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
        difference, n_compared, n_steps = loss_difference(played, first)
        played.figures |= {"loss_difference": difference, "steps_compared": n_compared}
        if n_compared < n_steps:
            return f"{n_steps} steps to compare, alone {n_compared}"
        return "" if difference <= most else f"losses differ by {difference:.1e}, expected at most {most:.0e}"

    return expect


def loss_difference(played: Played, first: int = 0) -> tuple[float, int, int]:
    """(the largest relative difference to one process's losses, of how many steps, of how many that were to be
    compared). `first`: so many steps, 0 for all."""
    losses = local_run.losses(played.run_dir)
    losses = losses[: first or len(losses)]
    alone = local_run.losses(played.alone(len(losses)))
    difference = max((abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=False)), default=math.inf)
    return difference, min(len(losses), len(alone)), len(losses)


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
    problems = [*played.problems, *(expect(played) for expect in trial.expected)]
    return played.figures, [problem for problem in problems if problem]
