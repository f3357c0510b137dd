"""The coordinator's folder of a run: which process owns it, and what earlier coordinators have left there.

Two coordinators on one folder would answer for one run, so a coordinator locks its folder before it writes anything.
Durable values there belong to the run that `run` names. They outlive the coordinator, not the run.
"""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdt.build import RunStart
from jaxdt.membership.coordinator_config import (
    DurableState,
    LastView,
    OperatorState,
    load_durable_state,
    load_operator_state,
)
from jaxdt.membership.run_state import CHECKPOINT, OPERATOR, ROWS, STEPS, TERM, VIEW
from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.runtime.reporting.run_history import HISTORY
from jaxdt.runtime.run_dir import n_steps_of
from jaxdt.runtime.run_end import ended_run, how_to_go_on
from jaxdt.runtime.run_job import RunJob
from jaxdt.runtime.storage.durable import FileStore, lock_file
from jaxdt.runtime.storage.parts import step_folder

RUN, START, ENDED = "run", "start", "ended"  # beside the names under which the machine's state is made durable
LOCK = "lock"
ISSUED = "issued"  # jaxdt.runtime.identity.issuer
# What a run resumed from a checkpoint needs from earlier runs in the folder, since it keeps their credentials; and what
# it loses without these values.
NEEDED = {
    OPERATOR: "peers that an operator has revoked are admitted again",
    ISSUED: "tokens that were used can be used again",
}
NOT_NEEDED = (RUN, START, ENDED, HISTORY, TERM, VIEW, STEPS, ROWS, CHECKPOINT)


def lock_folder(folder: Path) -> int:
    """Lock a coordinator's folder. Returns the file descriptor that keeps others out while this process lives.
    BadInput if another process has locked it; the line names that process."""
    folder.mkdir(parents=True, exist_ok=True)
    own = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    try:
        return lock_file(folder / LOCK, fcntl.LOCK_EX | fcntl.LOCK_NB, own)
    except BlockingIOError:
        holder = (folder / LOCK).read_text(errors="replace").strip() or "a process that has just begun"
        raise BadInput(
            f"run_dir: {folder.parent} has a coordinator already ({holder}), expected one for each run"
        ) from None


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """A coordinator's folder, locked as by `lock_folder`. Bad input leaves no folder behind that was not there, if
    nothing but the lock has been written."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    lock = lock_folder(folder)
    try:
        yield folder
    except BadInput:
        if made and os.listdir(folder) == [LOCK]:
            (folder / LOCK).unlink()
            for path in made:  # the innermost first
                path.rmdir()
        raise
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Beginning:
    """The state with which a coordinator begins. `durable_state`: the state that an earlier coordinator of this run
    left behind; None for the first coordinator, and for one whose predecessor ended before the first view."""

    start: RunStart
    durable_state: DurableState | None


def drop_damaged(run_dir: Path) -> list[str]:
    """Delete the damaged files of the coordinator's folder that a run resumed from a checkpoint does not need. Returns
    a line for each. BadInput names the remedy for a file that such a run needs."""
    folder = run_dir / "coordinator"
    if not folder.exists():  # it is on another host
        return []
    durable = FileStore(folder)
    for name, loss in NEEDED.items():
        if problem := _damage(durable, name):
            remedy = f"restore it, or delete {folder / name}.json: then {loss}"
            raise BadInput(f"--resume: {problem}; {remedy}")
    lines: list[str] = []
    for name in NOT_NEEDED:
        if problem := _damage(durable, name):
            durable.delete(name)
            lines.append(f"--resume: {problem}; deleted, since a run that is resumed does not need it")
            if name == TERM and not _damage(durable, VIEW) and (view := durable.get(VIEW)):
                durable.put(TERM, serialize.read_known(LastView, view, VIEW).coordinator_term)
    return lines


def last_members(run_dir: Path) -> tuple[ev.Member, ...]:
    """The members of the run's last view; none if its coordinator is not here, or has made no view."""
    folder = run_dir / "coordinator"
    view = FileStore(folder).get(VIEW) if folder.exists() else None
    return serialize.read_known(LastView, view, VIEW).members if view else ()


