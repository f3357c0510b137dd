"""One run of scripts/experiments/study.py: a fleet on this machine, and a schedule of who goes and who comes, carried
out."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import churn_comparison_results

from jaxdt.cli import local_run
from jaxdt.protocol.events import TEMPORARY_IDS
from jaxdt.sim.faults import CRASH, Fault
from jaxdt.spec.errors import BadInput

WARM_STEPS = 3  # until everyone has compiled
STEPS_S = 300.0
POLL_S = 0.1
NUMBERS = dict(kill=signal.SIGKILL, term=signal.SIGTERM)


@dataclass(frozen=True)
class Setup:
    """What the three runs have in common. `leave_by`: kill or term; `lose_stages`: take also who is alone."""

    stages: int
    pipelines: int
    microbatches: int
    forward_s: float
    leave_by: str = "kill"
    lose_stages: bool = False


def fields(setup: Setup, wiring: dict) -> dict:
    """Of a run's config."""
    n = setup.stages
    return {
        "model": dict(n_layers=n, d_model=32, n_heads=2, d_ff=64, seq_len=16),
        "plan": dict(stages=n, pipelines=setup.pipelines, microbatches=setup.microbatches),
        "train": dict(steps=1_000_000, microbatch_size=1, checkpoint_every_steps=20),
        "net": dict(heartbeat_s=0.5, deadline_floor_s=30.0),  # a loss is seen by the connections that end with it
        "wiring": wiring,
    }


@dataclass
class StudyRun:
    """One run in `folder`, and what was done to it. Machines have the names of the schedule: peers of the plan, and
    TEMPORARY_IDS + n for newcomer n."""

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
        """The coordinator's, which is written line by line."""
        return self.run_dir / "trace" / "coordinator.jsonl"

    def play(self, schedule: list[Fault], seconds: float) -> dict:
        """When it began on this machine's monotonic clock, for how many seconds it went on, what was done when (seconds
        from then), and how free the machine was: the cores that were busy in the mean, and the longest time between two
        of our looks beyond what we slept."""
        self.folder.mkdir(parents=True)
        local_run.write_config(self.folder / "study_config.py", fields(self.setup, self.wiring))
        self.launcher = local_run.start(
            self.folder / "launch.log",
            "launch.py",
            f"--config={self.folder / 'study_config.py'}",
            f"--run_dir={self.run_dir}",
            "--report=false",
            self._slow,
        )
        try:
            self._steps(WARM_STEPS)
            began_s, idle_s, done, held_up_s = time.monotonic(), local_run.idle_s(), [], 0.0
            for fault in [*schedule, None]:
                at_s = seconds if fault is None else fault.at_s
                held_up_s = max(held_up_s, self._wait(began_s + at_s))
                if fault is not None:
                    done.append([time.monotonic() - began_s, *self._do(fault)])
            busy = os.cpu_count() - (local_run.idle_s() - idle_s) / seconds
            self._steps(self._n_steps + 1)  # the one that is under way counts in part
            free = dict(held_up_s=held_up_s, cores_busy=busy)
            return {"began_s": began_s, "seconds": seconds, "events": done} | free
        finally:
            self._end()

    @property
    def _slow(self) -> str:
        return f"--emulate_forward_s={self.setup.forward_s}"

    def _do(self, fault: Fault) -> tuple[str, str]:
        """What was done to whom."""
        if fault.kind != CRASH:
            n, log = fault.peer, self.folder / f"newcomer_{fault.peer}.log"
            self.newcomers[TEMPORARY_IDS + n] = local_run.join(self.run_dir, log, self._slow)
            return "join", f"newcomer {n}"
        name = f"peer {fault.peer}" if fault.peer < TEMPORARY_IDS else f"newcomer {fault.peer - TEMPORARY_IDS}"
        peer = self._peer(fault.peer)
        records = local_run.objects(self.trace)
        if (
            peer is not None
            and not self.setup.lose_stages
            and churn_comparison_results.alone(records, peer, self.killed)
        ):
            return "spared", name
        os.kill(self._pid(fault.peer), NUMBERS[self.setup.leave_by])
        self.killed |= set() if peer is None else {peer}
        return "leave", name

    def _peer(self, machine: int) -> int | None:
        """The id that the run knows it by; None for a newcomer that has not got one yet."""
        if machine < TEMPORARY_IDS:
            return machine
        first = (self.folder / f"newcomer_{machine - TEMPORARY_IDS}.log").read_text().partition(": joins for stage")[0]
        return int(first.rpartition("peer ")[2]) if "peer " in first else None

    def _pid(self, machine: int) -> int:
        if machine in self.newcomers:
            return self.newcomers[machine].pid
        pid = local_run.children(self.launcher.pid).get(f"peer {machine}")
        if pid is None:
            raise BadInput(f"{self.folder}: peer {machine} has ended before it was to leave; see its log")
        return pid

    def _wait(self, until_s: float) -> float:
        """The longest delay."""
        longest_s, before_s = 0.0, time.monotonic()
        while before_s < until_s:
            self._check()
            time.sleep(min(POLL_S, max(0.0, until_s - time.monotonic())))
            now_s = time.monotonic()
            longest_s, before_s = max(longest_s, now_s - before_s - POLL_S), now_s
        return longest_s

    @property
    def _n_steps(self) -> int:
        return len(local_run.objects(self.run_dir / "metrics.jsonl"))

    def _steps(self, n: int) -> None:
        """Until so many are done."""
        deadline_s = time.monotonic() + STEPS_S
        while self._n_steps < n:
            self._check()
            if time.monotonic() > deadline_s:
                raise BadInput(f"{self.folder}: {n} steps were not done after {STEPS_S:.0f} s; see launch.log")
            time.sleep(POLL_S)

    def _check(self) -> None:
        if self.launcher.poll() is not None:
            raise BadInput(f"{self.folder}: the run ended with code {self.launcher.returncode}; see launch.log")

    def _end(self) -> None:
        local_run.end(self.launcher, self.newcomers.values())
