"""A run's processes on this machine: the coordinator and every peer as children of the launcher."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxdt.runtime.run_dir import job_flags
from jaxdt.spec.plan import Plan

RUN_CODES = (0, 2, 3, 4, 130)
EXPECTED_CODES = (None, *RUN_CODES, -signal.SIGKILL, -signal.SIGTERM)
NOTICED_S = 5.0
GRACE_S = 10.0
POLL_S = 0.05
ADDRESS_S = 60.0


class LocalFleet:
    """Starts the children, waits for them, and leaves none behind. `scripts` holds train.py and coordinate.py;
    `began_s` is when the launcher began, on the monotonic clock; `lock` an open file that they all hold. A run that
    has begun goes on without peers that end: that is the coordinator's affair; and a coordinator that is killed is
    started again."""

    def __init__(
        self,
        run_dir: Path,
        plan: Plan,
        scripts: Path,
        extra_flags: list[str],
        n_cpus: int,
        began_s: float,
        lock: int,
    ):
        self._run_dir, self._plan, self._scripts = run_dir, plan, scripts
        self._flags = [f"--run_dir={run_dir}", "--stop_with_parent", *job_flags(run_dir), *extra_flags]
        self._n_cpus = n_cpus or (os.cpu_count() or 1) // len(plan.peers)
        self._peers: dict[int, subprocess.Popen] = {}
        self._coordinator: subprocess.Popen | None = None
        self._began_s, self._lock = began_s, lock
        self._first_view = run_dir / "coordinator" / "view.json"

    def run(self) -> int:
        """The run's exit code: the coordinator's, unless a peer could not even start."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        (self._run_dir / "logs").mkdir(exist_ok=True)
        try:
            self._first_view.unlink(missing_ok=True)
            address = self._start_coordinator()
            if not address and self._coordinator.poll() is None:
                print(f"coordinator: has no address after {ADDRESS_S:.0f} s", flush=True)
                return 3
            if address:
                print(f"coordinator at {address}", flush=True)
                for peer in sorted(self._plan.peers):
                    self._start_peer(peer, address)
            return self._wait(address)
        finally:
            self._end()

    def _start_coordinator(self, listen: str = "127.0.0.1:0") -> str:
        """Its address, or '' if it ended before it had one."""
        address_file = self._run_dir / "coordinator_address"
        address_file.unlink(missing_ok=True)
        own = [f"--address_file={address_file}", f"--began_s={self._began_s}", f"--listen={listen}"]
        command = [sys.executable, str(self._scripts / "coordinate.py"), *own, *self._flags]
        self._coordinator = subprocess.Popen(
            command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True, pass_fds=[self._lock]
        )
        deadline_s = time.monotonic() + ADDRESS_S
        while not address_file.exists() and self._coordinator.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return address_file.read_text() if address_file.exists() else ""

    def _start_peer(self, peer: int, address: str) -> None:
        flags = [f"--peer={peer}", f"--coordinator={address}", *self._flags, *self._cpus(peer)]
        # Peers that share CPUs compute on one thread each: the simulator counts on it, and more would only fight.
        flag = "" if self._n_cpus else " --xla_cpu_multi_thread_eigen=false"
        environment = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + flag}
        with (self._run_dir / "logs" / f"peer_{peer}.log").open("w") as log:
            self._peers[peer] = subprocess.Popen(
                [sys.executable, str(self._scripts / "train.py"), *flags],
                stdin=subprocess.PIPE,
                bufsize=0,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[self._lock],
            )

    def _cpus(self, peer: int) -> list[str]:
        """CPUs of its own for each peer, or none in particular if there are fewer CPUs than peers."""
        first = sorted(self._plan.peers).index(peer) * self._n_cpus
        own = range(first, first + self._n_cpus)
        return [f"--cpus={','.join(map(str, own))}"] if own and own[-1] < (os.cpu_count() or 1) else []

    def _wait(self, address: str) -> int:
        """Until the coordinator has ended, or a peer has ended that the coordinator never heard of."""
        while self._coordinator.poll() is None or self._revived(address):
            time.sleep(POLL_S)
            ended = [peer for peer, child in self._peers.items() if child.poll() not in (None, 0)]
            if self._first_view.exists():
                continue
            if ended and not self._settles(NOTICED_S):
                self._tell_all(ended[0])
                self._settles(GRACE_S)
                break
        for peer, child in self._peers.items():
            if child.poll() not in EXPECTED_CODES:
                self._explain(peer)
        code = self._coordinator.returncode
        if code is not None and code not in RUN_CODES:
            print(f"coordinator: lost, its process ended with exit code {code}")
        return code if code in RUN_CODES else 3

    def _revived(self, address: str) -> bool:
        """A coordinator that was killed is started again where it was, if the run had begun."""
        if self._coordinator.poll() != -signal.SIGKILL or not self._first_view.exists():
            return False
        print("coordinator: killed, started again", flush=True)
        return bool(self._start_coordinator(address))

    def _tell_all(self, peer: int) -> None:
        """A peer ended before the coordinator knew it: end the run for those who are there."""
        code = self._peers[peer].returncode
        reason = f"peer {peer} (stage {self._plan.seat(peer)[0]}): lost, its process ended with exit code {code}"
        if code == 2:
            reason = self._last_line(peer)
        line = f"{2 if code == 2 else 3} {reason}\n".encode()
        for child in (self._coordinator, *self._peers.values()):
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(line)

    def _explain(self, peer: int) -> None:
        """A peer that crashed: how, and the last line of its log."""
        print(f"peer {peer}: exit code {self._peers[peer].returncode}, in its log: {self._last_line(peer)}")

    def _last_line(self, peer: int) -> str:
        log = self._run_dir / "logs" / f"peer_{peer}.log"
        return (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]

    def _settles(self, timeout_s: float) -> bool:
        """Whether the coordinator ends by itself in time."""
        deadline_s = time.monotonic() + timeout_s
        while self._coordinator.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return self._coordinator.poll() is not None

    def _interrupt(self, *_) -> None:
        """Once politely, through the coordinator, which tells everyone."""
        if self._coordinator and self._coordinator.poll() is None:
            self._coordinator.send_signal(signal.SIGINT)

    def _end(self) -> None:
        children = [child for child in (self._coordinator, *self._peers.values()) if child]
        deadline_s = time.monotonic() + GRACE_S
        while any(child.poll() is None for child in children) and time.monotonic() < deadline_s:
            if self._coordinator.poll() is None:
                self._coordinator.send_signal(signal.SIGTERM)
            time.sleep(POLL_S)
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
            if child.stdin:
                child.stdin.close()