def begun_with(run_dir: Path) -> Path | None:
    """The checkpoint with which the run in this folder began, if its coordinator is here and did not end: its processes
    begin with it again when they are started again."""
    if not (run_dir / "coordinator").exists():
        return None
    durable = FileStore(run_dir / "coordinator")
    if not durable.get(RUN):
        return None
    start = serialize.read(ev.Checkpoint, durable.get(START), str(run_dir / "coordinator" / START))
    return step_folder(run_dir, start.version)


def _damage(durable: FileStore, name: str) -> str:
    """One line about a damaged file, '' for one that is whole or missing."""
    try:
        durable.get(name)
    except BadInput as problem:
        return str(problem)
    return ""


def _stored(job: RunJob, durable: FileStore, name: str) -> Any:
    """A durable value; BadInput for a damaged one names the remedy."""
    try:
        return durable.get(name)
    except BadInput as problem:
        raise BadInput(f"{problem}; restore that file; or {how_to_go_on(job.run_dir)}") from None


def load_beginning(job: RunJob, durable: FileStore) -> Beginning:
    """The durable state of this very run; without one the run's beginning, at the checkpoint from which it resumes if
    it does. That checkpoint may have been deleted while the run went on, so only the first coordinator reads it."""
    last_term = serialize.read(int, _stored(job, durable, TERM) or 0, TERM)
    revoked = load_operator_state({OPERATOR: _stored(job, durable, OPERATOR)}).revoked
    is_first = _stored(job, durable, RUN) != job.run
    if is_first and (job.resume is None or _has_run(job, durable)):
        check_no_steps(job.run_dir)
    checkpoint = job.start if is_first else serialize.read(ev.Checkpoint, _stored(job, durable, START), START)
    start = RunStart(job.run, checkpoint, job.data.checksum, last_term, revoked)
    if is_first:
        return Beginning(start, None)
    disk = {name: _stored(job, durable, name) for name in (TERM, VIEW, STEPS, ROWS, CHECKPOINT, OPERATOR)}
    return Beginning(start, load_durable_state(disk))


def _has_run(job: RunJob, durable: FileStore) -> bool:
    """Whether this run has ended, from the checkpoint that the job resumes from: its flag file was started again."""
    if _stored(job, durable, ENDED) != job.run:
        return False
    try:
        return durable.get(START) == serialize.write(job.start)
    except BadInput:
        return True  # the checkpoint is gone


def check_not_ended(job: RunJob) -> None:
    """BadInput if the coordinator's folder is here, and says that this very run has ended."""
    folder = job.run_dir / "coordinator"
    if not folder.exists():
        return
    durable = FileStore(folder)
    if _stored(job, durable, ENDED) == job.run and _stored(job, durable, RUN) != job.run:
        raise BadInput(f"run_dir: {ended_run(job.run_dir) or f'the run in {job.run_dir} has ended'}")


def end_of_run(job: RunJob) -> ev.Stop | None:
    """The end of a process that waits for the coordinator, if the coordinator's folder is here and says that the run is
    over; else None."""
    try:
        check_not_ended(job)
    except BadInput as problem:
        return ev.Stop(ExitCode.NOT_JOINED, str(problem))
    return None


def check_no_steps(run_dir: Path) -> None:
    """BadInput if a run that has ended has left steps in the folder: a run from the beginning would replace them."""
    if n_steps := n_steps_of(run_dir):
        ended = ended_run(run_dir) or f"{run_dir} holds {n_steps} steps of a run that has ended"
        raise BadInput(f"run_dir: {ended}; to begin again: launch.py with --overwrite, or another --run_dir")


def begin_run(job: RunJob, durable: FileStore, beginning: Beginning) -> None:
    """Make durable that this run has begun. The state of another run goes first, so that it is never taken for this
    run's. The term stays, since terms grow for as long as the folder lives, and so does who is revoked."""
    if beginning.durable_state is None:
        for name in (VIEW, STEPS, ROWS, CHECKPOINT):
            durable.delete(name)
        durable.put(OPERATOR, serialize.write(OperatorState(revoked=beginning.start.revoked)))
        durable.put(START, serialize.write(beginning.start.checkpoint))
    durable.put(RUN, job.run)


def end_run(durable: FileStore) -> None:
    """Make durable that the run has ended: another coordinator has nothing to continue."""
    durable.put(ENDED, durable.get(RUN))
    durable.put(RUN, "")
