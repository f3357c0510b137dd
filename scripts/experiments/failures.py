"""Failures of all kinds in a fleet of real processes without a common disk, for as long as one likes.

    python scripts/experiments/failures.py --run_dir=runs/failures [--minutes=30] [--seed=0] [--wiring=swarm|fixed]
        [--kind=kill --kind=pause] [--overwrite]

A small model is trained by a coordinator and six peers in two stages, each with a folder of its own. Each kind of
failure comes once, in an order drawn from the seed, and then again and again at random moments; some begin before the
fleet has recovered from the one before. At the end all peers are started again and the operator's `stop` ends the run.
Afterwards one process does all steps alone. Prints a line for each event, and one JSON object, which
RUN_DIR/failures.json keeps: how often each kind came, what the run lost in rollbacks, and `bad`, the list of all that
must not happen:

  a loss differs by more than 1e-5 from that of one process. Two sums of the same float32 numbers in another order
  differ by 1e-7. The optimizer is SGD with clipped gradients, since AdamW divides a tiny gradient by its own size and
  so doubles such a difference every twenty steps: an undisturbed fleet of this model differed from one process by 2e-5
  after 150 steps with AdamW, and by 1e-7 after 300 steps with SGD
  a rollback that a living process would have made needless (rollback_proof.py), or of which that cannot be told
  a process that ends by itself, or with another exit code than was expected
  a second process of a peer, or a second coordinator, that is not refused
  no committed step for 150 s

The kinds:

  kill                kill -9 of a peer, which is started again
  pause               SIGSTOP of a peer for up to 12 s
  pause_last          kill -9 of all replicas of a stage but one, which is paused until the others wait to join
  pause_stage         SIGSTOP of all replicas of a stage
  kill_coordinator    kill -9 of the coordinator, which is started again
  pause_coordinator   SIGSTOP of the coordinator
  second_peer         the command of a running peer is started once more
  second_coordinator  the same of the coordinator
  replaced            a peer is paused, its command started again, and the first process goes on when the second is in
  full_disk           a peer cannot write any file for 20 to 60 s
  lost_stage          kill -9 of all replicas of a stage, for good; newcomers with empty folders fill it
  drain               SIGTERM of a peer, which is started again
  operator            fleet.py status, pause and resume, drain, checkpoint, evict, one after another
"""

import heapq
import itertools
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import rollback_proof
from absl import flags
from processes import clear

from jaxdt.cli import environment, local_run, script_main
from jaxdt.protocol import trace
from jaxdt.run.errors import BadInput
from jaxdt.runtime import run_dir as run_dirs
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT

ALL_KINDS = (
    "kill",
    "pause",
    "pause_last",
    "pause_stage",
    "kill_coordinator",
    "pause_coordinator",
    "second_peer",
    "second_coordinator",
    "replaced",
    "full_disk",
    "lost_stage",
    "drain",
    "operator",
)

RUN_DIR = flags.DEFINE_string("run_dir", None, "Folder for the run; the folders of all processes lie in it.")
MINUTES = flags.DEFINE_float("minutes", 30.0, "Duration of the failures.", 0.5)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the failures.")
WIRING = flags.DEFINE_enum("wiring", "swarm", ["swarm", "fixed"], "wiring.kind of the run.")
KINDS = flags.DEFINE_multi_enum("kind", ALL_KINDS, ALL_KINDS, "A kind of failure, by default all; may be repeated.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Delete the files of an earlier run in run_dir.")
PORT = flags.DEFINE_integer("port", 7800, "Port of the coordinator; the peers get the next ones.")

