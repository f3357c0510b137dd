"""Writes a process's part of each checkpoint on threads of its own, and marks checkpoints complete."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdt.protocol.events import Checkpoint, CheckpointFailed, WroteCheckpoint
from jaxdt.runtime.storage.checkpoint import COMPLETE, complete_record, mark_complete, prune, split_entries, sweep
from jaxdt.runtime.storage.parts import (
    Manifest,
    part_name,
    put_in_place,
    read_manifest,
    seal,
    step_folder,
    temporary_part,
)


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
    keep: how many complete checkpoints are kept, the newest ones.
    stage: of the peer; None for the coordinator, which writes no part."""

    def __init__(self, run_dir: Path, run: str, about: dict[str, Any], keep: int, stage: int | None = None):
        self._run_dir = run_dir
        self._run = run
        self._about = about
        self._keep = keep
        self._stage = stage
        self._threads: list[threading.Thread] = []
        self._copying: Copying | None = None

    def wait(self) -> None:
        """Wait until the state that `save` was last called with has been copied, and may change."""
        if self._copying:
            self._copying.wait()

    def save(
        self,
        version: int,
        generation: int,
        store: Any,
        post: Callable[[WroteCheckpoint | CheckpointFailed | BaseException], None],
    ) -> None:
        """Write the store's state as `version`, on a thread that calls `post` with the outcome. An exception must end
        the process. The state's arrays must not change until `wait` has returned."""
        state = [split_entries(store.parameter_versions.state)]
        earlier = self._threads[-2:]
        copying = Copying()

        def write():
            for thread in earlier[:-1]:
                thread.join()
            try:
                parts = jax.tree.map(np.array, state.pop())  # the list gives up the last reference to the state
                copying.end()
                for thread in earlier[-1:]:
                    thread.join()
                post(self._write(version, generation, parts, copying))
            except BaseException as error:
                post(error)
            finally:
                copying.end()

        self._copying = copying
        self._threads = [*earlier[-1:], threading.Thread(target=write, name="checkpoint")]
        self._threads[-1].start()

    def _write(
        self, version: int, generation: int, entries: dict[str, dict], copying: Copying
    ) -> WroteCheckpoint | CheckpointFailed:
        assert self._stage is not None, "the coordinator has no state"
        folder = step_folder(self._run_dir, version)
        temporary = temporary_part(self._run_dir, version)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(temporary.absolute(), entries)
            manifest = seal(temporary, Manifest(self._run, generation, version, self._stage, self._about, {}))
            put_in_place(temporary, self._run_dir, manifest)
        except (OSError, ValueError) as error:  # Orbax and tensorstore raise these for a disk that refuses
            other = self._written_by_another(version, generation)
            if other:
                return WroteCheckpoint(version, copying.waited_s, other.digest, other.n_words)
            return CheckpointFailed(version, f"{folder}/stage_{self._stage}: {str(error).splitlines()[0]}")
        return WroteCheckpoint(version, copying.waited_s, manifest.digest, manifest.n_words)

    def _written_by_another(self, version: int, generation: int) -> Manifest | None:
        """The part that another process has written instead, if the checkpoint is complete with that: then ours has
        been deleted as unfinished."""
        folder = step_folder(self._run_dir, version)
        if not (folder / COMPLETE).exists():
            return None
        for part in complete_record(folder).checkpoint.parts:
            manifest = read_manifest(folder / part_name(part.stage, part.digest))
            if (manifest.run, manifest.generation, manifest.stage) == (self._run, generation, self._stage):
                return manifest
        return None

    def mark_complete(self, checkpoint: Checkpoint) -> None:
        """Mark the checkpoint complete and delete old ones. Its folder may not be here: this host holds none of its
        parts, or another process of this host knew of newer checkpoints first, and has marked and deleted it."""
        with contextlib.suppress(FileNotFoundError):
            mark_complete(self._run_dir, checkpoint, self._about)
        sweep(self._run_dir, checkpoint)
        prune(self._run_dir, self._keep)
