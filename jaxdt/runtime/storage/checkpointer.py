"""Writes a process's part of each checkpoint on threads of its own, and marks checkpoints complete."""

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import WriteFailedReport
from jaxdt.run.errors import BadInput
from jaxdt.runtime.compute_environment import return_freed_memory
from jaxdt.runtime.storage.checkpoint import COMPLETE, complete_record, mark_complete, prune, sweep
from jaxdt.runtime.storage.durable import disk_id, refusal
from jaxdt.runtime.storage.owed import write_owed
from jaxdt.runtime.storage.parts import (
    Manifest,
    discard_older_fetched,
    find_part,
    keep_fetched,
    part_folders,
    part_name,
    put_in_place,
    read_manifest,
    read_slice,
    seal,
    slices_here,
    step_folder,
    temporary_part,
    whole_manifest,
    write_slice,
)
from jaxdt.runtime.storage.words import check_slice, with_checksum

DELETED_S = 60.0


class Copying:
    """A copy of the state to host memory, in progress. An update donates the state's buffers, so it waits for the copy.
    waited_s: seconds that updates have waited."""

    def __init__(self):
        self._done = threading.Event()
        self.waited_s = 0.0

    def wait(self) -> None:
        start_s = time.monotonic()
        self._done.wait()
        self.waited_s += time.monotonic() - start_s

    def end(self) -> None:
        self._done.set()