N_STAGES, N_PIPELINES = 2, 3
FIELDS = {
    "model": dict(n_layers=2, d_model=32, n_heads=2, d_ff=64, max_len=16, tied_head=True),
    "plan": dict(stages=N_STAGES, pipelines=N_PIPELINES, microbatches=2 * N_PIPELINES),
    "train": dict(steps=1_000_000, microbatch_size=2, checkpoint_every_steps=5),
    "optim": dict(name="sgd", lr=0.1, clip_norm=1.0),
    "sync": dict(slice_bytes=4096, check_every_steps=10),
}
FORWARD_S = 0.15  # emulated, so that failures meet Work of all kinds, and 300 steps last for most of the run
DIFFERENCE_MAX, FIRST_COMPARED = 1e-5, 300
STALLED_S = 150.0
RECOVERED_S = 120.0  # the next failure waits no longer for a whole fleet
ENDS_S = 90.0  # within it a second process is refused, an operator answered, and a peer leaves the run
BEGUN_S = 180.0
END_S = 60.0
POLL_S = 0.1
FIRST_STEPS = 3  # before the first failure
OPERATOR_COMMANDS = ("status", "pause", "drain", "checkpoint", "evict")
REFUSED, LEFT, PUT_OUT, KILLED = 2, 0, 3, -signal.SIGKILL


