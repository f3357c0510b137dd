"""The processes of a run on this machine: the coordinator and every peer are children of the launcher."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO

from jaxdt.run.cpus import allowed_cpus, cpus_text, usable_cores
from jaxdt.run.errors import BadInput, read_text
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS, older_part
from jaxdt.runtime.compute_environment import MALLOC_ENVIRONMENT, ONE_THREAD
from jaxdt.runtime.coordinator_client import ask_as_operator
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


class LocalFleet:
    """Starts the processes, waits for them, and leaves none behind.

    Once the run has begun, a peer that ends does not end it: the coordinator decides what follows. The run ends when
    all peers of this launcher have ended, and no other process of the run is there or on its way. A coordinator that is
    killed or terminated is started again. `run` may go on in any thread, and `interrupt` be called from another.

    scripts: the folder of train.py and coordinate.py.
    flags: flags of all processes, beside those of the run's job; coordinator_flags: more of the coordinator alone.
    began_s: when the launcher began, on the monotonic clock.
    lock: a file descriptor that every process inherits.
    log: the file for the coordinator's output and the launcher's own lines; None: both go to the terminal.
    n_cpus: CPUs of each peer; 0 shares out those of this machine.
    gpu_flags[peer]: the flags of train.py that name its GPUs; none where the machine has no GPUs."""

    def __init__(
        self,
        run_dir: Path,
        plan: Plan,
        scripts: Path,
        *,
        flags: Sequence[str],
        coordinator_flags: Sequence[str] = (),
        began_s: float,
        lock: int,
        log: Path | None = None,
        n_cpus: int = 0,
        gpu_flags: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ):
        self._run_dir = run_dir
        self._plan = plan
        self._scripts = scripts
        self._began_s = began_s
        self._lock = lock
        self._log_file = log
        self._flags = [f"--run_dir={run_dir}", "--stop_with_parent", *job_flags(run_dir), *flags]
        self._coordinator_flags = coordinator_flags
        self._all = sorted([*plan.peers, *plan.workers])
        self._n_cpus = n_cpus or int(usable_cores()) // len(self._all)
        self._gpu_flags = gpu_flags
        self._started: dict[int, subprocess.Popen] = {}  # peers, and workers of a pool
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
                    goes_to = [f"--join={address}", "--as=worker"]
                    self._start(peer, goes_to if self._plan.is_worker(peer) else [f"--coordinator={address}"])
            return self._wait(address)
        finally:
            self._end()

    @property
    def _peers(self) -> dict[int, subprocess.Popen]:
        """The processes of peers that have been started, without workers."""
        return {peer: child for peer, child in self._started.items() if not self._plan.is_worker(peer)}

    @property
    def _started_coordinator(self) -> subprocess.Popen:
        assert self._coordinator is not None, "the coordinator is the first process that is started"
        return self._coordinator

    def _start_coordinator(self, listen: str = "127.0.0.1:0") -> str:
        """Start the coordinator. Returns its address, or '' if it ended before it had one. The address of an earlier
        one stays where others read it, since this one gets the same."""
        address_file = self._run_dir / ADDRESS
        written_before = _identity(address_file)
        own_flags = [f"--began_s={self._began_s}", f"--listen={listen}", coordinator_credential(self._run_dir)]
        own_flags += [*self._coordinator_flags, *([] if has_own_terminal() else ["--nolive"])]
        self._release([self._coordinator] if self._coordinator else [])
        with self._log() as log:
            child = self._coordinator = self._popen("coordinate.py", [*own_flags, *self._flags], log)
        self._coordinator_since_s = time.monotonic()
        wait_for(lambda: _identity(address_file) != written_before or child.poll() is not None, ADDRESS_S)
        return "" if _identity(address_file) == written_before else read_text(address_file)

    def _popen(
        self, script: str, flags: Sequence[str], log: IO[str] | None, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        """Start a script in a session of its own, which signals of a terminal do not reach. Its output goes to `log`.
        The pipe to its standard input tells it to end."""
        return subprocess.Popen(
            [sys.executable, str(self._scripts / script), *flags],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            bufsize=0,
            env=environment,
            start_new_session=True,
            pass_fds=[self._lock],
        )

    def _start(self, peer: int, flags: Sequence[str]) -> None:
        """Start the process of a peer, or of a pool's worker."""
        flags = [
            f"--peer={peer}",
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
            self._started[peer] = self._popen("train.py", flags, log, environment)

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
            for peer in self._started:
                cut_log(self._log_path(peer))
            peers = self._peers
            ended = [peer for peer, child in peers.items() if child.poll() is not None]
            if self._first_view.exists():
                if len(ended) < len(peers):
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
        for peer, child in self._started.items():
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
        if not wait_for(lambda: self._interrupted, pause_s):
            self._start_coordinator(address)
        return not self._interrupted

    def _is_deserted(self, address: str) -> bool:
        """Whether the coordinator has heard no member for DESERTED_S, and knew of none that comes."""
        if time.monotonic() - self._asked_s < ASKS_EVERY_S:
            return False
        try:
            credential = load(authority.operator_file(self._run_dir / CREDENTIALS))
            status = json.loads(ask_as_operator("status", parse_address("coordinator", address), credential))
        except BadInput:
            return False  # it ends, or is started again
        finally:
            self._asked_s = time.monotonic()
        silences_s = [member["silent_s"] for member in status["members"] if member["silent_s"] is not None]
        if min(silences_s, default=DESERTED_S) < DESERTED_S or status["coming"] or status["candidates"]:
            self._heard_s = time.monotonic()
        return time.monotonic() - self._heard_s > DESERTED_S

    def _end_deserted(self, ended: Sequence[int]) -> None:
        """All peers have ended: tell the coordinator to end the run."""
        crashed = [peer for peer in ended if self._started[peer].returncode not in EXPECTED_CODES]
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
        code = self._started[peer].returncode
        how = f"lost, its process ended with exit code {code}" if code else "left before it was admitted"
        reason = f"peer {peer} (stage {self._plan.seat(peer)[0]}): {how}"
        if code == ExitCode.BAD_INPUT:
            reason = self._last_line(peer)
        self._tell(
            [self._started_coordinator, *self._started.values()],
            f"{ExitCode.BAD_INPUT if code == ExitCode.BAD_INPUT else ExitCode.LOST} {reason}",
        )

    def _log(self) -> contextlib.AbstractContextManager[IO[str] | None]:
        """The file for what would be printed, if it is not printed."""
        return self._log_file.open("a") if self._log_file else contextlib.nullcontext()

    def _say(self, line: str) -> None:
        with self._log() as log:
            print(line, file=log, flush=True)

    def _print_exit(self, peer: int) -> None:
        """Print the exit code of a peer that crashed, and the last line of its log."""
        code = self._started[peer].returncode
        self._say(f"peer {peer}: exit code {code}, in its log: {self._last_line(peer)}")

    def _log_path(self, peer: int) -> Path:
        return self._run_dir / "logs" / f"peer_{peer}.log"

    def _last_line(self, peer: int) -> str:
        return (self._log_path(peer).read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]

    def _coordinator_ends_within(self, timeout_s: float) -> bool:
        return wait_for(lambda: self._started_coordinator.poll() is not None, timeout_s)

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
        children = [child for child in (self._coordinator, *self._started.values()) if child]
        if self._interrupted and not self._first_view.exists():
            for child in self._started.values():
                child.kill()
        deadline_s = time.monotonic() + GRACE_S
        while any(child.poll() is None for child in children) and time.monotonic() < deadline_s:
            if self._started_coordinator.poll() is None:
                self._started_coordinator.send_signal(signal.SIGINT)
            elif self._interrupted:
                self._release(self._started.values())  # no coordinator tells them
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


def wait_for(has_happened: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for at most timeout_s. Returns whether it has happened."""
    deadline_s = time.monotonic() + timeout_s
    while not has_happened():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_S)
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    """Differs after each time that a file is written durably; None while there is none."""
    with contextlib.suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_ino, stat.st_mtime_ns
    return None
