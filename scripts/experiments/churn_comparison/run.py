"""One run of scripts/experiments/study.py: a fleet on this machine, whose peers leave and join by a schedule."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from churn_comparison import results
from churn_comparison.setup import Setup, fields
from jaxdt.cli import local_run
from jaxdt.protocol import events as ev
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput
from jaxdt.runtime.reporting import counts
from jaxdt.sim.faults import CRASH, Fault

WARM_UP_STEPS = 3  # every peer has compiled after them
STEPS_TIMEOUT_S = 300.0
POLL_S = 0.1
SIGNALS = dict(kill=signal.SIGKILL, term=signal.SIGTERM)


@dataclass
class ComparedRun:
    """One run in `folder`. Machines have the names of the schedule: a peer of the plan has its id, newcomer n has
    TEMPORARY_IDS + n. `killed` holds the ids by which the run knows the removed peers."""

    folder: Path
    wiring: dict
    setup: Setup
    newcomers: dict[int, subprocess.Popen] = field(default_factory=dict)
    killed: set[int] = field(default_factory=set)
    launcher: subprocess.Popen | None = None

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def trace(self) -> Path:
        """The coordinator's trace, which is written line by line."""
        return self.run_dir / "trace" / "coordinator.jsonl"

    def play(self, schedule: list[Fault], seconds: float) -> dict:
        """Run the fleet and carry out the schedule. The result has

        began_s     the moment at which the schedule began, on this machine's monotonic clock
        seconds     for how long the run went on after it
        events      [seconds after began_s, what was done, to which machine]
        held_up_s   the longest time between two polls, less the sleep between them
        cores_busy  the mean number of busy cores of this machine
        """
        self.folder.mkdir(parents=True)
        config = self.folder / "study_config.py"
        local_run.write_config(config, fields(self.setup, self.wiring))
        arguments = [f"--config={config}", f"--run_dir={self.run_dir}", "--report=false", self._slow_device]
        self.launcher = local_run.start(self.folder / "launch.log", "launch.py", arguments)
        try:
            self._wait_for_steps(WARM_UP_STEPS)
            began_s = time.monotonic()
            idle_before_s = counts.idle_s()
            held_up_s = 0.0
            events = []
            for fault in schedule:
                held_up_s = max(held_up_s, self._wait_until(began_s + fault.at_s))
                events.append([time.monotonic() - began_s, *self._apply(fault)])
            held_up_s = max(held_up_s, self._wait_until(began_s + seconds))
            cores_busy = len(allowed_cpus()) - (counts.idle_s() - idle_before_s) / seconds
            self._wait_for_steps(self._n_steps + 1)  # the current step counts in part
            return {
                "began_s": began_s,
                "seconds": seconds,
                "events": events,
                "held_up_s": held_up_s,
                "cores_busy": cores_busy,
            }
        finally:
            local_run.end(self.launcher, self.newcomers.values())

    @property
    def _slow_device(self) -> str:
        return f"--emulate_forward_s={self.setup.forward_s}"

    def _apply(self, fault: Fault) -> tuple[str, str]:
        """Carry out a fault: what was done, and the name of the machine."""
        if fault.kind != CRASH:
            n = fault.peer
            log = self.folder / f"newcomer_{n}.log"
            self.newcomers[ev.TEMPORARY_IDS + n] = local_run.join(self.run_dir, log, [self._slow_device])
            return "join", f"newcomer {n}"
        name = f"peer {fault.peer}" if fault.peer < ev.TEMPORARY_IDS else f"newcomer {fault.peer - ev.TEMPORARY_IDS}"
        peer = self._peer_id(fault.peer)
        if peer is not None and not self.setup.lose_stages:
            records = local_run.objects(self.trace)
            if results.is_alone(records, peer, self.killed):
                return "spared", name
        os.kill(self._pid(fault.peer), SIGNALS[self.setup.leave_by])
        if peer is not None:
            self.killed.add(peer)
        return "leave", name

    def _peer_id(self, machine: int) -> int | None:
        """The id by which the run knows a machine; None for a newcomer that has no id yet."""
        if machine < ev.TEMPORARY_IDS:
            return machine
        first = (
            (self.folder / f"newcomer_{machine - ev.TEMPORARY_IDS}.log").read_text().partition(": joins for stage")[0]
        )
        return int(first.rpartition("peer ")[2]) if "peer " in first else None

    def _pid(self, machine: int) -> int:
        if machine in self.newcomers:
            return self.newcomers[machine].pid
        pid = local_run.children(self.launcher.pid).get(f"peer {machine}")
        if pid is None:
            raise BadInput(f"{self.folder}: peer {machine} has ended before it was to leave; see its log")
        return pid

    def _wait_until(self, at_s: float) -> float:
        """Wait, and return the longest delay between two polls, in seconds."""
        longest_s = 0.0
        before_s = time.monotonic()
        while before_s < at_s:
            self._check_launcher()
            time.sleep(min(POLL_S, max(0.0, at_s - time.monotonic())))
            now_s = time.monotonic()
            longest_s = max(longest_s, now_s - before_s - POLL_S)
            before_s = now_s
        return longest_s

    @property
    def _n_steps(self) -> int:
        return len(local_run.objects(self.run_dir / "metrics.jsonl"))

    def _wait_for_steps(self, n: int) -> None:
        deadline_s = time.monotonic() + STEPS_TIMEOUT_S
        while self._n_steps < n:
            self._check_launcher()
            if time.monotonic() > deadline_s:
                raise BadInput(f"{self.folder}: {n} steps were not done after {STEPS_TIMEOUT_S:.0f} s; see launch.log")
            time.sleep(POLL_S)

    def _check_launcher(self) -> None:
        if self.launcher.poll() is not None:
            raise BadInput(f"{self.folder}: the run ended with code {self.launcher.returncode}; see launch.log")
