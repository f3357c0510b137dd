"""Files that survive a crash: the coordinator's durable values, and how a run's other files are written."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import IO, Any

from jaxdt.spec.errors import BadInput
from jaxdt.spec.serialize import is_object

# Of a trace or a log, which has one older part beside it. A trace gets about 150 bytes for each step: a part holds the
# reports of 100,000 steps and more, also while strangers at the port cause their 21 lines a minute.
LOG_BYTES_MAX = 1 << 24
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class FileStore:
    """A folder with one JSON file per name, each written by write_json (step protocol, Sec. 5.2). put_s: seconds that
    the latest `put` took."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.put_s = 0.0

    def put(self, name: str, value: Any) -> None:
        """Store a value; it is durable on return."""
        start_s = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._folder / f"{name}.json", value)
        self.put_s = time.monotonic() - start_s

    def delete(self, name: str) -> None:
        """Forget a value; durable on return."""
        path = self._folder / f"{name}.json"
        if path.exists():
            path.unlink()
            fsync(self._folder)

    def get(self, name: str) -> Any:
        """The stored value, or None if there is none; BadInput if the file is damaged."""
        path = self._folder / f"{name}.json"
        return read_json(path) if path.exists() else None


class LateFile:
    """A text file that is opened at the first write, so that a process which is refused leaves the old file as it was.
    When it is full it becomes the older part, and the file begins anew.

    appends: keep the old content.
    by_line: write each line to the file at once, so that it survives the death of the process."""

    def __init__(self, path: Path, appends: bool = False, by_line: bool = False):
        self._path = path
        self._mode = "a" if appends else "w"
        self._by_line = by_line
        self._file: IO[str] | None = None
        self._n_bytes = 0

    def write(self, text: str) -> None:
        file = self._file or self._open()
        file.write(text)
        self._n_bytes += len(text)  # a trace is ASCII
        if self._n_bytes >= LOG_BYTES_MAX:
            file.close()
            self._file = None
            self._path.replace(older_part(self._path))

    def _open(self) -> IO[str]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._mode == "w":
            older_part(self._path).unlink(missing_ok=True)
        self._file = self._path.open(self._mode, buffering=1 if self._by_line else -1)
        self._mode = "a"
        self._n_bytes = self._file.tell()
        return self._file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def canonical(value: Any) -> bytes:
    """The one JSON text of plain data, of which checksums are taken."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def write_json(path: Path, value: Any) -> None:
    """Write plain data durably, beside the SHA-256 of its canonical text. So a damaged bit is found when the file is
    read, and is never taken for another value."""
    checksum = hashlib.sha256(canonical(value)).hexdigest()
    write_durably(path, json.dumps({"sha256": checksum, "value": value}).encode())


def read_json(path: Path) -> Any:
    """What write_json wrote. BadInput, in one line, for a file that cannot be read or that is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read ({str(error).splitlines()[0]}), expected what a run wrote") from None
    if not is_object(content) or set(content) != {"sha256", "value"}:
        raise BadInput(f"{path}: got {content!r:.60}, expected an object with sha256 and value, as a run writes it")
    checksum = hashlib.sha256(canonical(content["value"])).hexdigest()
    if checksum != content["sha256"]:
        raise BadInput(f"{path}: damaged, its content has SHA-256 {checksum:.16}, expected {content['sha256']!r:.18}")
    return content["value"]


def older_part(path: Path) -> Path:
    """Where a trace or a log keeps what it held before it began anew."""
    return path.with_name(f"{path.name}.1")


def cut_log(path: Path) -> None:
    """Begin a full log anew, and keep what it held as its older part, unless the disk is full. Another process may hold
    the log open, if it appends; the lines that it writes meanwhile are lost."""
    if path.stat().st_size >= LOG_BYTES_MAX:
        try:
            shutil.copyfile(path, older_part(path))
        except OSError:
            older_part(path).unlink(missing_ok=True)
        os.truncate(path, 0)


def write_durably(path: Path, content: bytes) -> None:
    """Replace the content of a file: write a temporary file, fsync it, rename it, fsync the folder. Also after a crash
    the file holds either all of its old content or all of the new one. An OSError names the file."""
    # Peers of one host, and threads of one process, may write the same file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    fsync(path.parent)


def disk_id(run_dir: Path) -> str:
    """The random number of a run's folder on this disk, which the first process that asks for it writes there."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "disk_id"
    if not path.exists():
        temporary = run_dir / f"disk_id.{secrets.token_hex(4)}.tmp"
        temporary.write_text(secrets.token_hex(8))
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()
    return path.read_text()


def fsync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Make a folder and everything in it survive a loss of power: files first, then the folders that name them."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync(Path(root) / name)
        fsync(Path(root))


def refusal(error: OSError, default: str) -> str:
    """One line that says which file a disk refused and why, with `default` in place of a file that the system does not
    name; '' for an error of another kind."""
    if error.filename is None and error.errno not in REFUSALS:
        return ""
    return f"{error.filename or default}: {error.strerror}"
