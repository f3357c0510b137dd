"""One run of scripts/experiments/study.py: a schedule of machines that leave and join, as a trial."""

import random
from collections.abc import Sequence
from pathlib import Path

from processes import Join, Kill, Trial, at, play

from churn_comparison.setup import Setup, fields
from jaxdt.cli import local_run
from jaxdt.protocol import events as ev
from jaxdt.sim.faults import CRASH, Fault

WARM_UP_STEPS = 3  # every peer has compiled after them


def played_of(folder: Path, wiring: dict, setup: Setup, faults: Sequence[Fault], seconds: float) -> dict:
    """Play a schedule for so long. The result has the coordinator's trace, and what `Played` says of began_s, events,
    held_up_s and cores_busy. Machines have the names of the schedule: newcomer n is the one of TEMPORARY_IDS + n."""
    folder.mkdir(parents=True)
    config = folder / "study_config.py"
    local_run.write_config(config, fields(setup, wiring))
    trial = Trial(
        config=str(config),
        flags=(f"--config={config}",),
        seconds=seconds,
        begins=WARM_UP_STEPS,
        forward_s=setup.forward_s,
        disturbances=[at(fault.at_s, disturbance(fault, setup)) for fault in faults],
        expected=(),
    )
    played = play(trial, folder / "run", random.Random(0))
    trace = played.run_dir / "trace" / "coordinator.jsonl"
    about = dict(began_s=played.began_s, seconds=seconds, events=played.events, trace=str(trace))
    return about | dict(held_up_s=played.held_up_s, cores_busy=played.cores_busy)


def disturbance(fault: Fault, setup: Setup) -> Kill | Join:
    if fault.kind != CRASH:
        return Join()
    is_newcomer = fault.peer >= ev.TEMPORARY_IDS
    name = f"newcomer {fault.peer - ev.TEMPORARY_IDS}" if is_newcomer else f"peer {fault.peer}"
    return Kill(name, by=setup.leave_by, spares_alone=not setup.lose_stages)
