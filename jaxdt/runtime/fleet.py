"""A run's processes on this machine: the coordinator and every peer as children of the launcher."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxdt.core.plan import Plan
from jaxdt.runtime.run_dir import job_flags

EXIT_CODES = (None, 0, 2, 3, 130)
GRACE_S = 10.0
POLL_S = 0.05
ADDRESS_S = 60.0


class LocalFleet:
    """Starts the children, waits for them, and leaves none behind. `scripts` holds train.py and coordinate.py."""

    def __init__(self, run_dir: Path, plan: Plan, scripts: Path, extra_flags: list[str], n_cpus: int = 0):
        self._run_dir, self._plan, self._scripts = run_dir, plan, scripts
        self._flags = [f"--run_dir={run_dir}", "--stop_with_parent", *job_flags(run_dir), *extra_flags]
        self._n_cpus = n_cpus or (os.cpu_count() or 1) // len(plan.peers)
        self._peers: dict[int, subprocess.Popen] = {}
        self._coordinator: subprocess.Popen | None = None
        self._interrupted = False

    def run(self) -> int:
        """The run's exit code: the coordinator's, unless a peer could not even start."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        (self._run_dir / "logs").mkdir(exist_ok=True)
        try:
            address = self._start_coordinator()
            if address:
                for peer in sorted(self._plan.peers):
                    self._start_peer(peer, address)
            return self._wait()
        finally:
            self._end()

    def _start_coordinator(self) -> str:
        """Its address, or '' if it ended before it had one."""
        address_file = self._run_dir / "coordinator_address"
        address_file.unlink(missing_ok=True)
        command = [sys.executable, str(self._scripts / "coordinate.py"), f"--address_file={address_file}", *self._flags]
        self._coordinator = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        deadline_s = time.monotonic() + ADDRESS_S
        while not address_file.exists() and self._coordinator.poll() is None and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        return address_file.read_text() if address_file.exists() else ""

    def _start_peer(self, peer: int, address: str) -> None:
        flags = [f"--peer={peer}", f"--coordinator={address}", *self._flags, *self._cpus(peer)]
        with (self._run_dir / "logs" / f"peer_{peer}.log").open("w") as log:
            self._peers[peer] = subprocess.Popen(
                [sys.executable, str(self._scripts / "train.py"), *flags],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _cpus(self, peer: int) -> list[str]:
        """CPUs of its own for each peer, or none in particular if there are fewer CPUs than peers."""
        first = sorted(self._plan.peers).index(peer) * self._n_cpus
        own = range(first, first + self._n_cpus)
        return [f"--cpus={','.join(map(str, own))}"] if own and own[-1] < (os.cpu_count() or 1) else []

    def _wait(self) -> int:
        """Until the coordinator has ended, or a peer has ended that the coordinator never heard of."""
        while self._coordinator.poll() is None:
            time.sleep(POLL_S)
            ended = [peer for peer, child in self._peers.items() if child.poll() not in (None, 0)]
            if ended and not self._settles():
                self._explain(ended[0])
                code = self._peers[ended[0]].returncode
                return code if code in (2, 130) else 3
        for peer, child in self._peers.items():
            if child.poll() not in EXIT_CODES:
                self._explain(peer)
        return self._coordinator.returncode

    def _explain(self, peer: int) -> None:
        """A peer that ended otherwise than by the protocol: how, and the last line of its log."""
        log = self._run_dir / "logs" / f"peer_{peer}.log"
        lines = log.read_text(errors="replace").strip().splitlines()
        print(f"peer {peer}: exit code {self._peers[peer].returncode}, {log}: {lines[-1] if lines else 'empty'}")

    def _settles(self) -> bool:
        """Whether the coordinator notices a peer's end by itself in time."""
        deadline_s = time.monotonic() + GRACE_S
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
