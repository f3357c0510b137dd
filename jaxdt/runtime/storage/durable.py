"""Files that survive a crash: the coordinator's durable values, and how a run's other files are written."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxdt.run.errors import BadInput, read_text, why
from jaxdt.run.run_folder import canonical, older_part, read_json

BUFFERED_BYTES = 1 << 16
BUFFERED_S = 1.0  # a process that is killed loses at most the output of so many seconds
# The size of a trace or a log, which has one older part beside it. A trace gets about 150 bytes for each step: a part
# holds the reports of 100,000 steps and more, also while strangers at the port cause their 21 lines a minute.
LOG_BYTES_MAX = 1 << 24
DISK_ID = "disk_id"
# A file system answers so in passing, one of a network above all: the whole write is tried once more.
PASSING = (errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT)
RETRY_S = 0.2


class FileStore:
    """A folder with one JSON file per name, each written by write_json (step protocol, Sec. 5.2). put_s: seconds that
    the latest `put` took."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.put_s = 0.0

    def put(self, name: str, value: Any) -> None:
        """Store a value; it is durable on return. BadInput if somebody has deleted the folder."""
        start_s = time.monotonic()
        if not self._folder.is_dir():
            raise BadInput(f"run_dir: {self._folder} was deleted during the run, so nothing is durable any more")
        write_json(self._folder / f"{name}.json", value)
        self.put_s = time.monotonic() - start_s

    def delete(self, name: str) -> None:
        """Forget a value; durable on return."""
        path = self._folder / f"{name}.json"
        if path.exists():
            with naming(path):
                path.unlink()
            fsync(self._folder)

    def get(self, name: str) -> Any:
        """The stored value, or None if there is none; BadInput if the file is damaged."""
        path = self._folder / f"{name}.json"
        return read_json(path) if path.exists() else None

    def written_s(self, name: str) -> float:
        """The file system's time at which a value was stored last, 0 if it was not."""
        path = self._folder / f"{name}.json"
        return path.stat().st_mtime if path.exists() else 0.0


class LateFile:
    """A file of lines for people, such as a trace. It is opened at the first write, so that a process which is refused
    leaves the old file as it was.

    When it is full it becomes the older part, and a new file begins. Lines wait in memory for about a second: a
    process that is killed loses those, and no others.

    A disk that refuses costs the lines that it refused, and nothing else: no half line stays in the file, `failed` is
    called with the reason when the first of them is lost, and later lines are tried again.

    appends: keep the old content.
    by_line: write each line to the file at once, so that it survives the death of the process."""

    def __init__(
        self, path: Path, failed: Callable[[str], None] | None = None, appends: bool = False, by_line: bool = False
    ):
        self._path = path
        self._failed = failed
        self._appends = appends
        self._buffered_bytes_max = 0 if by_line else BUFFERED_BYTES
        self._lines: list[bytes] = []
        self._buffered_bytes = 0
        self._flushed_s = time.monotonic()
        self._file: BinaryIO | None = None
        self._size = 0
        self._is_failing = False

    def write(self, line: str) -> None:
        self._lines.append(line.encode())
        self._buffered_bytes += len(self._lines[-1])
        if self._buffered_bytes > self._buffered_bytes_max or time.monotonic() - self._flushed_s >= BUFFERED_S:
            self._flush()

    def close(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()

    def _flush(self) -> None:
        content = b"".join(self._lines)
        self._lines.clear()
        self._buffered_bytes = 0
        self._flushed_s = time.monotonic()
        if not content:
            return
        try:
            self._append(content)
        except OSError as error:
            was_failing, self._is_failing = self._is_failing, True
            if self._failed and not was_failing:
                self._failed(f"{self._path}: {why(error)}")
        else:
            self._is_failing = False

    def _append(self, content: bytes) -> None:
        file = self._file or self._open()
        append_whole(file, content, self._size)
        self._size += len(content)
        if self._size >= LOG_BYTES_MAX:
            file.close()
            self._file = None
            self._path.replace(older_part(self._path))

    def _open(self) -> BinaryIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if not self._appends:
            older_part(self._path).unlink(missing_ok=True)
        self._file = self._path.open("ab" if self._appends else "wb", buffering=0)
        self._appends = True
        self._size = self._file.tell()
        return self._file


def lock_file(path: Path, how: int, holder: str) -> int:
    """Lock a file, which is made if it is missing, and say in it who holds it. `how`: of flock. Returns the descriptor
    that keeps others out while this process lives, or a child that inherits it. BlockingIOError if another process has
    locked the file."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, how)
    except OSError:
        os.close(lock)
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{holder}\n".encode(), 0)
    return lock


def append_whole(file: BinaryIO, content: bytes, size: int) -> None:
    """Write all of the content to a file of this size that has no buffer, or nothing: no half line stays after an
    OSError."""
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(size)
            file.seek(size)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write plain data durably, beside the SHA-256 of its canonical text. So a damaged bit is found when the file is
    read, and is never taken for another value."""
    checksum = hashlib.sha256(canonical(value)).hexdigest()
    write_durably(path, json.dumps({"sha256": checksum, "value": value}).encode())


def cut_log(path: Path) -> None:
    """Empty a full log, and keep what it held as its older part, unless the disk is full. Another process may hold
    the log open, if it appends; the lines that it writes meanwhile are lost."""
    if path.stat().st_size >= LOG_BYTES_MAX:
        try:
            shutil.copyfile(path, older_part(path))
        except OSError:
            older_part(path).unlink(missing_ok=True)
        os.truncate(path, 0)


def write_durably(path: Path, content: bytes) -> None:
    """Replace the content of a file: write a temporary file, fsync it, rename it, fsync the folder. Also after a crash
    the file holds either all of its old content or all of the new one. An OSError names the file, or its folder.

    A file system may fail in passing, so all up to the rename is tried once more: nothing relies on the temporary file.
    The fsync of the folder is not repeated: after one that has failed the system may have dropped what it should have
    written, and a second one would say nothing of it."""
    # Peers of one host, and threads of one process, may write the same file.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        try:
            _put(temporary, path, content)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            time.sleep(RETRY_S)
            _put(temporary, path, content)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, why(error), str(path)) from None
    fsync(path.parent)


def _put(temporary: Path, path: Path, content: bytes) -> None:
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError that leaves this context names a file: this one if the system named none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, why(error), str(path)) from None


def disk_id(run_dir: Path) -> str:
    """The random number of a run's folder on this disk, which the first process that asks for it writes there.
    BadInput for a file that holds no text."""
    path = run_dir / DISK_ID
    with naming(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            temporary = run_dir / f"{DISK_ID}.{secrets.token_hex(4)}.tmp"
            temporary.write_text(secrets.token_hex(8))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
            temporary.unlink()
    return read_text(path)


def fsync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a loss of power."""
    with naming(path):
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


def refusal(error: OSError | MemoryError, default: str) -> str:
    """One line that says what the system refused and why, with `default` in place of a file that it does not name."""
    if isinstance(error, MemoryError):
        return f"memory: the system gave this process no more ({why(error)})"
    if error.errno == errno.ENOENT and error.filename and not (folder := Path(error.filename).parent).exists():
        moved = f"{error.filename}: {folder} is not there any more: it was moved or deleted meanwhile"
        return f"{moved}; a run that was moved continues with launch.py --resume --run_dir=..."
    return f"{error.filename or default}: {why(error)}"
