"""Checkpoints: Orbax arrays per layer, so that a run can resume with other stages.

  <run_dir>/checkpoints/00000050/stage_0/       one stage's part: {entry: {"params": ..., "optimizer": [leaves]}};
                                                with delayed updates also "before", the parameters after 49 updates
  <run_dir>/checkpoints/00000050/stage_0.json   a digest per entry, compared when the entry is read
  <run_dir>/checkpoints/00000050/complete.json  written by the coordinator after every stage's part is durable

An entry has a global name (tok, pos, block_007, head), which does not depend on the stages. A folder without
complete.json is not a checkpoint, so a crash during writing never hides the last good one. complete.json holds the
number of stages: an earlier attempt at the same version may have left parts of other stages, which are not read.
"""

import contextlib
import errno
import json
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdt.protocol.events import CheckpointFailed, WroteCheckpoint
from jaxdt.runtime.storage.durable import write_durably
from jaxdt.spec import serialize, versions
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput

COMPLETE = "complete.json"


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

    about: the fields in which a checkpoint must agree with the run (about_run).
    keep: how many complete checkpoints are kept, the newest ones."""

    def __init__(self, run_dir: Path, about: dict, keep: int, stage: int | None = None):
        self._run_dir = run_dir
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
        self, version: int, store: Any, post: Callable[[WroteCheckpoint | CheckpointFailed | BaseException], None]
    ) -> None:
        """Write the store's state as `version`, on a thread that calls `post` with the outcome. An exception must end
        the process. The state's arrays must not change until `wait` has returned."""
        state = [split_entries(store.parameter_versions.state)]
        folder = step_folder(self._run_dir, version) / f"stage_{self._stage}"
        # A process that is thought to be dead may still be writing the same part, so each has a folder of its own.
        temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
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
                # A checkpoint that is written again is incomplete until all of it has been written again.
                (folder.parent / COMPLETE).unlink(missing_ok=True)
                with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                    checkpointer.save(temporary.absolute(), parts)
                put_in_place(temporary, folder)
                digests = {name: digest(entry) for name, entry in parts.items()}
                write_durably(folder.with_suffix(".json"), json.dumps(digests).encode())
            except (OSError, ValueError) as error:  # Orbax and tensorstore raise these for a disk that refuses
                if (folder.parent / COMPLETE).exists():
                    post(WroteCheckpoint(version, copying.waited_s))  # another process wrote the part, and deleted ours
                else:
                    post(CheckpointFailed(version, f"{folder}: {str(error).splitlines()[0]}"))
            except BaseException as error:
                post(error)
            else:
                post(WroteCheckpoint(version, copying.waited_s))
            finally:
                copying.end()

        self._copying = copying
        self._threads = [*earlier[-1:], threading.Thread(target=write, name="checkpoint")]
        try:
            self._threads[-1].start()
        except RuntimeError as error:  # the system has no room for another thread
            del self._threads[-1]
            copying.end()
            post(CheckpointFailed(version, f"{folder}: {error}"))

    def mark_complete(self, version: int, generation: int) -> None:
        """Every stage's part is durable: mark the checkpoint complete and delete old ones. Its folder may be gone:
        another process of this host, which knew of newer checkpoints first, has then marked and deleted it."""
        with contextlib.suppress(FileNotFoundError):
            mark_complete(self._run_dir, version, self._about | {"generation": generation})
        sweep(step_folder(self._run_dir, version))
        prune(self._run_dir, self._keep)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`. What was there, from an earlier attempt or from another process, is deleted."""
    old = temporary.with_name(f"{temporary.name}.old")
    while True:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
        try:
            temporary.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another process put its own there in between
                raise


def sweep(folder: Path) -> None:
    """Delete the unfinished parts in the folder of a complete checkpoint, left by processes that died."""
    for path in folder.glob("stage_*.*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def about_run(config: RunConfig, data_checksum: str) -> dict:
    """The fields in which a checkpoint must agree with the run that resumes from it: model, optimizer and tokens."""
    return {"model": serialize.write(config.model), "optimizer": config.optim.name, "data": data_checksum}


@dataclass(frozen=True)
class Stamp:
    """The version of a checkpoint (updates seen) and its generation (how often the run had been rolled back)."""

    version: int
    generation: int


def check_resumable(folder: Path, about: dict) -> Stamp:
    """The stamp of a complete checkpoint. BadInput names the first field of `about` in which the checkpoint differs."""
    stored = complete_record(folder)
    for name, expected in about.items():
        got = stored.get(name)
        if isinstance(expected, dict) and isinstance(got, dict):
            field = next((f for f in sorted(expected | got) if got.get(f) != expected.get(f)), None)
            if field is not None:
                raise BadInput(
                    f"{folder}: made with {name}.{field} {got.get(field)!r}, the config has {expected.get(field)!r}"
                )
        elif got != expected:
            raise BadInput(f"{folder}: made with {name} {got!r}, this run has {expected!r}")
    return Stamp(stored["version"], stored["generation"])


def complete_record(folder: Path) -> dict:
    """The content of a checkpoint's complete.json; BadInput if it is damaged."""
    path = folder / COMPLETE
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({str(error).splitlines()[0]}), expected what a run wrote") from None
    versions.check_checkpoint(record.get("format") if isinstance(record, dict) else None, str(path))
    kinds = {"version": int, "generation": int, "stages": int, "model": dict}
    for name, kind in kinds.items():
        got = record.get(name) if isinstance(record, dict) else None
        if type(got) is not kind:
            raise BadInput(f"{path}: {name}: got {got!r:.60}, expected {kind.__name__}")
    if folder.name != step_folder(folder, record["version"]).name:
        raise BadInput(f"{path}: version: got {record['version']}, expected the {folder.name} of its folder")
    return record


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in run_dir.glob(f"checkpoints/*/{COMPLETE}"))


def prune(run_dir: Path, keep: int) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints, and incomplete ones that are older than these. Returns the
    deleted folders."""
    newest = complete_checkpoints(run_dir)[-keep:]
    old = [path for path in sorted(run_dir.glob("checkpoints/*")) if newest and path < newest[0]]
    for path in old:
        (path / COMPLETE).unlink(missing_ok=True)  # first, so that a half-deleted checkpoint never counts
        shutil.rmtree(path, ignore_errors=True)
    return old


def split_entries(state: tuple[Any, ...]) -> dict[str, dict]:
    """Split a state of ParameterVersions into {entry: {"params": tree, "optimizer": leaves}}, with delayed updates also
    "before": tree. Every subtree of the optimizer's state that mirrors the parameters is split like them. Scalars such
    as step counts go into every entry."""
    params, opt_state, *before = state

    def mirrors(tree: Any) -> bool:
        return isinstance(tree, dict) and set(tree) == set(params)

    def optimizer_leaves(name: str) -> list:
        own = jax.tree.map(lambda tree: tree[name] if mirrors(tree) else tree, opt_state, is_leaf=mirrors)
        return jax.tree.leaves(own)

    entries = {name: {"params": params[name], "optimizer": optimizer_leaves(name)} for name in params}
    for tree in before:
        for name, entry in entries.items():
            entry["before"] = tree[name]
    return entries


def join_entries(entries: dict[str, dict], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inverse of split_entries, for the structure of `like`. A run with delayed updates can use a checkpoint of a
    run
    without them: both of its versions are then the same."""
    params, opt_state, *before = like

    def mirrors(tree: Any) -> bool:
        return isinstance(tree, dict) and set(tree) == set(params)

    nodes, structure = jax.tree.flatten(opt_state, is_leaf=mirrors)
    iterators = {name: iter(entries[name]["optimizer"]) for name in params}
    joined = []
    for node in nodes:
        if mirrors(node):
            joined.append({name: _rebuilt(node[name], iterators[name]) for name in params})
        else:
            joined.append([next(iterator) for iterator in iterators.values()][0])
    joined_params = {name: entries[name]["params"] for name in params}
    joined_before = tuple(
        {name: entries[name].get("before", entries[name]["params"]) for name in params} for _ in before
    )
    return joined_params, jax.tree.unflatten(structure, joined), *joined_before


def _rebuilt(like: Any, leaves) -> Any:
    return jax.tree.map(lambda _: next(leaves), like)


def leaves(entry: dict) -> list[np.ndarray]:
    """All arrays of an entry."""
    return jax.tree.leaves(entry)


def step_folder(run_dir: Path, version: int) -> Path:
    """The folder of the checkpoint of `version`."""
    return run_dir / "checkpoints" / f"{version:08d}"


def mark_complete(run_dir: Path, version: int, about: dict) -> None:
    """Write complete.json, with the fields of `about`."""
    write_durably(
        step_folder(run_dir, version) / COMPLETE,
        json.dumps({"format": str(versions.CHECKPOINT), "version": version} | about).encode(),
    )


def newest(run_dir: Path) -> Path:
    """The newest complete checkpoint of a run; BadInput if there is none."""
    complete = complete_checkpoints(run_dir)
    if not complete:
        raise BadInput(f"{run_dir}: holds no complete checkpoint")
    return complete[-1]


def load_entries(folder: Path, names: list[str] | None = None) -> dict[str, dict]:
    """Entries of a complete checkpoint as numpy arrays: all, or those in `names`."""
    entries: dict[str, dict] = {}
    parts = [folder / f"stage_{stage}" for stage in range(complete_record(folder)["stages"])]
    for part in filter(Path.is_dir, parts):  # a host may hold only the parts of its own peers
        entries |= _load_part(part, names, entries)
    required = names or []
    missing = sorted(set(required) - set(entries))
    if missing:
        raise BadInput(f"{folder}: holds no {missing[0]}, expected all of {', '.join(required)}")
    return entries


def _load_part(part: Path, names: list[str] | None, known: Collection[str]) -> dict[str, dict]:
    """Entries of one stage's part, each compared with its digest: those in `names`, or all, without those in
    `known`."""
    try:
        digests = json.loads(part.with_suffix(".json").read_text())
        if not isinstance(digests, dict):
            raise ValueError(f"{part.name}.json: got {digests!r:.40}, expected a digest per entry")
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            about = checkpointer.metadata(part.absolute()).item_metadata
            if about is None:
                raise BadInput(f"{part}: its metadata cannot be read")
            wanted = {n: leaf for n, leaf in about.tree.items() if n not in known and (names is None or n in names)}
            if not wanted:
                return {}
            item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), wanted)
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
            arguments = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
            entries = checkpointer.restore(part.absolute(), args=arguments)
    except (OSError, ValueError) as error:
        raise BadInput(f"{part}: cannot be read ({str(error).splitlines()[0]})") from None
    for name, entry in entries.items():
        if digest(entry) != digests.get(name):
            raise BadInput(f"{part}: {name} has digest {digest(entry)}, expected {digests.get(name)}")
    return entries


def digest(entry: dict) -> int:
    """CRC-32 over an entry's arrays, in the order of their names."""
    total = 0
    for leaf in leaves(entry):
        total = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, total)
    return total
