"""Fleets of real processes that a trial disturbs, and the scripts of what happens to them.

`Fleet` is a run of launch.py: its children share a folder, and it starts the coordinator again. `HostFleet` is a run
without a common disk: each process has a folder of its own, as on a host of its own. This process starts them, starts
those again that have ended by themselves, as a host's supervisor does, and looks at each exit code.
"""

import contextlib
import itertools
import json
import math
import os
import random
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import leak_check
from churn_comparison.results import is_alone
from rollback_proof import JOINS, Life

from jaxdt.cli import local_run
from jaxdt.run import network as networks
from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import ADDRESS
from jaxdt.runtime.run_dir import token_flag

if TYPE_CHECKING:
    from processes import Played

POLL_S = 0.05
READY = " is ready on "  # in the log of a worker that can compute
STALLED_S = 150.0  # a fleet of hosts without a step for so long is over
RECOVERED_S = 120.0  # all its peers are back within it
ENDS_S = 90.0  # within it a process ends that is refused, that leaves the run, or that asks as an operator
STOPS_S = 60.0
PORTS = range(7800, 32000)
REFUSED, KILLED = 2, -signal.SIGKILL

When = float | Callable[[], bool]
Script = Generator[When, None, None]


class Scripts:
    """Scripts that run in turn: generators that yield until when they wait. That is a moment, in seconds after the
    beginning, or what has to become true."""

    def __init__(self, has_come: Callable[[float], bool]):
        self._has_come = has_come
        self._waiting: list[tuple[When, Script]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def next_s(self) -> float:
        return min((when for when, _ in self._waiting if not callable(when)), default=math.inf)

    def go(self, script: Script) -> None:
        """Run a script up to where it waits."""
        self._waiting += [(when, script) for when in itertools.islice(script, 1)]

    def run(self) -> None:
        """Run what waits no longer, the earliest moment first."""
        due = [entry for entry in self._waiting if self._is_due(entry[0])]
        for entry in sorted(due, key=lambda entry: math.inf if callable(entry[0]) else entry[0]):
            self._waiting.remove(entry)
            self.go(entry[1])

    def _is_due(self, when: When) -> bool:
        return when() if callable(when) else self._has_come(when)

    def finish(self) -> None:
        """Let nothing wait any longer."""
        while self._waiting:
            for _ in self._waiting.pop(0)[1]:
                pass


class Fleet:
    """The processes of a run of launch.py: its children, and those that have been started since, by name. What happens
    is added to `played`. `scripts`: what has begun to happen and is not over."""

    launcher: subprocess.Popen

    def __init__(self, played: "Played", rng: random.Random):
        self.played, self.trial, self.run_dir, self.rng = played, played.trial, played.run_dir, rng
        self.scripts, self.logs = Scripts(self.has_come), played.log
        self.begin()
        self.started: dict[str, subprocess.Popen] = {}
        self.busy: set[str] = set()  # what happens to them is not over
        self._killed: set[int] = set()  # ids of peers

    def launch(self) -> None:
        """Start its processes."""
        self.launcher = local_run.start(self.played.log, "launch.py", self._words())

    def _words(self) -> list[str]:
        return [*self._config(), f"--run_dir={self.run_dir}", "--report=false", *self._slow()]

    def _slow(self) -> list[str]:
        return [f"--emulate_forward_s={self.trial.forward_s}"] if self.trial.forward_s else []

    def _config(self) -> list[str]:
        words = [*self.trial.flags]
        if self.trial.steps or self.trial.seconds:
            words.append(f"--config.train.steps={self.trial.steps or 100_000_000}")
        if self.trial.latency_s is not None:
            path = self.played.folder.with_suffix(".network.json")
            path.write_text(json.dumps(networks.to_json(networks.uniform(64, self.trial.latency_s, 1.0))))
            words.append(f"--emulate={path}")
        return words

    # ----------------------------------------------------------------------------------------------- the run as a whole

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.played.began_s

    def has_come(self, at_s: float) -> bool:
        return time.monotonic() >= self.played.began_s + at_s

    def happened(self, what: str, whom: str, more: str = "") -> None:
        self.played.events.append((self.now_s, what, whom))
        self.say(f"{what} {whom}{more}")

    def begin(self) -> None:
        """From now on seconds are counted, and something may happen."""
        self.played.began_s = time.monotonic()
        self.rows_s: list[float] = []

    def say(self, text: str) -> None:
        print(f"{self.now_s:6.1f} s, {len(self.rows_s)} steps: {text}", flush=True)

    @property
    def n_rows(self) -> int:
        return len(local_run.metrics(self.run_dir))

    def poll(self) -> None:
        """See what has happened meanwhile."""
        self.rows_s += [self.now_s] * (self.n_rows - len(self.rows_s))

    def has_ended(self) -> bool:
        return self.launcher.poll() is not None

    def check(self) -> None:
        if self.has_ended():
            code = self.launcher.returncode
            raise BadInput(f"{self.run_dir}: the run ended with code {code}; see {self.logs}")

    def wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Whether something becomes so in time, and before the run ends."""
        until_s = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > until_s or self.has_ended():
                return False
            self.poll()
            self.scripts.run()
            time.sleep(POLL_S)
        return True

    def wait_for_rows(self, n: int, seconds: float) -> None:
        if not self.wait(lambda: self.n_rows >= n, seconds):
            self.check()
            raise BadInput(f"{self.run_dir}: {n} steps were not done in time; see {self.logs}")

    def has_recovered(self) -> bool:
        """Whether all that has happened is over."""
        return not self.scripts

    def conclude(self, timeout_s: float) -> int | None:
        """Let a run end by itself, and return its code. One that the clock ends does its current step, which counts in
        part."""
        if self.trial.seconds:
            self.wait_for_rows(self.n_rows + 1, timeout_s)
            return None
        self.scripts.finish()
        return self.launcher.wait(timeout=timeout_s)

    def end(self) -> None:
        self.scripts.finish()
        local_run.end(self.launcher, self.started.values())

    # ---------------------------------------------------------------------------------------------------- its processes

    def pids(self) -> dict[str, int]:
        """Process ids by name: coordinator, peer 3, newcomer 0. Whoever is gone is not among them."""
        started = {name: process.pid for name, process in self.started.items() if process.poll() is None}
        return local_run.children(self.launcher.pid) | started

    def victim(self, who: str, spared: Collection[str] = ()) -> str:
        """The name of whom a disturbance meets; '' if there is nobody now."""
        pids = self.pids()
        named = [who] if who in pids or " " in who else self._of_kind(who, [*pids])
        candidates = sorted({*named} - {*spared} - self.busy)
        victim = self.rng.choice(candidates) if candidates else ""
        if victim and victim not in pids:
            raise BadInput(f"{self.run_dir}: {victim} has ended before it was to leave; see its log")
        return victim

    def _of_kind(self, kind: str, names: list[str]) -> list[str]:
        """Which of these are of a kind."""
        match kind:
            case "coordinator":
                return [name for name in names if name == kind]
            case "peer":
                return [name for name in names if name != "coordinator"]
        workers = {f"peer {peer}" for peer in local_run.workers(self.launcher.pid)}
        if kind == "server":
            return [name for name in names if name.startswith("peer") and name not in {*workers, *self.started}]
        own = [name for name in names if name in workers or name in self.started]
        return [name for name in own if READY in self._log(name).read_text()]

    def _log(self, name: str) -> Path:
        if name in self.started or name.startswith("newcomer"):
            return self._log_of_started(name)
        return self.run_dir / "logs" / f"{name.replace(' ', '_')}.log"

    def _log_of_started(self, name: str) -> Path:
        return self.run_dir.with_name(f"{self.run_dir.name}_{name.replace(' ', '_')}.log")

    def _peer_of(self, name: str) -> int | None:
        """The id by which the run knows a process; None if it has none yet."""
        if name.startswith("peer "):
            return int(name.removeprefix("peer "))
        found = JOINS.search(self._log(name).read_text()) if name.startswith("newcomer ") else None
        return int(found[1]) if found else None

    def is_alone(self, name: str) -> bool:
        """Whether no other peer of its stage has the state and was not killed."""
        peer = self._peer_of(name)
        return peer is not None and is_alone(self.played.records(), peer, self._killed)

    def join(self) -> str:
        """Start a newcomer. Returns its name."""
        return self._start(None)

    def _start(self, worker: str | None) -> str:
        """Start a newcomer; or a worker: the one of this id, for '' a new one. Returns its name."""
        name = f"peer {worker}" if worker else f"newcomer {sum(n.startswith('newcomer') for n in self.started)}"
        log = self._log_of_started(name)
        if worker is None:
            self.started[name] = local_run.join(self.run_dir, log, self._slow())
        else:
            self.started[name] = local_run.worker(self.run_dir, log, worker, self._slow())
        return name

    def leaves(self, name: str, by: int, back_s: float | None) -> Script:
        """A process gets a signal and ends. After back_s it comes back, a worker as often as a new one in its place."""
        os.kill(self.pids()[name], by)
        if (peer := self._peer_of(name)) is not None:
            self._killed.add(peer)
        self.happened("leave", name)
        if back_s is not None:
            self.started.pop(name, None)
            worker = self.rng.choice((name.removeprefix("peer ") if name.startswith("peer") else "", ""))
            yield self.now_s + back_s
            self.happened("back", self._start(worker))

    def pauses(self, name: str, seconds: float) -> Script:
        """A process is stopped, and goes on after so long."""
        pid = self.pids()[name]
        self.happened("pause", name, f", for {seconds:.1f} s")
        os.kill(pid, signal.SIGSTOP)
        self.busy.add(name)
        yield self.now_s + seconds
        self.busy.discard(name)
        with contextlib.suppress(ProcessLookupError):  # its launcher may have ended it meanwhile
            os.kill(pid, signal.SIGCONT)

    def sample(self, name: str) -> leak_check.Sample | None:
        """A sample of a process; None if it is gone."""
        pid = self.pids().get(name, 0)
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            n_fds = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return None
        if "VmRSS" not in status:
            return None
        n_members = len(json.loads((self.run_dir / "coordinator" / "view.json").read_bytes())["value"]["members"])
        return self.now_s, 1024 * int(status["VmRSS"].split()[0]), n_fds, int(status["Threads"]), n_members


# ------------------------------------------------------------------------------------------------ without a common disk


class Lines:
    """The complete lines that a file gets."""

    def __init__(self, path: Path):
        self._path, self._read_bytes = path, 0

    def new(self) -> list[str]:
        """Those since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        self._read_bytes += len(content)
        return content.decode(errors="replace").splitlines()


@dataclass
class Process:
    """One process. `expected`: exit codes that are no surprise now. `life`: what is known of it if it is a peer's.
    `is_watched`: until its end has been seen."""

    log: Path
    popen: subprocess.Popen
    life: Life
    expected: set[int] = field(default_factory=set)
    is_watched: bool = True

    def __post_init__(self) -> None:
        self.lines = Lines(self.log)

    @property
    def runs(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        self.expected.add(KILLED)
        self.popen.kill()
        self.popen.wait()
        self.ends()

    def ends(self) -> None:
        """It ends now, or is taken for dead, unless it was before."""
        self.life.ended_s = min(self.life.ended_s, time.monotonic())

    def fill_disk(self, is_full: bool) -> None:
        """Let every write to a file fail, or none."""
        if self.runs:
            limit = 0 if is_full else resource.RLIM_INFINITY
            resource.prlimit(self.popen.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    def last_line(self) -> str:
        return (self.log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]


@dataclass
class Host:
    """A command, and the processes that it has had. `peer`: None for the coordinator, and for a newcomer that has no
    id yet."""

    name: str
    words: list[str]
    logs: Path
    peer: int | None = None
    processes: list[Process] = field(default_factory=list)

    @property
    def process(self) -> Process:
        return self.processes[-1]

    @property
    def runs(self) -> bool:
        return bool(self.processes) and self.process.runs

    def spawn(self, *more_words: str) -> Process:
        """Start the command, as a process beside those of this host."""
        log = self.logs / f"{self.name}.{time.monotonic_ns()}.log"
        script, *words = self.words
        popen = local_run.start(log, script, [*words, *more_words], local_run.of_one_thread())
        return Process(log, popen, Life(self.peer))

    def start(self, *more_words: str) -> None:
        self.processes.append(self.spawn(*more_words))

    def __str__(self) -> str:
        return self.name if self.peer is None else f"{self.name} (peer {self.peer})"


class HostFleet(Fleet):
    """A run of which each process has a folder of its own."""

    def __init__(self, played: "Played", rng: random.Random):
        super().__init__(played, rng)
        super().launch()  # writes the job of the hosts
        if self.launcher.wait():
            raise BadInput(f"launch.py: ended with code {self.launcher.returncode}, {played.log} says why")
        self.job, self.logs = played.folder, played.folder / "logs"
        self.logs.mkdir()
        self.coordinator = self._host("coordinator", "coordinate.py", self.run_dir)
        peers = range(self.trial.n_hosts)
        self.hosts = [self._host(f"host_{n}", "train.py", self.job / f"host_{n}", n) for n in peers]
        self.retired: list[Host] = []
        self._members: dict[int, int] = {}
        self._joining: set[int] = set()
        self._reports = Lines(self.run_dir / "trace" / "coordinator.jsonl")

    def launch(self) -> None:
        for host in [self.coordinator, *self.hosts]:
            host.start()

    def _words(self) -> list[str]:
        n = self.trial.n_hosts
        hosts = ",".join(["127.0.0.1"] * n)
        return [*self._config(), f"--emit={self.played.folder}", f"--hosts={hosts}", f"--port={free_port(n + 1)}"]

    def _host(self, name: str, script: str, folder: Path, peer: int | None = None) -> Host:
        words = [script, f"--flagfile={self.job / name}.flags", f"--run_dir={folder}"]
        return Host(name, words + (self._slow() if peer is not None else []), self.logs, peer)

    @property
    def address(self) -> str:
        """The coordinator's."""
        return (self.job / ADDRESS).read_text()

    def newcomer(self) -> Host:
        """The host of a newcomer, with a token and an empty folder."""
        name = f"newcomer_{len(self.retired) + len(self.hosts)}"
        words = ["train.py", f"--join={self.address}", token_flag(self.job, name), f"--run_dir={self.job / name}"]
        self.hosts.append(Host(name, [*words, *self._slow()], self.logs))
        return self.hosts[-1]

    def retire(self, host: Host) -> None:
        host.process.kill()
        self.busy.discard(host.name)
        self.hosts.remove(host)
        self.retired.append(host)

    def problem(self, text: str) -> None:
        self.played.problems.append(text)
        self.say(f"BAD: {text}")

    # ----------------------------------------------------------------------------------------------- the run as a whole

    def poll(self) -> None:
        """Read what has been reported, see who has ended, and start those again to whom nothing was to happen."""
        super().poll()
        for record in map(json.loads, self._reports.new()):
            if record["what"] == "report":
                self._note(record["kind"], record["fields"])
        for host in [self.coordinator, *self.hosts, *self.retired]:
            for process in host.processes:
                if process.is_watched:
                    self._watch(process)
                host.peer = process.life.peer
        for host in [self.coordinator, *self.hosts]:
            if host.processes and not host.runs and host.name not in self.busy:
                host.start()

    def _watch(self, process: Process) -> None:
        code = process.popen.poll()
        for line in process.lines.new():
            process.life.note(line, time.monotonic())
        if code is None:
            return
        process.is_watched = False
        process.ends()
        if code not in process.expected:
            self.problem(f"{process.log.name}: ended with code {code}: {process.last_line()}")

    def _note(self, kind: str, report: dict) -> None:
        match kind:
            case "step":
                self._joining = set()  # all members take part in a step
            case "view":
                self._members = {int(peer): stage for peer, stage in report["members"].items()}
                self._joining = set(report["joining"])
            case "rollback" | "vacant" | "no_holder" | "failed" | "overdue" | "repair" | "unequal_bits":
                self.say(f"coordinator: {kind} {report}")
            case "lost":
                self.say(f"coordinator: {report['reason']}")

    def is_stalled(self) -> bool:
        """Whether no step has come for long, after those with which the run begins."""
        return bool(self.rows_s) and self.now_s - self.rows_s[-1] > STALLED_S

    def has_ended(self) -> bool:
        """Whether the run does not continue, or a process has failed before it began."""
        return self.is_stalled() or (not self.rows_s and bool(self.played.problems))

    def check(self) -> None:
        if self.is_stalled():
            self.problem(f"no step for {STALLED_S:.0f} s; see {self.logs}")

    def is_whole(self) -> bool:
        """Whether all hosts are in the run, and nothing happens to any of them."""
        return not self.busy and self.coordinator.runs and all(map(self.is_member, self.hosts))

    def has_recovered(self) -> bool:
        return super().has_recovered() and self.is_whole()

    def conclude(self, timeout_s: float) -> int:
        """End the run as an operator does. All processes end with code 0."""
        self.say("no more disturbances")
        if not self.wait(self.has_recovered, RECOVERED_S):
            self.problem(f"not all peers are back after {RECOVERED_S:.0f} s")
        hosts = [self.coordinator, *self.hosts]
        self.busy |= {host.name for host in hosts}
        for host in hosts:
            host.process.expected.add(0)
        stop = self.ask("stop")
        self.wait(lambda: not stop.runs and not any(host.runs for host in hosts), STOPS_S)
        self.poll()
        if stop.popen.poll() != 0:
            self.problem(f"fleet.py stop: code {stop.popen.poll()}, {stop.last_line()}")
        for host in hosts:
            if host.runs:
                self.problem(f"{host}: still runs {STOPS_S:.0f} s after the end, its log is {host.process.log}")
        return 0

    def end(self) -> None:
        self.scripts.finish()
        for host in [self.coordinator, *self.hosts, *self.retired]:
            self.played.lives += [process.life for process in host.processes]
            for process in host.processes:
                process.popen.kill()
                process.popen.wait()

    # ------------------------------------------------------------------------------------------------------- its hosts

    def stage_of(self, host: Host) -> int | None:
        return None if host.peer is None else self._members.get(host.peer)

    def of_stage(self, stage: int | None) -> list[Host]:
        return [host for host in self.hosts if self.stage_of(host) == stage]

    def is_member(self, host: Host) -> bool:
        """Whether a host's newest process is in the run."""
        is_admitted = self.stage_of(host) is not None and host.peer not in self._joining
        return host.runs and is_admitted and bool(host.process.life.views)

    def pids(self) -> dict[str, int]:
        return {host.name: host.process.popen.pid for host in [self.coordinator, *self.hosts] if host.runs}

    def _of_kind(self, kind: str, names: list[str]) -> list[str]:
        return [name for name in names if name == kind or (kind == "peer" and self.host(name).peer is not None)]

    def host(self, name: str) -> Host:
        return next(host for host in [self.coordinator, *self.hosts] if host.name == name)

    def join(self) -> str:
        host = self.newcomer()
        host.start()
        return host.name

    def start_again(self, host: Host) -> None:
        self.busy.discard(host.name)
        host.start()

    def leaves(self, name: str, by: int, back_s: float | None, codes: Collection[int] = (0,)) -> Script:
        """A process gets a signal, but for 0, and ends with one of these codes. After back_s its command is started
        again; without it the host is gone for good."""
        host = self.host(name)
        self.happened("leave", f"{host}", "" if back_s is None else f", again after {back_s:.1f} s")
        self.busy.add(name)
        if by == signal.SIGKILL:
            host.process.kill()
        else:
            host.process.expected |= {*codes}
            host.process.popen.send_signal(by)
            yield from self.ends(host.process, codes)
        if back_s is None:
            return self.retire(host)
        yield self.now_s + back_s
        self.start_again(host)

    def within(self, seconds: float, is_so: Callable[[], bool]) -> Generator[When, None, bool]:
        """Wait until something is so. Returns whether it is so in time."""
        until_s = self.now_s + seconds
        yield lambda: is_so() or self.now_s > until_s
        return is_so()

    def ends(self, process: Process, codes: Collection[int]) -> Script:
        """Wait for a process that has to end soon, with one of these codes."""
        if not (yield from self.within(ENDS_S, lambda: not process.runs)):
            process.kill()
            self.problem(f"{process.log}: its process did not end within {ENDS_S:.0f} s")
        elif (code := process.popen.returncode) not in codes:
            self.problem(f"{process.log.name}: code {code}, expected {sorted(codes)}: {process.last_line()}")

    def ask(self, command: str, *words: str) -> Process:
        """Start fleet.py for one request of an operator."""
        log = self.logs / f"operator_{command}.{time.monotonic_ns()}.log"
        popen = local_run.start(log, "fleet.py", [command, *words, f"--run_dir={self.job}"])
        return Process(log, popen, Life(None))


def free_port(n: int) -> int:
    """The first of n ports in a row at which nothing listens."""
    starts = PORTS[:: n + 1]
    return next(first for first in starts if all(_is_free(port) for port in range(first, first + n)))


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) != 0
