"""The folder of one run: where its files are, and how they are read back."""

import errno
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdt.run.errors import BadInput, read_text, why
from jaxdt.run.serialize import is_object, parse_json

EMITTED_RUN_DIR = "run_dir"  # in a folder that launch.py --emit has written: where the processes of the run write
ADDRESS = "coordinator_address"
COORDINATOR_FLAGS = "coordinator.flags"  # only an emitted job has this file
LAUNCH = "launch.json"
LAUNCH_PATHS = ("emulate", "network")


@dataclass(frozen=True)
class RunFolders:
    """The two folders of a run. They are the same one if the run was launched on this machine.

    job: config, plan and credentials.
    run_dir: what the processes of the run write."""

    job: Path
    run_dir: Path

    @classmethod
    def of(cls, folder: Path) -> "RunFolders":
        """The folders of the run of which `folder` is either one."""
        if (folder / COORDINATOR_FLAGS).exists():
            return cls(folder, folder / EMITTED_RUN_DIR)
        if folder.name == EMITTED_RUN_DIR and (folder.parent / COORDINATOR_FLAGS).exists():
            return cls(folder.parent, folder)
        return cls(folder, folder)


def has_ended(run_dir: Path) -> bool:
    """Whether the run of a folder has ended, and its coordinator was not started since."""
    summary, address = run_dir / "summary.json", run_dir / ADDRESS
    return summary.exists() and not (address.exists() and address.stat().st_mtime > summary.stat().st_mtime)


def launch_flags(job: Path) -> Mapping[str, Any]:
    """The flags of the launch of the run in this folder that a resumed run keeps. Paths are whole ones."""
    path = job / LAUNCH
    fields: Any = read_json(path) if path.exists() else {}
    if not is_object(fields):
        raise BadInput(f"{path}: got {fields!r:.40}, expected an object")
    return fields | {name: str((job / str(fields[name])).resolve()) for name in LAUNCH_PATHS if name in fields}


def canonical(value: Any) -> bytes:
    """The one JSON text of plain data, of which checksums are taken."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def read_json(path: Path) -> Any:
    """The value of a file that holds it beside its SHA-256 (jaxdt.runtime.storage.durable.write_json). BadInput, in one
    line, for a file that cannot be read or that is damaged."""
    try:
        content = parse_json(path.read_bytes())
        canonical(content)
    except (OSError, ValueError, RecursionError) as error:  # of JSON that is nested too deep
        raise BadInput(f"{path}: cannot be read ({why(error)}), expected what a run wrote") from None
    if not is_object(content) or set(content) != {"sha256", "value"}:
        raise BadInput(f"{path}: got {content!r:.60}, expected an object with sha256 and value, as a run writes it")
    checksum = hashlib.sha256(canonical(content["value"])).hexdigest()
    if checksum != content["sha256"]:
        raise BadInput(f"{path}: damaged, its content has SHA-256 {checksum:.16}, expected {content['sha256']!r:.18}")
    return content["value"]


def older_part(path: Path) -> Path:
    """The file to which a trace or a log moves its older lines when it is full."""
    return path.with_name(f"{path.name}.1")


def kept_lines(path: Path) -> list[str]:
    """The lines of a trace that are still there: those of its older part, then its own. FileNotFoundError if there is
    no file, BadInput for one that cannot be read."""
    parts = [part for part in (older_part(path), path) if part.exists()]
    if not parts:
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    return [line for part in parts for line in read_text(part).splitlines()]
