"""Checkpoints: Orbax arrays per layer, so that a run can resume with other stages.

  <run_dir>/checkpoints/00000050/stage_0-1f0c5a27e9d3b846/
      one stage's part (jaxdt.runtime.storage.parts): {entry: {"params": ..., "optimizer": [leaves]}}; with delayed
      updates also "before", the parameters after 49 updates
  <run_dir>/checkpoints/00000050/complete.json
      which parts belong to it, by their digests, and on which disks they are; written on every host of the run, after
      the coordinator has made durable that each part is on enough disks

An entry has a global name (tok, pos, block_007, head), which does not depend on the stages. A folder without
complete.json is not a checkpoint, so a crash during writing never hides the last good one. Parts that complete.json
does not name, of an earlier attempt or of a process that was thought to be dead, are not read.

A folder or file of any other name is the user's: it is neither read nor deleted. A checkpoint counts, for whoever reads
or deletes, only while each part that this disk should hold is as it was written (`examine`).
"""

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxdt.protocol import events as ev
from jaxdt.run import serialize, versions
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, read_text, shell_line, why
from jaxdt.run.model import recorded, renamed
from jaxdt.run.run_folder import canonical, read_json
from jaxdt.runtime.storage.durable import DISK_ID, disk_id, write_json
from jaxdt.runtime.storage.owed import OWED
from jaxdt.runtime.storage.parts import (
    Manifest,
    part_name,
    read_manifest,
    step_folder,
    whole_manifest,
    whole_unless_changed,
)

COMPLETE = "complete.json"
PART = re.compile(r"stage_\d+-[0-9a-f]{16}")
UNFINISHED = re.compile(r"writing\.[0-9a-f]+(\..+)?")
COMPLETE_FILE = re.compile(r"complete\.json(\.\d+\.\d+\.tmp)?")
WRITTEN = (PART, UNFINISHED, COMPLETE_FILE, OWED)  # what a run writes into a step's folder


def about_run(config: RunConfig, data_checksum: str) -> dict:
    """The fields in which a checkpoint must agree with the run that resumes from it: model, optimizer and tokens, an
    outer optimizer if the run has one, and where frozen parameters come from, which it does not hold."""
    model = recorded(config.model)
    model.pop("source", None)  # of a module of one's own: another one may make the same model
    if "facts" in model:
        model["facts"] = config.model.facts.structure
    about = {"model": model, "optimizer": config.optim.state_name, "data": data_checksum}
    if config.model.facts.frozen:
        about["frozen"] = f"model {config.init.digest}" if config.init.digest else f"seed {config.train.seed}"
    outer = config.sync.groups.outer
    return about if outer == "none" else about | {"outer": outer}


@dataclass(frozen=True)
class CompleteRecord:
    """The content of complete.json. `copies`: on how many disks each part is, at least. `about`: see about_run.
    `format`: see jaxdt.run.versions."""

    checkpoint: ev.Checkpoint
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


def mark_complete(run_dir: Path, checkpoint: ev.Checkpoint, about: dict[str, Any]) -> None:
    """Write complete.json, unless it is there already. A host whose disk holds no part gets it, too, so that it knows
    where the parts are. Where a part should be and there is no folder, it was deleted since, and is not made again."""
    folder = step_folder(run_dir, checkpoint.version)
    record = CompleteRecord(checkpoint, checkpoint.n_copies, about)
    disk = disk_id(run_dir)
    if not any(_is_here(part, disk) for part in checkpoint.parts):
        folder.mkdir(parents=True, exist_ok=True)
    if not _is_marked(folder, record):
        write_json(folder / COMPLETE, serialize.write(record))


def _is_marked(folder: Path, record: CompleteRecord) -> bool:
    """Whether a folder has this record, be it of another minor version."""
    with contextlib.suppress(BadInput):
        return (folder / COMPLETE).exists() and replace(complete_record(folder), format=record.format) == record
    return False


def _disk_of(folder: Path) -> str:
    """The id of the disk of a checkpoint's folder, '' if no process of a run has given it one."""
    path = folder.parent.parent / DISK_ID
    return read_text(path) if path.exists() else ""


def _is_here(part: ev.Part, disk: str) -> bool:
    """Whether this disk should hold a part, as far as its record says where it is."""
    return not disk or not part.disks or disk in part.disks


def check_resumable(folder: Path, about: dict[str, Any]) -> ev.Checkpoint:
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
            got = renamed(got) if name == "model" else got
            field = next((f for f in sorted(expected | got) if got.get(f) != expected.get(f)), None)
            if field is not None:
                raise BadInput(
                    f"{folder}: made with {name}.{field} {got.get(field)!r}, the config has {expected.get(field)!r}"
                )
        elif got != expected and name == "data":
            texts = f"made with tokens of SHA256 {got!s:.12}, this run has {expected!s:.12}"
            raise BadInput(f"{folder}: {texts}; data.path must name the text that the run began with")
        elif got != expected and name == "frozen":
            raise BadInput(
                f"{folder}: made beside the frozen parameters of {got!s:.22}, this run has those of {expected!s:.22}; "
                "they are no part of it: --init_from or train.seed must be those with which the run began"
            )
        elif got != expected:
            raise BadInput(f"{folder}: made with {name} {got!r}, this run has {expected!r}")


