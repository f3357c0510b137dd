"""The coordinator's storage on a disk: a value is durable when `put` returns. How a run's other files are written."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

from jaxdt.spec.errors import BadInput

REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class FileStore:
    """A folder with one JSON file per name: temporary, fsync, rename, fsync of the folder (step protocol, Sec. 5.2)."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.put_s = 0.0

    def put(self, name: str, value: Any) -> None:
        """Durable on return; put_s then says how long that took."""
        start_s = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        write_durably(self._folder / f"{name}.json", json.dumps(value).encode())
        self.put_s = time.monotonic() - start_s

    def get(self, name: str) -> Any:
        """The value, or None if the name was never put; BadInput if the file is damaged."""
        path = self._folder / f"{name}.json"
        try:
            return json.loads(path.read_bytes()) if path.exists() else None
        except ValueError as error:
            raise BadInput(f"{path}: not JSON ({error}), expected what the coordinator wrote") from None


class LateFile:
    """A text file that is made at the first write, and emptied unless it `goes_on`: a process that is turned away
    leaves it as it was. What was written `by_line` outlives the process."""

    def __init__(self, path: Path, goes_on: bool = False, by_line: bool = False):
        self._path, self._by_line, self._file = path, by_line, None
        self._mode = "a" if goes_on else "w"

    def write(self, text: str) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open(self._mode, buffering=1 if self._by_line else -1)
        self._file.write(text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def write_durably(path: Path, content: bytes) -> None:
    """The file holds either its old content or all of the new one, also after a crash; OSError names it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # peers of one host may write the same file
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def refusal(error: OSError, default: str) -> str:
    """One line on a disk that refused: the file, or `default` where the system does not say which; '' if the error is
    of another kind."""
    if error.filename is None and error.errno not in REFUSALS:
        return ""
    return f"{error.filename or default}: {error.strerror}"