@dataclass
class Process:
    """One process. `expected`: exit codes that are no surprise now. `life`: what is known of it if it is a peer's."""

    name: str
    log: Path
    popen: subprocess.Popen
    life: rollback_proof.Life
    expected: set[int] = field(default_factory=set)
    read_bytes: int = 0  # of its log
    is_watched: bool = True  # until its end has been seen
    is_paused: bool = False

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

    def read_log(self) -> None:
        """Take in what has been written since the last time."""
        lines, self.read_bytes = new_lines(self.log, self.read_bytes)
        for line in lines:
            self.life.note(line, time.monotonic())

    def pause(self) -> None:
        self.popen.send_signal(signal.SIGSTOP)
        self.is_paused = True

    def go_on(self) -> None:
        self.popen.send_signal(signal.SIGCONT)
        self.is_paused = False

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
    id yet. `is_busy`: a failure of this host is not over."""

    name: str
    words: list[str]
    folder: Path
    logs: Path
    peer: int | None = None
    processes: list[Process] = field(default_factory=list)
    is_busy: bool = False

    @property
    def process(self) -> Process:
        return self.processes[-1]

    def spawn(self, *more_words: str) -> Process:
        """Start the command, as a process beside those of this host."""
        log = self.logs / f"{self.name}.{time.monotonic_ns()}.log"
        one_thread = f"{os.environ.get('XLA_FLAGS', '')} {local_run.ONE_THREAD}".strip()
        variables = os.environ | MALLOC_ENVIRONMENT | {"XLA_FLAGS": one_thread, "PYTHONUNBUFFERED": "1"}
        script, *words = [*self.words, f"--run_dir={self.folder}", *more_words]
        popen = local_run.start(log, script, words, variables)
        return Process(self.name, log, popen, rollback_proof.Life(self.peer))

    def start(self, *more_words: str) -> None:
        self.processes.append(self.spawn(*more_words))

    def __str__(self) -> str:
        return self.name if self.peer is None else f"{self.name} (peer {self.peer})"


class Fleet:
    """All hosts, what the coordinator has reported, and the problems so far."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.logs = folder / "logs"
        self.problems: list[str] = []
        self.problem_logs: dict[str, str] = {}
        self.members: dict[int, int] = {}
        self.joining: set[int] = set()
        self.records: list[dict] = []
        self.stepped_s = self._began_s = time.monotonic()
        self.longest_wait_s = 0.0
        self.retired: list[Host] = []
        self._trace = folder / "coordinator" / "trace" / "coordinator.jsonl"
        self._read_bytes = 0
        self.logs.mkdir(parents=True)
        config = folder / "config.py"
        local_run.write_config(config, FIELDS | {"wiring": dict(kind=WIRING.value)})
        n_peers = N_STAGES * N_PIPELINES
        words = [f"--config={config}", f"--emit={folder / 'job'}", f"--hosts={','.join(['127.0.0.1'] * n_peers)}"]
        run_script("launch.py", *words, f"--port={PORT.value}")
        self.address = f"127.0.0.1:{PORT.value}"
        self.coordinator = self._host("coordinator", "coordinate.py")
        self.hosts = [self._host(f"host_{peer}", "train.py", peer) for peer in range(n_peers)]

    def _host(self, name: str, script: str, peer: int | None = None) -> Host:
        words = [script, f"--flagfile={self.folder / 'job' / name}.flags"]
        words += [f"--emulate_forward_s={FORWARD_S}"] if peer is not None else []
        return Host(name, words, self.folder / name, self.logs, peer)

    def newcomer(self) -> Host:
        """The host of a newcomer, with a token and an empty folder."""
        name = f"newcomer_{len(self.retired) + len(self.hosts)}"
        token = run_dirs.token_flag(self.folder / "job", name)
        words = ["train.py", f"--join={self.address}", token, f"--emulate_forward_s={FORWARD_S}"]
        self.hosts.append(Host(name, words, self.folder / name, self.logs))
        return self.hosts[-1]

    def retire(self, host: Host) -> None:
        self.hosts.remove(host)
        self.retired.append(host)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_s:7.1f} s, {self.n_steps:4} steps: {text}", flush=True)

    def problem(self, text: str) -> None:
        self.problems.append(text)
        self.say(f"BAD: {text}")

    @property
    def n_steps(self) -> int:
        step = next((r["fields"]["step"] for r in reversed(self.records) if r["kind"] == "step"), -1)
        return step + 1

    def stage_of(self, host: Host) -> int | None:
        return None if host.peer is None else self.members.get(host.peer)

    def of_stage(self, stage: int) -> list[Host]:
        return [host for host in self.hosts if self.stage_of(host) == stage]

    def is_member(self, host: Host) -> bool:
        """Whether a host's newest process is in the run."""
        if not host.processes or not host.process.runs or host.process.is_paused or self.stage_of(host) is None:
            return False
        return bool(host.process.life.views) and host.peer not in self.joining

    def is_whole(self) -> bool:
        runs = self.coordinator.process.runs and not self.coordinator.process.is_paused
        return runs and all(self.is_member(host) for host in self.hosts)

    def poll(self) -> None:
        """Read what the coordinator has reported, and see who has ended."""
        self._read_trace()
        for host in [self.coordinator, *self.hosts, *self.retired]:
            for process in host.processes:
                if process.is_watched:
                    process.read_log()
                    self._watch(process)
                host.peer = process.life.peer

    def _watch(self, process: Process) -> None:
        code = process.popen.poll()
        if code is None:
            return
        process.is_watched = False
        process.ends()
        if code not in process.expected:
            self.problem(f"{process.name}: ended with code {code}, in its log: {process.last_line()}")

    def _read_trace(self) -> None:
        if not self._trace.exists():
            return
        lines, self._read_bytes = new_lines(self._trace, self._read_bytes)
        for record in trace.read(lines, str(self._trace)):
            if record["what"] == "report":
                self.records.append(record)
                self._note(record["kind"], record["fields"])

    def _note(self, kind: str, report: dict) -> None:
        match kind:
            case "step":
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - self.stepped_s)
                self.stepped_s = time.monotonic()
                self.joining = set()  # all members take part in a step
            case "view":
                self.members = {int(peer): stage for peer, stage in report["members"].items()}
                self.joining = set(report["joining"])
                if not self.n_steps:
                    self.stepped_s = time.monotonic()
            case "rollback" | "vacant" | "no_holder" | "failed" | "overdue" | "repair" | "unequal_bits":
                self.say(f"coordinator: {kind} {report}")
            case "lost":
                self.say(f"coordinator: {report['reason']}")

    def kill_all(self) -> None:
        for host in [self.coordinator, *self.hosts, *self.retired]:
            for process in host.processes:
                if process.runs:
                    process.kill()


def new_lines(path: Path, read_bytes: int) -> tuple[list[str], int]:
    """The whole lines of a file after its first read_bytes, and where they end."""
    with path.open("rb") as file:
        file.seek(read_bytes)
        content = file.read()
    content = content[: content.rfind(b"\n") + 1]
    return content.decode(errors="replace").splitlines(), read_bytes + len(content)