# ---------------------------------------------------------------------------------------------------- what is whole


@dataclass(frozen=True)
class Found:
    """A checkpoint whose parts are all as they were written, except `elsewhere`: those that only other disks hold."""

    folder: Path
    record: CompleteRecord
    elsewhere: tuple[str, ...] = ()

    @property
    def version(self) -> int:
        return self.record.checkpoint.version

    @property
    def lacking(self) -> str:
        """One line about the parts that are elsewhere."""
        lacks = f"{self.folder}: lacks {', '.join(self.elsewhere)}, expected all parts"
        return f"{lacks}; copy them from that folder on other hosts: each lies where a peer of its stage ran"


def step_folders(run_dir: Path) -> list[Path]:
    """The folders in which a run writes checkpoints, oldest first: their names are those of steps."""

    def is_step(path: Path) -> bool:
        name = path.name
        return name.isascii() and name.isdigit() and name == f"{int(name):08d}" and path.is_dir()

    return sorted(filter(is_step, (run_dir / "checkpoints").glob("*")), key=lambda path: int(path.name))


def examine(
    folder: Path, about: dict[str, Any] | None = None, check: Callable[[Path, str], Manifest] = whole_manifest
) -> Found | None:
    """The checkpoint of a step's folder; None if it was never complete. BadInput, in one line, if it is damaged, if it
    lacks a part that this disk should hold, or if it does not agree with `about`.

    It need not have been marked complete, and the mark may be damaged: the coordinator may be gone, and every peer have
    written its part. Then the parts have to be of one run and generation, which has committed each step once."""
    try:
        return _examined(folder, about or {}, check)
    except OSError as error:
        raise BadInput(f"{error.filename or folder}: cannot be read ({why(error)})") from None
    except RecursionError:
        raise BadInput(f"{folder}: a file in it is nested too deeply, expected what a run wrote") from None


def _examined(folder: Path, about: dict[str, Any], check: Callable[[Path, str], Manifest]) -> Found | None:
    record, damage = _marked(folder)
    found = None
    if record:
        _check_about(folder, record.about, about)
        try:
            found = _with_parts(folder, record, check)
        except BadInput as problem:
            damage = problem
        if found and not found.elsewhere:
            return found
    if made := _made_of_parts(folder):
        _check_about(folder, made.about, about)
        return Found(folder, made)
    if damage:
        raise damage
    return found


def _marked(folder: Path) -> tuple[CompleteRecord | None, BadInput | None]:
    """The record of a folder, if it has one, or how that is damaged. BadInput for one of another format or step."""
    if not (folder / COMPLETE).exists():
        return None, None
    try:
        read_json(folder / COMPLETE)
    except BadInput as damage:
        return None, damage
    return complete_record(folder), None


def _with_parts(folder: Path, record: CompleteRecord, check: Callable[[Path, str], Manifest]) -> Found:
    elsewhere = list[str]()
    for part in record.checkpoint.parts:
        path = folder / part_name(part.stage, part.digest)
        if path.exists():
            check(path, part.digest)
        else:
            elsewhere.append(path.name)
            if _is_here(part, _disk_of(folder)):
                raise BadInput(Found(folder, record, tuple(elsewhere)).lacking)
    return Found(folder, record, tuple(elsewhere))


def _made_of_parts(folder: Path) -> CompleteRecord | None:
    """A record of the parts that are in a folder, if they are those of all stages."""
    found: dict[tuple[str, int], dict[int, Manifest]] = {}
    for path in _parts_in(folder):
        with contextlib.suppress(BadInput):  # a part that is damaged is none
            manifest = whole_manifest(path)
            if manifest.version == int(folder.name):
                found.setdefault((manifest.run, manifest.generation), {})[manifest.stage] = manifest
    for parts in found.values():
        first = next(iter(parts.values()))
        if set(parts) == set(range(first.n_stages)):
            stages = [parts[stage] for stage in sorted(parts)]
            held = tuple(ev.Part(m.version, m.stage, m.digest, m.n_words) for m in stages)
            checkpoint = ev.Checkpoint(first.version, first.generation, held, first.n_reseeds)
            return CompleteRecord(checkpoint, 1, first.about)
    return None


def _parts_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("stage_*") if PART.fullmatch(path.name))


def newest_whole(run_dir: Path, about: dict[str, Any], elsewhere: bool = False) -> tuple[Found, list[str]]:
    """The newest checkpoint that is whole and agrees with `about`, and one line for each newer one that is not or does
    not. BadInput if there is none. `elsewhere`: parts that only other disks hold are not missed."""
    problems: list[str] = []
    for found in whole_checkpoints(run_dir, about, problems, elsewhere):
        return found, problems
    if problems:
        raise BadInput(problems[0])
    when = "every train.checkpoint_every_steps steps and at its end"
    now = shell_line("python", "scripts/fleet.py", "checkpoint", f"--run_dir={run_dir}")
    raise BadInput(f"{run_dir}: holds no complete checkpoint; a run writes one {when}, and at once for {now}")