class Checkpointer:
    """Copies and writes one stage's part on a thread of its own, while the next step computes. There are at most two
    copies, one that is being written and one that waits. If the disk is too slow for the checkpoints, an update waits
    and memory does not fill up.

    run: the name of the run.
    about: the fields in which a checkpoint must agree with a run that resumes from it (about_run).
    keep: how many complete checkpoints are kept, the newest ones; `resumed` is kept beside them.
    stages: the number of the plan's stages, and the peer's stage (None for the coordinator, which writes no part).
    resumed: the folder of the checkpoint with which the run began, if it began with one."""

    def __init__(
        self,
        run_dir: Path,
        run: str,
        about: dict[str, Any],
        keep: int,
        stages: tuple[int, int | None],
        resumed: Path | None = None,
    ):
        self._run_dir = run_dir
        self._run = run
        self._about = about
        self._keep = keep
        self._n_stages, self._stage = stages
        self._resumed = resumed
        self._manifests: dict[str, tuple[Path, Manifest]] = {}  # of parts that are whole, by digest
        self._threads: list[threading.Thread] = []
        self._copying: Copying | None = None
        self._retaining: list[threading.Thread] = []

    def wait(self) -> None:
        """Wait until the state that `save` was last called with has been copied, and may change."""
        if self._copying:
            self._copying.wait()

    def save(
        self,
        write_checkpoint: ev.WriteCheckpoint,
        store: Any,
        post: Callable[[ev.WroteCheckpoint | ev.CheckpointFailed | BaseException], None],
    ) -> None:
        """Write the store's state, on a thread that calls `post` with the outcome. An exception must end the process.
        The state's arrays must not change until `wait` has returned."""
        # Only peers save, so the process of a coordinator loads neither JAX nor Orbax.
        from jaxdt.runtime.storage.entries import copy_of, split_entries

        part = f"{step_folder(self._run_dir, write_checkpoint.version)}/stage_{self._stage}"
        try:
            state = [split_entries(store.state_of(write_checkpoint.version))]
        except LookupError as error:
            post(ev.CheckpointFailed(write_checkpoint.version, f"{part}: {error}"))
            return
        earlier = self._threads[-2:]
        copying = Copying()

        def write():
            for thread in earlier[:-1]:
                thread.join()
            try:
                return_freed_memory()  # the copy need not fit into the holes of the heap
                parts = copy_of(state.pop())  # the list gives up the last reference to the state
                copying.end()
                for thread in earlier[-1:]:
                    thread.join()
                post(self._write(write_checkpoint, parts, copying))
            except BaseException as error:
                post(error)
            finally:
                copying.end()

        self._copying = copying
        self._threads = [*earlier[-1:], threading.Thread(target=write, name="checkpoint")]
        try:
            self._threads[-1].start()
        except RuntimeError as error:  # the system has no room for another thread
            del self._threads[-1]
            copying.end()
            post(ev.CheckpointFailed(write_checkpoint.version, f"{part}: {error}"))

    def _write(
        self, write_checkpoint: ev.WriteCheckpoint, entries: dict[str, dict], copying: Copying
    ) -> ev.WroteCheckpoint | ev.CheckpointFailed:
        from jaxdt.runtime.storage.entries import write_entries

        assert self._stage is not None, "the coordinator has no state"
        version, generation = write_checkpoint.version, write_checkpoint.generation
        of_stage = (version, self._stage, self._n_stages, self._about, {})
        about = Manifest(self._run, generation, write_checkpoint.n_reseeds, *of_stage)
        folder = step_folder(self._run_dir, version)
        temporary = temporary_part(self._run_dir, version)
        try:
            write_entries(temporary, entries)
            manifest = seal(temporary, about)
            part = put_in_place(temporary, self._run_dir, manifest)
        except (OSError, ValueError) as error:  # Orbax and tensorstore raise these for a disk that refuses
            other = self._written_by_another(version, generation)
            if other:
                return ev.WroteCheckpoint(version, copying.waited_s, other.digest, other.n_words, generation)
            return ev.CheckpointFailed(version, f"{folder}/stage_{self._stage}: {str(error).splitlines()[0]}")
        self._manifests[manifest.digest] = (part, manifest)
        return ev.WroteCheckpoint(version, copying.waited_s, manifest.digest, manifest.n_words, generation)

    def save_owed(
        self, write: ev.WriteOwed, store: Any, post: Callable[[WriteFailedReport | BaseException], None]
    ) -> None:
        """Write what the store's peer owes, on a thread. Nobody writes to these vectors any more. `post` hears if the
        disk refuses; an exception must end the process."""
        debtor, owed = store.debtor, store.owed
        folder = step_folder(self._run_dir, write.version)

        def save() -> WriteFailedReport | None:
            try:
                write_owed(folder, debtor, self._run, write.generation, owed)
            except OSError as error:
                return WriteFailedReport(refusal(error, str(folder)))
            return None

        self._in_thread(save, lambda failure: post(failure) if failure else None)

    def _written_by_another(self, version: int, generation: int) -> Manifest | None:
        """The part that another process has written instead, if the checkpoint is complete with that: then ours has
        been deleted as unfinished."""
        folder = step_folder(self._run_dir, version)
        if not (folder / COMPLETE).exists():
            return None
        with contextlib.suppress(BadInput):  # the mark is damaged, or the part is on another disk
            own = [part for part in complete_record(folder).checkpoint.parts if part.stage == self._stage]
            manifests = [read_manifest(folder / part_name(part.stage, part.digest)) for part in own]
            return next((m for m in manifests if (m.run, m.generation) == (self._run, generation)), None)
        return None

    @property
    def disk(self) -> str:
        """The id of the disk: equal for the peers that see one another's files, different for all others."""
        return disk_id(self._run_dir)

    # ------------------------------------------------------------------------------------------------- parts of others

    def find(self, action: ev.FindPart, post: Callable[[ev.FoundPart | BaseException], None]) -> None:
        """Look for a whole part on this disk, on a thread that calls `post` with the answer."""

        def look() -> ev.FoundPart:
            manifest = self._whole(action.version, action.digest)
            if manifest:
                return ev.FoundPart(action.digest, manifest.n_words)
            return ev.FoundPart(action.digest, 0, slices_here(self._run_dir, action.version, action.digest))

        self._in_thread(look, post)

    def keep(self, part: ev.Part, post: Callable[[ev.KeptPart | BaseException], None]) -> None:
        """Make a part whose slices have all been put here durable, on a thread that calls `post` with the outcome."""

        def keep() -> ev.KeptPart:
            if self._whole(part.version, part.digest):
                return ev.KeptPart(part.digest)  # another process of this host was faster
            try:
                keep_fetched(self._run_dir, part)
            except (OSError, BadInput) as error:
                return ev.KeptPart(part.digest, f"{self._run_dir}: {error}")
            self._whole(part.version, part.digest)
            return ev.KeptPart(part.digest)

        self._in_thread(keep, post)

    def _in_thread(self, answer: Callable[[], Any], post: Callable[[Any], None]) -> None:
        def work():
            try:
                post(answer())
            except BaseException as error:
                post(error)

        try:
            threading.Thread(target=work, name="parts").start()
        except RuntimeError:  # the system has no room for another thread: the loop does it, and stands still meanwhile
            work()

    def _whole(self, version: int, digest: str) -> Manifest | None:
        path = find_part(part_folders(self._run_dir, version, self._resumed), digest)
        if path is None:
            return None
        try:
            manifest = whole_manifest(path, digest)
        except BadInput as problem:
            print(f"{problem}; it is fetched from another host where one holds it", flush=True)
            return None
        self._manifests[digest] = (path, manifest)
        return manifest

    def read_slice(self, key: ev.StateKey) -> np.ndarray:
        """A slice of a part that has been found here, with its checksum. BadInput if it cannot be read any more."""
        path, manifest = self._manifests[key.part]
        try:
            return with_checksum(read_slice(path, manifest, key.lo, key.hi))
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({error.strerror})") from None

    def put_slice(self, key: ev.StateKey, words: np.ndarray) -> None:
        """Hold a slice that has been received, with its checksum. BadInput if that is not its own."""
        check_slice(words, key)
        write_slice(self._run_dir, key, words[:-1])

    def mark_complete(
        self, checkpoint: ev.Checkpoint, post: Callable[[WriteFailedReport | BaseException], None]
    ) -> threading.Thread:
        """Mark the checkpoint complete, and delete old ones on a thread, since what stays is read before. Its folder
        may not be here: another process of this host knew of newer checkpoints first, and has marked and deleted it.
        `post` hears if the disk refuses; an exception must end the process."""

        def retain():
            try:
                with _alone(self._run_dir / "checkpoints"):
                    sweep(self._run_dir, checkpoint)
                    if prune(self._run_dir, self._keep, self._resumed, checkpoint.version):
                        discard_older_fetched(self._run_dir, checkpoint.version)
            except OSError as error:
                post(WriteFailedReport(f"old checkpoints: {refusal(error, str(self._run_dir))}"))
            except BaseException as error:
                post(error)

        with contextlib.suppress(FileNotFoundError):
            mark_complete(self._run_dir, checkpoint, self._about)
        thread = threading.Thread(target=retain, name="retention")
        with contextlib.suppress(RuntimeError):  # no room for a thread: the next checkpoint deletes what is old
            thread.start()
            self._retaining = [*filter(threading.Thread.is_alive, self._retaining), thread]
        return thread

    def end(self) -> None:
        """Wait until the old checkpoints that are being deleted are gone: what a process leaves half deleted when it
        ends takes room until the next run deletes it. A disk that hangs keeps the process for DELETED_S at most."""
        deadline_s = time.monotonic() + DELETED_S
        for thread in self._retaining:
            thread.join(max(0.0, deadline_s - time.monotonic()))


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Inside this context the other processes of this host wait: what one of them has read and deleted, none has to
    read again. A disk that takes no lock does without."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