class Failures:
    """Draws failures, and what follows each of them later. A method for each kind says in a line what it does; a kind
    that does not fit now returns None."""

    def __init__(self, fleet: Fleet, rng: random.Random):
        self._fleet = fleet
        self._rng = rng
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._commands = itertools.cycle(OPERATOR_COMMANDS)
        self._awaited: list[tuple[Callable[[], bool], float, Callable[[bool], None]]] = []
        self.counts: Counter[str] = Counter()

    @property
    def pending(self) -> bool:
        """Whether some failure is not over."""
        return bool(self._due or self._awaited)

    def begin(self, kind: str) -> bool:
        """Let one kind of failure happen, if it fits now."""
        line = getattr(self, kind)()
        if line:
            self.counts[kind] += 1
            self._fleet.say(f"{kind}: {line}")
        return bool(line)

    def follow_up(self) -> None:
        """Do what is due now."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        for awaited in list(self._awaited):
            has_happened, until_s, then = awaited
            if (happened := has_happened()) or time.monotonic() > until_s:
                self._awaited.remove(awaited)
                then(happened)

    # ------------------------------------------------------------------------------------------------ what peers meet

    def kill(self) -> str | None:
        if not (host := self._any()):
            return None
        return f"{host}, again after {self._kill(host, 0.0, 8.0):.1f} s"

    def pause(self) -> str | None:
        if not (host := self._any()):
            return None
        return f"{host} for {self._pause(host, 0.5, 12.0):.1f} s"

    def pause_last(self) -> str | None:
        stage = self._rng.randrange(N_STAGES)
        if not (hosts := self._whole_stage(stage)):
            return None
        last = self._rng.choice(hosts)
        for host in hosts:
            if host is not last:
                self._kill(host, 0.5, 3.0)
        return f"{last}, of stage {stage}, for {self._pause(last, 8.0, 20.0):.1f} s, while the others are killed"

    def pause_stage(self) -> str | None:
        stage = self._rng.randrange(N_STAGES)
        if not (hosts := self._whole_stage(stage)):
            return None
        return f"stage {stage} for " + ", ".join(f"{self._pause(host, 4.0, 15.0):.1f} s" for host in hosts)

    def lost_stage(self) -> str | None:
        stage = self._rng.randrange(N_STAGES)
        if not self._fleet.is_whole() or self._any_busy() or not (hosts := self._whole_stage(stage)):
            return None
        for host in hosts:
            host.process.kill()
            self._fleet.retire(host)
        for _ in hosts:
            newcomer = self._fleet.newcomer()
            newcomer.is_busy = True
            self._after(self._rng.uniform(0.0, 5.0), lambda host=newcomer: self._start(host))
        return f"stage {stage}: {', '.join(map(str, hosts))} for good, {len(hosts)} newcomers come"

    def second_peer(self) -> str | None:
        host = self._any()
        if not host or not self._fleet.is_member(host):  # of two processes that both are new, either may be let in
            return None
        self._second(host)
        return f"{host}"

    def replaced(self) -> str | None:
        host = self._any()
        if not host or not self._has_others(host):
            return None
        first = host.process
        first.pause()
        first.ends()  # its owner takes it for dead
        first.expected |= {KILLED, REFUSED, PUT_OUT}
        host.is_busy = True
        host.start("--listen=127.0.0.1:0")

        def second_is_in(is_in: bool) -> None:
            if not is_in:
                self._fleet.problem(f"{host}: a second process was not let in, its log is {host.process.log}")
            first.go_on()
            self._after(10.0, lambda: self._free(host, first.kill))

        self._await(lambda: self._fleet.is_member(host), RECOVERED_S, second_is_in)
        return f"{host}"

    def full_disk(self) -> str | None:
        if self._any_busy() or not self._fleet.is_whole():
            return None
        stage = self._rng.randrange(N_STAGES)
        hosts = sorted(self._fleet.of_stage(stage), key=lambda host: host.peer or 0)
        host = hosts[0] if self._rng.random() < 0.7 else self._rng.choice(hosts)  # the first one writes checkpoints
        host.process.fill_disk(True)
        host.process.expected.add(REFUSED)
        for other in hosts:  # if all others were gone meanwhile, nothing would be durable, and the run would end
            other.is_busy = True
        seconds = self._rng.uniform(20.0, 60.0)
        self._after(seconds, lambda: self._room(host, hosts))
        return f"{host}, of stage {stage}, for {seconds:.1f} s"

    def drain(self) -> str | None:
        host = self._any()
        if not host or not self._has_others(host):
            return None
        host.process.popen.send_signal(signal.SIGTERM)
        self._again_when_ended(host, {LEFT})
        return f"{host}"

    # ----------------------------------------------------------------------------------------- what coordinators meet

    def kill_coordinator(self) -> str | None:
        if self._fleet.coordinator.is_busy:
            return None
        return f"again after {self._kill(self._fleet.coordinator, 0.5, 8.0):.1f} s"

    def pause_coordinator(self) -> str | None:
        if self._fleet.coordinator.is_busy:
            return None
        return f"for {self._pause(self._fleet.coordinator, 1.0, 12.0):.1f} s"

    def second_coordinator(self) -> str | None:
        coordinator = self._fleet.coordinator
        if coordinator.is_busy or not coordinator.process.log.read_text():
            return None  # it has just begun: of two that have no folder yet, either may be the one that is refused
        self._second(coordinator)
        return "on the same folder"

    def operator(self) -> str | None:
        coordinator = self._fleet.coordinator
        host = self._any()
        if coordinator.is_busy or not host or not self._has_others(host):
            return None
        command = next(self._commands)
        coordinator.is_busy = True
        if command in ("drain", "evict"):
            assert host.peer is not None
            self._ask(command, str(host.peer), then=lambda: self._free(coordinator))
            self._again_when_ended(host, {LEFT, PUT_OUT})
            return f"{command} {host.peer}"
        if command == "pause":
            resume = lambda: self._ask("resume", then=lambda: self._free(coordinator))  # noqa: E731
            self._ask("pause", then=lambda: self._after(self._rng.uniform(1.0, 6.0), resume))
        else:
            self._ask(command, then=lambda: self._free(coordinator))
        return command

    # --------------------------------------------------------------------------------------------------- their parts

    def _ask(self, command: str, *words: str, then: Callable[[], None]) -> None:
        process = ask_operator(self._fleet, command, *words)
        self._await_end(process, {0}, then)

    def _any(self) -> Host | None:
        """A peer to which nothing else happens now."""
        hosts = [
            h for h in self._fleet.hosts if not h.is_busy and h.processes and h.process.runs and h.peer is not None
        ]
        return self._rng.choice(hosts) if hosts else None

    def _any_busy(self) -> bool:
        return any(host.is_busy for host in self._fleet.hosts)

    def _whole_stage(self, stage: int) -> list[Host]:
        """The hosts of a stage, if all of them are in the run and nothing happens to them now."""
        hosts = self._fleet.of_stage(stage)
        return hosts if all(self._fleet.is_member(host) and not host.is_busy for host in hosts) else []

    def _has_others(self, host: Host) -> bool:
        """Whether the stage of a host has another one in the run."""
        stage = self._fleet.stage_of(host)
        others = [other for other in self._fleet.of_stage(stage) if other is not host] if stage is not None else []
        return any(self._fleet.is_member(other) and not other.is_busy for other in others)

    def _after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), do))

    def _await(self, has_happened: Callable[[], bool], timeout_s: float, then: Callable[[bool], None]) -> None:
        self._awaited.append((has_happened, time.monotonic() + timeout_s, then))

    def _await_end(self, process: Process, codes: set[int], then: Callable[[], None]) -> None:
        """Wait for a process that has to end soon, with one of these codes."""

        def ended(in_time: bool) -> None:
            if not in_time:
                process.kill()
                self._fleet.problem(f"{process.name}: did not end within {ENDS_S:.0f} s, its log is {process.log}")
            elif process.popen.returncode not in codes:
                code, line = process.popen.returncode, process.last_line()
                self._fleet.problem(f"{process.name}: code {code}, expected {sorted(codes)}: {line}")
            then()

        self._await(lambda: not process.runs, ENDS_S, ended)

    def _free(self, host: Host, do: Callable[[], None] = lambda: None) -> None:
        do()
        host.is_busy = False

    def _start(self, host: Host) -> None:
        self._free(host, host.start)

    def _kill(self, host: Host, at_least_s: float, at_most_s: float) -> float:
        seconds = self._rng.uniform(at_least_s, at_most_s)
        host.is_busy = True
        host.process.kill()
        self._after(seconds, lambda: self._start(host))
        return seconds

    def _pause(self, host: Host, at_least_s: float, at_most_s: float) -> float:
        seconds = self._rng.uniform(at_least_s, at_most_s)
        host.is_busy = True
        host.process.pause()
        self._after(seconds, lambda: self._free(host, host.process.go_on))
        return seconds

    def _second(self, host: Host) -> None:
        """Start a host's command once more; it has to be refused."""
        host.is_busy = True
        second = host.spawn()
        self._await_end(second, {REFUSED}, lambda: self._free(host))

    def _room(self, host: Host, hosts: list[Host]) -> None:
        """A disk has room again; its process may have ended meanwhile."""
        host.process.fill_disk(False)
        host.process.expected.discard(REFUSED)
        for other in hosts:
            other.is_busy = False
        if not host.process.runs:
            host.process.expected.add(REFUSED)
            host.start()

    def _again_when_ended(self, host: Host, codes: set[int]) -> None:
        """Start a host's command again once its process has left the run."""
        host.is_busy = True
        host.process.expected |= codes
        self._await_end(host.process, codes, lambda: self._start(host))


