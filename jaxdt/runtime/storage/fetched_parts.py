"""Parts of checkpoints that are on their way to this disk: each one file, which its slices fill in any order.

  <run_dir>/fetching/00000050-1f0c5a27e9d3b846          the stream of a part (jaxdt.runtime.storage.parts), with holes
  <run_dir>/fetching/00000050-1f0c5a27e9d3b846.slices   a line for each slice that is in it: first word, end, CRC-32

So a process that is started again fetches only what it has not got yet.
"""

import os
import shutil
import zlib
from pathlib import Path

import numpy as np

from jaxdt.protocol import events as ev
from jaxdt.runtime.storage.parts import put_in_place, temporary_part, unpack
from jaxdt.runtime.storage.words import WORD

FOLDER = "fetching"


def stream_path(run_dir: Path, version: int, digest: str) -> Path:
    return run_dir / FOLDER / f"{version:08d}-{digest[:16]}"


def write_slice(run_dir: Path, key: ev.StateKey, words: np.ndarray) -> None:
    """Put a slice into its part's file."""
    path = stream_path(run_dir, key.version, key.part)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        data, offset = words.tobytes(), key.lo * WORD.itemsize
        while data:
            n_written = os.pwrite(descriptor, data, offset)
            data, offset = data[n_written:], offset + n_written
    finally:
        os.close(descriptor)
    with _slices(path).open("a") as file:
        file.write(f"{key.lo} {key.hi} {zlib.crc32(words.data)}\n")


def slices_here(run_dir: Path, version: int, digest: str) -> tuple[tuple[int, int], ...]:
    """Bounds of the slices of a part that are here, each as it was sent."""
    path = stream_path(run_dir, version, digest)
    if not path.exists() or not _slices(path).exists():
        return ()
    found: set[tuple[int, int]] = set()
    with path.open("rb") as file:
        for line in _slices(path).read_text(errors="replace").splitlines():
            words = line.split()
            if len(words) != 3 or not all(word.isdecimal() for word in words):
                continue  # the end of a line that a crash cut off
            lo, hi, checksum = map(int, words)
            file.seek(lo * WORD.itemsize)
            if zlib.crc32(file.read((hi - lo) * WORD.itemsize)) == checksum:
                found.add((lo, hi))
    return tuple(sorted(found))


def keep(run_dir: Path, part: ev.Part) -> None:
    """Make a part of which all slices are here durable. BadInput if it is not what its digest says."""
    path = stream_path(run_dir, part.version, part.digest)
    temporary = temporary_part(run_dir, part.version)
    temporary.mkdir(parents=True)
    try:
        put_in_place(temporary, run_dir, unpack(path, part.digest, temporary))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        discard(run_dir, part.version, part.digest)


def discard(run_dir: Path, version: int, digest: str) -> None:
    """Delete what has been fetched of a part."""
    path = stream_path(run_dir, version, digest)
    _slices(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def discard_older(run_dir: Path, version: int) -> None:
    """Delete what has been fetched of checkpoints before `version`."""
    for path in (run_dir / FOLDER).glob("*"):
        if path.name < f"{version:08d}":
            path.unlink(missing_ok=True)


def _slices(path: Path) -> Path:
    return path.with_name(f"{path.name}.slices")
