"""The processes of a run on this machine: the coordinator and every peer are children of the launcher."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from jaxdt.protocol import events as ev
from jaxdt.run.cpus import allowed_cpus, cpus_text, usable_cores
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS, older_part
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT, ONE_THREAD
from jaxdt.runtime.coordinator_client import ask_coordinator
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.reporting.console import has_own_terminal
from jaxdt.runtime.run_dir import CREDENTIALS, coordinator_credential, job_flags, peer_credential
from jaxdt.runtime.storage.durable import cut_log

RUN_CODES = (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.LOST, ExitCode.DIVERGED, ExitCode.INTERRUPTED)
EXPECTED_CODES = (None, *RUN_CODES, -signal.SIGKILL, -signal.SIGTERM)
RESTARTED_CODES = {-signal.SIGKILL: "killed", -signal.SIGTERM: "terminated", ExitCode.TERMINATED: "terminated"}
NOTICED_S = 5.0
GRACE_S = 10.0
POLL_S = 0.05
ADDRESS_S = 60.0
ASKS_EVERY_S = 2.0
RESTART_PAUSE_S, RESTART_PAUSE_S_MAX = 1.0, 30.0  # between restarts of a coordinator that dies soon after each
STEADY_S = 30.0  # a coordinator that has lived for so long did not die of its start
DESERTED_S = 10.0  # a run of which no process was heard for so long has none that lives


@dataclass(frozen=True)
class PeerDevices:
    """The devices that each peer may use. `n_cpus`: CPUs of each peer; 0 shares out those of this machine.
    `gpu_flags[peer]`: the flags of train.py that name its GPUs; none where the machine has no GPUs."""

    n_cpus: int
    gpu_flags: Mapping[int, list[str]]


@dataclass(frozen=True)
class Launcher:
    """The options that the process which starts a run gives to all of the run's processes.

    scripts: the folder of train.py and coordinate.py.
    flags: flags of all processes, beside those of the run's job.
    began_s: when the launcher began, on the monotonic clock.
    lock: a file descriptor that every process inherits.
    log: the file for the coordinator's output and the launcher's own lines; None: both go to the terminal."""

    scripts: Path
    flags: list[str]
    began_s: float
    lock: int
    log: Path | None = None


class LocalFleet:
    """Starts the processes, waits for them, and leaves none behind.

    Once the run has begun, a peer that ends does not end it: the coordinator decides what follows. The run ends when
    all peers of this launcher have ended, and no other process of the run is there or on its way. A coordinator that is
    killed or terminated is started again. `run` may go on in any thread, and `interrupt` be called from another."""

    def __init__(self, run_dir: Path, plan: Plan, launcher: Launcher, devices: PeerDevices):
        self._run_dir = run_dir
        self._plan = plan
        self._launcher = launcher
        self._flags = [f"--run_dir={run_dir}", "--stop_with_parent", *job_flags(run_dir), *launcher.flags]
        self._all = sorted([*plan.peers, *plan.workers])
        self._n_cpus = devices.n_cpus or int(usable_cores()) // len(self._all)
        self._gpu_flags = devices.gpu_flags
        self._peers: dict[int, subprocess.Popen] = {}
        self._workers: dict[int, subprocess.Popen] = {}
        self._coordinator: subprocess.Popen | None = None
        self._coordinator_since_s = 0.0
        self._restart_pause_s = 0.0  # before the next restart, unless the coordinator lives for long
        self._interrupted = False
        self._asked_s = 0.0  # when the coordinator was last asked who is there
        self._heard_s = 0.0  # when a peer was last known to live
        self._first_view = run_dir / "coordinator" / "view.json"

    def run(self) -> int:
        """Run all processes until they have ended. Returns the exit code of the run: the coordinator's, unless a peer
        could not even start."""
        (self._run_dir / "logs").mkdir(exist_ok=True)
        try:
            self._first_view.unlink(missing_ok=True)
            (self._run_dir / ADDRESS).unlink(missing_ok=True)
            address = self._start_coordinator()
            if not address and self._started_coordinator.poll() is None:
                self._say(f"coordinator: has no address after {ADDRESS_S:.0f} s")
                return ExitCode.LOST
            if address:
                self._say(f"coordinator at {address}; starts {len(self._all)} processes, which load jax and compile")
                for peer in self._all:
                    if self._interrupted:
                        break
                    if self._plan.is_worker(peer):
                        self._workers[peer] = self._start(peer, [f"--peer={peer}", f"--join={address}", "--as=worker"])
                    else:
                        self._peers[peer] = self._start(peer, [f"--peer={peer}", f"--coordinator={address}"])
            return self._wait(address)
        finally:
            self._end()

    @property
    def _started_coordinator(self) -> subprocess.Popen:
        assert self._coordinator is not None, "the coordinator is the first process that is started"
        return self._coordinator

    def _start_coordinator(self, listen: str = "127.0.0.1:0") -> str:
        """Start the coordinator. Returns its address, or '' if it ended before it had one. The address of an earlier
        one stays where others read it, since this one gets the same."""
        address_file = self._run_dir / ADDRESS
        written_before = _identity(address_file)
        own_flags = [f"--began_s={self._launcher.began_s}", f"--listen={listen}", coordinator_credential(self._run_dir)]
        own_flags += [] if has_own_terminal() else ["--nolive"]
        command = [sys.executable, str(self._launcher.scripts / "coordinate.py"), *own_flags, *self._flags]
        self._release([self._coordinator] if self._coordinator else [])
        with self._log() as log:
            self._coordinator = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                bufsize=0,
                start_new_session=True,
                pass_fds=[self._launcher.lock],
            )
        deadline_s = time.monotonic() + ADDRESS_S
        self._coordinator_since_s = time.monotonic()
        while (is_unwritten := _identity(address_file) == written_before) and time.monotonic() < deadline_s:
            if self._coordinator.poll() is not None:
                break
            time.sleep(POLL_S)
        return "" if is_unwritten else address_file.read_text()

    def _start(self, peer: int, flags: Sequence[str]) -> subprocess.Popen:
        """Start the process of a peer, or of a pool's worker."""
        flags = [
            *flags,
            peer_credential(self._run_dir, peer),
            *self._flags,
            *self._cpus(peer),
            *self._gpu_flags.get(peer, []),
        ]
        one_thread = "" if self._n_cpus else f" {ONE_THREAD}"
        environment = os.environ | MALLOC_ENVIRONMENT | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + one_thread}
        path = self._log_path(peer)
        for part in (path, older_part(path)):
            part.unlink(missing_ok=True)
        with path.open("a") as log:  # `cut_log` needs a file that is appended to
            return subprocess.Popen(
                [sys.executable, str(self._launcher.scripts / "train.py"), *flags],
                stdin=subprocess.PIPE,
                bufsize=0,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[self._launcher.lock],
            )

    def _cpus(self, peer: int) -> list[str]:
        """The flag that gives a peer its own CPUs; no flag if this process may use too few CPUs for all peers."""
        first = self._all.index(peer) * self._n_cpus
        cpus = allowed_cpus()[first : first + self._n_cpus]
        return [f"--cpus={cpus_text(cpus)}"] if cpus else []

    def _wait(self, address: str) -> int:
        """Wait until the coordinator has ended, or a peer has ended before the coordinator knew of it. Returns the exit
        code of the run."""
        while self._started_coordinator.poll() is None or self._restarts_coordinator(address):
            time.sleep(POLL_S)
            for peer in (*self._peers, *self._workers):
                cut_log(self._log_path(peer))
            ended = [peer for peer, child in self._peers.items() if child.poll() is not None]
            if self._first_view.exists():
                if len(ended) < len(self._peers):
                    self._heard_s = time.monotonic()
                elif self._is_deserted(address):
                    self._end_deserted(ended)
                    self._coordinator_ends_within(GRACE_S)
                    break
                continue
            if ended and not self._coordinator_ends_within(NOTICED_S):
                self._end_for_lost_peer(ended[0])
                self._coordinator_ends_within(GRACE_S)
                break
        for peer, child in (self._peers | self._workers).items():
            if child.poll() not in EXPECTED_CODES:
                self._print_exit(peer)
        code = self._started_coordinator.returncode
        if self._interrupted and code in (*RESTARTED_CODES, -signal.SIGINT):
            code = ExitCode.INTERRUPTED  # by a system that shuts down and signals every process, or by a second Ctrl-C
        if code is not None and code not in RUN_CODES:
            self._say(f"coordinator: lost, its process ended with exit code {code}")
        return ExitCode.LOST if code is None or code not in RUN_CODES else code

    def _restarts_coordinator(self, address: str) -> bool:
        """Start the coordinator again at its old address if it was killed or terminated, the run had begun, and peers
        wait for it. Returns whether it was. One that dies soon after its start is started again after a pause, which
        grows each time."""
        code = self._started_coordinator.poll()
        if self._interrupted or code not in RESTARTED_CODES or not self._first_view.exists():
            return False
        if all(child.poll() is not None for child in self._peers.values()):
            return False
        if time.monotonic() - self._coordinator_since_s > STEADY_S:
            self._restart_pause_s = 0.0
        pause_s = self._restart_pause_s
        self._restart_pause_s = min(max(RESTART_PAUSE_S, 2 * pause_s), RESTART_PAUSE_S_MAX)
        self._say(f"coordinator: {RESTARTED_CODES[code]}, started again{f' in {pause_s:.0f} s' if pause_s else ''}")
        deadline_s = time.monotonic() + pause_s
        while time.monotonic() < deadline_s and not self._interrupted:
            time.sleep(POLL_S)
        if not self._interrupted:
            self._start_coordinator(address)
        return not self._interrupted

    def _is_deserted(self, address: str) -> bool:
        """Whether the coordinator has heard no member for DESERTED_S, and knew of none that comes."""
        if time.monotonic() - self._asked_s < ASKS_EVERY_S:
            return False
        try:
            own_id, question = ev.OPERATOR_IDS + secrets.randbelow(ev.OPERATOR_IDS), ev.OperatorRequest("status")
            credential = load(authority.operator_file(self._run_dir / CREDENTIALS))
            coordinator = parse_address("coordinator", address)
            answer = ask_coordinator("status", own_id, question, coordinator, credential, False, patience_s=0.0)
        except BadInput:
            return False  # it ends, or is started again
        finally:
            self._asked_s = time.monotonic()
        if not isinstance(answer, ev.OperatorAnswer) or not answer.accepted:
            return False
        status = json.loads(answer.text)
        silences_s = [member["silent_s"] for member in status["members"] if member["silent_s"] is not None]
        if min(silences_s, default=DESERTED_S) < DESERTED_S or status["coming"] or status["candidates"]:
            self._heard_s = time.monotonic()
        return time.monotonic() - self._heard_s > DESERTED_S

    def _end_deserted(self, ended: Sequence[int]) -> None:
        """All peers have ended: tell the coordinator to end the run."""
        crashed = [peer for peer in ended if self._peers[peer].returncode not in EXPECTED_CODES]
        last = f"; of peer {crashed[0]}: {self._last_line(crashed[0])}" if crashed else ""
        self._tell(
            [self._started_coordinator], f"{ExitCode.LOST} all peers have ended, and no other is on its way{last}"
        )

    def _tell(self, children: Iterable[subprocess.Popen], line: str) -> None:
        """Ask children to end, with the code and the reason that begin and end the line."""
        for child in children:
            assert child.stdin is not None, "every child is started with a pipe"
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(f"{line}\n".encode())

    def _end_for_lost_peer(self, peer: int) -> None:
        """A peer has ended before the coordinator knew of it: tell all other processes to end."""
        code = self._peers[peer].returncode
        how = f"lost, its process ended with exit code {code}" if code else "left before it was admitted"
        reason = f"peer {peer} (stage {self._plan.seat(peer)[0]}): {how}"
        if code == ExitCode.BAD_INPUT:
            reason = self._last_line(peer)
        children = [self._started_coordinator, *self._peers.values(), *self._workers.values()]
        self._tell(children, f"{ExitCode.BAD_INPUT if code == ExitCode.BAD_INPUT else ExitCode.LOST} {reason}")

    def _log(self) -> contextlib.AbstractContextManager[IO[str] | None]:
        """The file for what would be printed, if it is not printed."""
        return self._launcher.log.open("a") if self._launcher.log else contextlib.nullcontext()

    def _say(self, line: str) -> None:
        with self._log() as log:
            print(line, file=log, flush=True)

    def _print_exit(self, peer: int) -> None:
        """Print the exit code of a peer that crashed, and the last line of its log."""
        code = (self._peers | self._workers)[peer].returncode
        self._say(f"peer {peer}: exit code {code}, in its log: {self._last_line(peer)}")

    def _log_path(self, peer: int) -> Path:
        return self._run_dir / "logs" / f"peer_{peer}.log"

    def _last_line(self, peer: int) -> str:
        return (self._log_path(peer).read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]

    def _coordinator_ends_within(self, timeout_s: float) -> bool:
        """Wait for at most timeout_s. Returns whether the coordinator has ended."""
        deadline_s = time.monotonic() + timeout_s
        while self._started_coordinator.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return self._started_coordinator.poll() is not None

    def interrupt(self) -> None:
        """Interrupt the coordinator, which then ends the run for all peers. Before the first view there is nothing to
        save, so it waits for no process."""
        if not self._interrupted and not self._first_view.exists():
            self._say("interrupted before the first step: ends all processes")
        self._interrupted = True
        if self._coordinator and self._coordinator.poll() is None:
            self._coordinator.send_signal(signal.SIGINT)

    def _end(self) -> None:
        """End the children that still run: first through the coordinator, then by force."""
        children = [child for child in (self._coordinator, *self._peers.values(), *self._workers.values()) if child]
        if self._interrupted and not self._first_view.exists():
            for child in (*self._peers.values(), *self._workers.values()):
                child.kill()
        deadline_s = time.monotonic() + GRACE_S
        while any(child.poll() is None for child in children) and time.monotonic() < deadline_s:
            if self._started_coordinator.poll() is None:
                self._started_coordinator.send_signal(signal.SIGINT)
            elif self._interrupted:
                self._release([*self._peers.values(), *self._workers.values()])  # no coordinator tells them
            time.sleep(POLL_S)
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        self._release(children)

    def _release(self, children: Iterable[subprocess.Popen]) -> None:
        """Close the pipes to these children. Those that still run take it for the end of this process, and end."""
        for child in children:
            if child.stdin:
                child.stdin.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Differs after each time that a file is written durably; None while there is none."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_ino, stat.st_mtime_ns
    return None