def ask_operator(fleet: Fleet, command: str, *words: str) -> Process:
    """Start fleet.py for one request."""
    log = fleet.logs / f"operator_{command}.{time.monotonic_ns()}.log"
    arguments = [command, *words, f"--run_dir={fleet.folder / 'job'}", f"--coordinator={fleet.address}"]
    popen = local_run.start(log, "fleet.py", arguments)
    return Process(f"fleet.py {command}", log, popen, rollback_proof.Life(None))


def run_script(script: str, *words: str) -> None:
    """Run one of the scripts to its end; BadInput if it fails."""
    command = [sys.executable, str(local_run.SCRIPTS / script), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BadInput(f"{script}: ended with code {done.returncode}: {done.stdout.strip()}")


def play(fleet: Fleet, failures: Failures, kinds: list[str], rng: random.Random) -> None:
    """Let failures happen until the time is over."""
    first = rng.sample(kinds, len(kinds))
    end_s = time.monotonic() + 60.0 * MINUTES.value
    next_s = time.monotonic()
    while (now_s := time.monotonic()) < end_s and not _is_over(fleet):
        fleet.poll()
        failures.follow_up()
        restart_lost(fleet)
        if now_s >= next_s and (kind := first[0] if first else rng.choice(kinds)):
            if failures.begin(kind):
                del first[:1]
                patience_s = RECOVERED_S if rng.random() < 0.6 else rng.uniform(2.0, 6.0)
                next_s = now_s + rng.uniform(1.0, 4.0)
                wait_until_whole(fleet, failures, min(now_s + patience_s, end_s))
            elif first:
                first.append(first.pop(0))
        time.sleep(POLL_S)


def wait_until_whole(fleet: Fleet, failures: Failures, until_s: float) -> bool:
    """Wait until nothing fails any more and all peers are in the run, or until `until_s`."""
    while time.monotonic() < until_s and not _is_over(fleet):
        fleet.poll()
        failures.follow_up()
        restart_lost(fleet)
        if not failures.pending and fleet.is_whole():
            return True
        time.sleep(POLL_S)
    return False


def restart_lost(fleet: Fleet) -> None:
    """Start processes again that have ended by themselves, as a host's supervisor does."""
    for host in [fleet.coordinator, *fleet.hosts]:
        if host.processes and not host.process.runs and not host.is_busy:
            fleet.poll()
            host.start()


def _is_over(fleet: Fleet) -> bool:
    """Whether the run goes on no more."""
    if time.monotonic() - fleet.stepped_s > STALLED_S:
        fleet.problem(f"no step for {STALLED_S:.0f} s")
        return True
    return False


def stop(fleet: Fleet) -> None:
    """End the run as an operator does. All processes end with code 0."""
    processes = [host.process for host in [fleet.coordinator, *fleet.hosts]]
    for process in processes:
        process.expected.add(0)
    request = ask_operator(fleet, "stop")
    end_s = time.monotonic() + END_S
    while any(process.runs for process in [request, *processes]) and time.monotonic() < end_s:
        fleet.poll()
        time.sleep(POLL_S)
    fleet.poll()
    if request.popen.poll() != 0:
        fleet.problem(f"fleet.py stop: code {request.popen.poll()}, {request.last_line()}")
    for process in processes:
        if process.runs:
            fleet.problem(f"{process.name}: still runs {END_S:.0f} s after the end, its log is {process.log}")


def differences(fleet: Fleet, alone: Path) -> list[float]:
    """The relative difference of each loss to that of one process."""
    losses = local_run.losses(fleet.folder / "coordinator")
    expected = local_run.losses_alone(alone, [f"--config={fleet.folder / 'config.py'}"], len(losses))
    if len(expected) != len(losses):
        fleet.problem(f"{len(losses)} steps to compare, one process did {len(expected)}")
    return [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=False)]


