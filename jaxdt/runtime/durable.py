"""The coordinator's storage on a disk: a value is durable when `put` returns."""

import json
import os
import time
from pathlib import Path
from typing import Any


class FileStore:
    """A folder with one JSON file per name: temporary, fsync, rename, fsync of the folder (step protocol, Sec. 5.2)."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.put_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, value: Any) -> None:
        """Durable on return; put_s then says how long that took."""
        start_s = time.monotonic()
        write_durably(self._folder / f"{name}.json", json.dumps(value).encode())
        self.put_s = time.monotonic() - start_s

    def get(self, name: str) -> Any:
        """The value, or None if the name was never put."""
        path = self._folder / f"{name}.json"
        return json.loads(path.read_bytes()) if path.exists() else None


def write_durably(path: Path, content: bytes) -> None:
    """The file holds either its old content or all of the new one, also after a crash."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # peers of one host may write the same file
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
