"""Checkpoints: Orbax arrays per layer, so that a run can resume with other stages.

  <run_dir>/checkpoints/00000050/stage_0-1f0c5a27e9d3b846/
      one stage's part (jaxdt.runtime.storage.parts): {entry: {"params": ..., "optimizer": [leaves]}}; with delayed
      updates also "before", the parameters after 49 updates
  <run_dir>/checkpoints/00000050/complete.json
      which parts belong to it, by their digests, and on which disks they are; written on every host that holds one,
      after the coordinator has made durable that each part is on enough disks

An entry has a global name (tok, pos, block_007, head), which does not depend on the stages. A folder without
complete.json is not a checkpoint, so a crash during writing never hides the last good one. Parts that complete.json
does not name, of an earlier attempt or of a process that was thought to be dead, are not read.
"""

import contextlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxdt.protocol.events import Checkpoint, Part
from jaxdt.runtime.storage.durable import read_json, write_json
from jaxdt.runtime.storage.parts import Manifest, part_name, step_folder, whole_manifest
from jaxdt.spec import serialize, versions
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput, shell_line

COMPLETE = "complete.json"


def about_run(config: RunConfig, data_checksum: str) -> dict:
    """The fields in which a checkpoint must agree with the run that resumes from it: model, optimizer and tokens, and
    an outer optimizer if the run has one."""
    about = {"model": serialize.write(config.model), "optimizer": config.optim.state_name, "data": data_checksum}
    outer = config.sync.groups.outer
    return about if outer == "none" else about | {"outer": outer}


@dataclass(frozen=True)
class CompleteRecord:
    """The content of complete.json. `copies`: on how many disks each part is, at least. `about`: see about_run.
    `format`: see jaxdt.spec.versions."""

    checkpoint: Checkpoint
    copies: int
    about: dict[str, Any]
    format: str = str(versions.CHECKPOINT)


def complete_record(folder: Path) -> CompleteRecord:
    """The record of a complete checkpoint; BadInput if it is damaged."""
    path = folder / COMPLETE
    content = read_json(path)
    versions.check_checkpoint(content.get("format") if serialize.is_object(content) else None, str(path))
    record = serialize.read_known(CompleteRecord, content, str(path))
    if folder.name != step_folder(folder, record.checkpoint.version).name:
        raise BadInput(f"{path}: version: got {record.checkpoint.version}, expected the {folder.name} of its folder")
    return record


def mark_complete(run_dir: Path, checkpoint: Checkpoint, about: dict[str, Any]) -> None:
    """Write complete.json, unless it is there already."""
    folder = step_folder(run_dir, checkpoint.version)
    record = CompleteRecord(checkpoint, checkpoint.n_copies, about)
    if not _is_marked(folder, record):
        write_json(folder / COMPLETE, serialize.write(record))


def _is_marked(folder: Path, record: CompleteRecord) -> bool:
    """Whether a folder has this record, be it of another minor version."""
    with contextlib.suppress(BadInput):
        return (folder / COMPLETE).exists() and replace(complete_record(folder), format=record.format) == record
    return False


def check_resumable(folder: Path, about: dict[str, Any]) -> Checkpoint:
    """A complete checkpoint, for the run to begin with. BadInput names the first field of `about` in which the
    checkpoint differs."""
    record = complete_record(folder)
    _check_about(folder, record.about, about)
    return record.checkpoint


def _check_about(folder: Path, made_with: dict[str, Any], about: dict[str, Any]) -> None:
    """BadInput names the first field in which a checkpoint differs from a run."""
    for name, expected in about.items():
        got = made_with.get(name)
        if isinstance(expected, dict) and isinstance(got, dict):
            field = next((f for f in sorted(expected | got) if got.get(f) != expected.get(f)), None)
            if field is not None:
                raise BadInput(
                    f"{folder}: made with {name}.{field} {got.get(field)!r}, the config has {expected.get(field)!r}"
                )
        elif got != expected and name == "data":
            texts = f"made with tokens of SHA256 {got!s:.12}, this run has {expected!s:.12}"
            raise BadInput(f"{folder}: {texts}; data.path must name the text that the run began with")
        elif got != expected:
            raise BadInput(f"{folder}: made with {name} {got!r}, this run has {expected!r}")