def result(fleet: Fleet, failures: Failures, differences: list[float]) -> dict:
    hosts = [*fleet.hosts, *fleet.retired]
    lives = [process.life for host in hosts for process in host.processes]
    rollbacks = rollback_proof.rollbacks(fleet.records, lives, N_STAGES)
    difference = max(differences, default=math.inf)
    bad = list(fleet.problems)
    bad += [f"needless rollback: {rollback}" for rollback in rollbacks if not rollback.was_needed]
    if not difference <= DIFFERENCE_MAX:
        bad.append(f"losses differ by {difference:.1e}")
    for log in sorted(fleet.logs.iterdir()):
        if "Traceback" in log.read_text(errors="replace"):
            bad.append(f"{log} has a traceback")
    return {
        "seed": SEED.value,
        "minutes": MINUTES.value,
        "wiring": WIRING.value,
        "failures": dict(sorted(failures.counts.items())),
        "processes": sum(len(host.processes) for host in [fleet.coordinator, *hosts]),
        "steps": fleet.n_steps,
        "loss_difference": difference,
        f"loss_difference_first_{FIRST_COMPARED}": max(differences[:FIRST_COMPARED], default=math.inf),
        "rollbacks": [{"step": r.step, "to": r.to, "holders": r.holders} for r in rollbacks],
        "reports": dict(sorted(Counter(record["kind"] for record in fleet.records).items())),
        "longest_without_step_s": round(fleet.longest_wait_s, 1),
        "bad": bad,
    }