def whole_checkpoints(
    run_dir: Path, about: dict[str, Any], problems: list[str], elsewhere: bool = False
) -> Iterator[Found]:
    """The checkpoints that are whole and agree with `about`, the newest first. A line for each other one is added to
    `problems`; one that was never complete has none."""
    for folder in reversed(step_folders(run_dir)):
        try:
            found = examine(folder, about)
        except BadInput as problem:
            problems.append(str(problem))
            continue
        if found and found.elsewhere and not elsewhere:
            problems.append(found.lacking)
        elif found:
            yield found


# ---------------------------------------------------------------------------------------------------- what is deleted


def prune(
    run_dir: Path,
    keep: int,
    resumed: Path | None = None,
    up_to: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Path]:
    """Delete what is older than the newest `keep` checkpoints that are whole, each read before that. Returns the
    folders that are gone; `say` hears of each that is left although it is not whole.

    - Only checkpoints that agree in `about` replace one another: one of another run may have been put here.
    - One whose parts are all on this disk is replaced by such ones only. For any other it is enough that a newer one
      has here what this disk should hold.
    - `resumed`, with which the run began, stays: a process that is started again begins with it.
    - What is newer than `up_to`, the step of the present run, does not count and stays: that run did not write it.
    - A link stays, and so does what no run wrote."""
    begun = resumed.resolve() if resumed else None
    n_whole, n_all_here = Counter[bytes](), Counter[bytes]()  # of newer checkpoints, by `about`
    gone: list[Path] = []
    for folder in reversed(step_folders(run_dir)):
        if up_to is not None and int(folder.name) > up_to:
            continue
        about = _about_of(folder)
        stays = about is None or folder.is_symlink() or folder.resolve() == begun
        found, problem = None, "holds no complete checkpoint"
        is_old = _newer(n_all_here, about) >= keep
        if stays or not is_old:
            try:
                found = examine(folder, check=whole_unless_changed)
            except BadInput as damage:
                problem = str(damage)
            is_old |= _newer(n_whole, about) >= keep and (found is None or bool(found.elsewhere))
        if is_old and not stays:
            _delete([path for path in folder.iterdir() if any(name.fullmatch(path.name) for name in WRITTEN)])
            with contextlib.suppress(OSError):  # there is more in it
                folder.rmdir()
            gone += [] if folder.exists() else [folder]
            problem = "holds what no run wrote, or what cannot be deleted"
        elif found and about is not None:
            n_whole[about] += 1
            n_all_here[about] += not found.elsewhere
            continue
        elif found:
            problem = "holds something of another run"
        if folder.exists():
            say(f"left {folder}: {problem.removeprefix(f'{folder}: ')}")
    return gone


def _newer(counts: Counter[bytes], about: bytes | None) -> int:
    """How many of the counted checkpoints replace one of this `about`. All replace what was never finished."""
    return counts[about] if about else max(counts.values(), default=0)


def _about_of(folder: Path) -> bytes | None:
    """The `about` of all that a step's folder holds, b"" if nothing in it was ever finished. None if that cannot be
    known: something in it is of another format, of another step, or of different runs."""
    try:
        record, damage = _marked(folder)
        abouts = {canonical(record.about)} if record else set[bytes]()
        for part in _parts_in(folder):
            with contextlib.suppress(BadInput):  # what else is in the folder says whose it is
                manifest = read_manifest(part)
                abouts.add(canonical(manifest.about))
                if manifest.version != int(folder.name):
                    return None
    except (BadInput, OSError, RecursionError):
        return None
    if len(abouts) > 1 or (damage and not abouts):
        return None
    return abouts.pop() if abouts else b""


def sweep(run_dir: Path, checkpoint: ev.Checkpoint) -> None:
    """Delete what the folder of a complete checkpoint holds beside it: unfinished parts of processes that died, and,
    if it is whole, parts that another process wrote as well."""
    folder = step_folder(run_dir, checkpoint.version)
    names = {part_name(part.stage, part.digest) for part in checkpoint.parts}
    _delete([path for path in folder.glob("writing.*") if UNFINISHED.fullmatch(path.name)])
    others = [path for path in _parts_in(folder) if path.name not in names]
    if not others:
        return
    with contextlib.suppress(BadInput):  # what is damaged may be replaced by one of the others
        found = examine(folder, check=whole_unless_changed)
        if found and {part_name(part.stage, part.digest) for part in found.record.checkpoint.parts} == names:
            _delete(others)


def _delete(paths: Iterable[Path]) -> None:
    """Delete what a run wrote into the folder of a checkpoint: the mark first, so that half of one never counts."""
    for path in sorted(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