def complete_checkpoints(run_dir: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in run_dir.glob(f"checkpoints/*/{COMPLETE}"))


def prune(run_dir: Path, keep: int, resumed: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep` complete checkpoints, and incomplete ones that are older than these. `resumed`,
    with which the run began, stays: a process that is started again begins with it. Returns the deleted folders."""
    newest = complete_checkpoints(run_dir)[-keep:]
    begun = resumed.resolve() if resumed else None
    found = [path for path in sorted(run_dir.glob("checkpoints/*")) if path.resolve() != begun]
    old = [path for path in found if newest and path < newest[0]]
    for path in old:
        (path / COMPLETE).unlink(missing_ok=True)  # first, so that a half-deleted checkpoint never counts
        shutil.rmtree(path, ignore_errors=True)
    return old


def sweep(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Delete what the folder of a complete checkpoint holds beside it: unfinished parts of processes that died, and
    parts that another process wrote as well."""
    folder = step_folder(run_dir, checkpoint.version)
    names = {part_name(part.stage, part.digest) for part in checkpoint.parts}
    for path in folder.glob("*/"):
        if path.name not in names:
            shutil.rmtree(path, ignore_errors=True)


def newest(run_dir: Path) -> Path:
    """The newest complete checkpoint of a run; BadInput if there is none."""
    complete = complete_checkpoints(run_dir)
    if not complete:
        when = "every train.checkpoint_every_steps steps and at its end"
        now = shell_line("python", "scripts/fleet.py", "checkpoint", f"--run_dir={run_dir}")
        raise BadInput(f"{run_dir}: holds no complete checkpoint; a run writes one {when}, and at once for {now}")
    return complete[-1]


def newest_whole(run_dir: Path, about: dict[str, Any]) -> tuple[Path, list[str]]:
    """The newest checkpoint of which every part is here and as it was written, and one line for each newer one that is
    not. BadInput if none is whole, or if the run cannot resume from it.

    It need not have been marked complete: the coordinator may be gone, and every peer have written its part. Then the
    parts have to be of one run and generation, which has committed each step once, and the checkpoint is marked
    here."""
    problems: list[str] = []
    for folder in sorted(run_dir.glob("checkpoints/*"), reverse=True):
        try:
            record = _record_or_unmarked(folder)
            if record is None:
                continue
        except BadInput as problem:
            problems.append(str(problem))
            continue
        _check_about(folder, record.about, about)
        try:
            for part in record.checkpoint.parts:
                whole_manifest(_path(folder, part), part.digest)
        except BadInput as problem:
            problems.append(str(problem))
            continue
        mark_complete(run_dir, record.checkpoint, record.about)
        return folder, problems
    raise BadInput(problems[0] if problems else f"{run_dir}: holds no complete checkpoint")


def _record_or_unmarked(folder: Path) -> CompleteRecord | None:
    """The record of a checkpoint, or one made of its parts where nobody has marked it; None if parts are lacking.
    BadInput for a record of another format, and for a damaged one unless the parts are all here."""
    problem: BadInput | None = None
    if (folder / COMPLETE).exists():
        try:
            read_json(folder / COMPLETE)
        except BadInput as error:
            problem = error
        else:
            return complete_record(folder)
    found: dict[tuple[str, int], dict[int, Manifest]] = {}
    for path in sorted(folder.glob("stage_*")):
        with contextlib.suppress(BadInput):  # a part that is damaged is none
            manifest = whole_manifest(path)
            found.setdefault((manifest.run, manifest.generation), {})[manifest.stage] = manifest
    for parts in found.values():
        first = next(iter(parts.values()))
        if set(parts) == set(range(first.n_stages)):
            stages = [parts[stage] for stage in sorted(parts)]
            held = tuple(Part(m.version, m.stage, m.digest, m.n_words) for m in stages)
            checkpoint = Checkpoint(first.version, first.generation, held, first.n_reseeds)
            return CompleteRecord(checkpoint, 1, first.about)
    if problem:
        raise problem
    return None


def _path(folder: Path, part: Part) -> Path:
    return folder / part_name(part.stage, part.digest)