def begin(fleet: Fleet, failures: Failures) -> None:
    """Start all processes, and wait for the first steps."""
    for host in [fleet.coordinator, *fleet.hosts]:
        host.start()
    end_s = time.monotonic() + BEGUN_S
    while fleet.n_steps < FIRST_STEPS:
        fleet.poll()
        if time.monotonic() > end_s or fleet.problems:
            raise BadInput(f"run_dir: {fleet.folder}: the run has not begun; its folder logs/ says why")
        time.sleep(POLL_S)
    fleet.say("the run has begun")


def main() -> int:
    environment.compute_on_cpu()
    if RUN_DIR.value is None:
        raise BadInput("--run_dir: missing")
    folder = Path(RUN_DIR.value).resolve()
    clear(folder, "job", OVERWRITE.value)
    rng = random.Random(SEED.value)
    fleet = Fleet(folder)
    failures = Failures(fleet, rng)
    try:
        begin(fleet, failures)
        play(fleet, failures, KINDS.value, rng)
        fleet.say("no more failures")
        if not wait_until_whole(fleet, failures, time.monotonic() + RECOVERED_S):
            fleet.problem(f"not all peers are back after {RECOVERED_S:.0f} s")
        stop(fleet)
    finally:
        fleet.kill_all()
    found = result(fleet, failures, differences(fleet, folder / "alone"))
    (folder / "failures.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    script_main.run(main)
