"""Parts of checkpoints on one disk: folders that are named by the digest of their content.

  stage_0-1f0c5a27e9d3b846/                what Orbax wrote: a few small files, and the arrays
  stage_0-1f0c5a27e9d3b846/manifest.json   which part it is, and the size and SHA-256 of each file

The digest of a part is the SHA-256 of its manifest. So a part that any host holds can be told from any other, also from
one of the same version that another process wrote, and is read only if each of its files is what was written.

A part travels as one stream of 4-byte words: the length of the manifest's canonical text in 8 bytes, that text, the
files in the manifest's order, and zeros up to a whole word. Its slices may come in any order, into one file:

  <run_dir>/fetching/00000050-1f0c5a27e9d3b846          the stream of a part (jaxdt.runtime.storage.parts), with holes
  <run_dir>/fetching/00000050-1f0c5a27e9d3b846.slices   a line for each slice that is in it: first word, end, CRC-32

So a process that is started again fetches only what it has not got yet.
"""

import errno
import functools
import hashlib
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, why
from jaxdt.run.run_folder import canonical, read_json
from jaxdt.runtime.storage.durable import fsync, fsync_tree, write_json
from jaxdt.runtime.storage.words import WORD

MANIFEST, FETCHING = "manifest.json", "fetching"
LENGTH_BYTES = 8
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """The description of a part: the state of one of `n_stages` stages after `version` updates of one generation of one
    run, the fields in which it must agree with a run that resumes from it, and its files, each with its size in bytes
    and its SHA-256."""

    run: str
    generation: int
    n_reseeds: int
    version: int
    stage: int
    n_stages: int
    about: dict[str, Any]
    files: dict[str, tuple[int, str]]

    @property
    def text(self) -> bytes:
        return canonical(serialize.write(self))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()

    @property
    def n_bytes(self) -> int:
        """The bytes of the part's stream, without the zeros at its end."""
        return LENGTH_BYTES + len(self.text) + sum(size for size, _ in self.files.values())

    @property
    def n_words(self) -> int:
        """The words of the part's stream."""
        return -(-self.n_bytes // WORD.itemsize)


def part_name(stage: int, digest: str) -> str:
    return f"stage_{stage}-{digest[:16]}"


def step_folder(run_dir: Path, version: int) -> Path:
    return run_dir / "checkpoints" / f"{version:08d}"


def part_folders(run_dir: Path, version: int, resumed: Path | None) -> list[Path]:
    """The folders where parts of the checkpoint of `version` may be: this run's, and the one from which it resumed."""
    own = step_folder(run_dir, version)
    return [own] if resumed is None or resumed.name != own.name else [own, resumed]


def find_part(folders: Iterable[Path], digest: str) -> Path | None:
    """The folder of the part of this digest, if it is in one of these. Others may ask for any text."""
    if not digest.isalnum():
        return None
    return next((path for folder in folders for path in folder.glob(f"stage_*-{digest[:16]}")), None)


def read_manifest(part: Path) -> Manifest:
    """The manifest of a part; BadInput if it is damaged."""
    path = part / MANIFEST
    return serialize.read(Manifest, read_json(path), str(path))


def whole_manifest(part: Path, digest: str | None = None) -> Manifest:
    """The manifest of a part whose files are all as they were written. BadInput, which names the first that is not, or
    says that this is not the part of `digest`."""
    manifest = read_manifest(part)
    if digest is not None and manifest.digest != digest:
        raise BadInput(f"{part / MANIFEST}: digest {manifest.digest:.16}, expected {digest:.16}")
    for name, (size, expected) in manifest.files.items():
        path = part / name
        try:
            if (got_bytes := path.stat().st_size) != size:
                raise BadInput(f"{path}: damaged, it has {got_bytes} bytes, expected {size}")
            with path.open("rb") as file:
                got = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError) as error:
            raise BadInput(f"{path}: cannot be read ({why(error)}), expected a file of the part") from None
        if got != expected:
            raise BadInput(f"{path}: damaged, it has SHA-256 {got:.16}, expected {expected:.16}")
    return manifest


def whole_unless_changed(part: Path, digest: str) -> Manifest:
    """As whole_manifest. The files are read again only if the file system says that one was written since."""
    states = [(path, path.stat()) for path in sorted(part.rglob("*"))]
    return _whole_manifest(part, digest, tuple((path, s.st_ino, s.st_size, s.st_mtime_ns) for path, s in states))


@functools.lru_cache(maxsize=256)
def _whole_manifest(part: Path, digest: str, states: object) -> Manifest:
    del states
    return whole_manifest(part, digest)


def seal(part: Path, about: Manifest) -> Manifest:
    """Add the manifest to a part whose files are all written, and make the part survive a loss of power. `about` is the
    manifest without the files."""
    files: dict[str, tuple[int, str]] = {}
    for path in sorted(path for path in part.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(part).as_posix()] = (path.stat().st_size, digest)
    manifest = replace(about, files=files)
    write_json(part / MANIFEST, serialize.write(manifest))
    fsync_tree(part)
    return manifest


def put_in_place(temporary: Path, run_dir: Path, manifest: Manifest) -> Path:
    """Move a sealed part to where its checkpoint is read, and return that folder. If it is there already and is whole,
    that one stays; a damaged one is deleted once this one has its place."""
    folder = step_folder(run_dir, manifest.version)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / part_name(manifest.stage, manifest.digest)
    try:
        temporary.rename(part)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        try:
            whole_manifest(part, manifest.digest)
        except BadInput:
            damaged = temporary_part(run_dir, manifest.version)
            part.rename(damaged)
            temporary.rename(part)
            temporary = damaged
        shutil.rmtree(temporary, ignore_errors=True)
    for changed in (folder, folder.parent, run_dir):
        fsync(changed)
    return part


def temporary_part(run_dir: Path, version: int) -> Path:
    """A name for a part that is being written. A process that is thought to be dead may still be writing the same part,
    so each has a folder of its own."""
    return step_folder(run_dir, version) / f"writing.{secrets.token_hex(4)}"


# --------------------------------------------------------------------------------------------------- as one stream


def _segments(part: Path, manifest: Manifest) -> Iterator[tuple[int, Path | bytes]]:
    """The pieces of the stream, in order, each with its bytes: some that are here, and the files."""
    text = manifest.text
    head = len(text).to_bytes(LENGTH_BYTES, "little") + text
    yield len(head), head
    for name, (size, _) in manifest.files.items():
        yield size, part / name


def read_slice(part: Path, manifest: Manifest, lo: int, hi: int) -> np.ndarray:
    """Words lo..hi-1 of a part's stream."""
    out = np.zeros(hi - lo, WORD)
    out_bytes = out.view(np.uint8)
    first, last = lo * WORD.itemsize, hi * WORD.itemsize
    start = 0
    for size, source in _segments(part, manifest):
        begin, end = max(first, start), min(last, start + size)
        if begin < end:
            out_bytes[begin - first : end - first] = np.frombuffer(_piece(source, begin - start, end - begin), np.uint8)
        start += size
    return out


def _piece(source: Path | bytes, offset: int, size: int) -> bytes:
    if isinstance(source, bytes):
        return source[offset : offset + size]
    with source.open("rb") as file:
        file.seek(offset)
        piece = file.read(size)
    if len(piece) != size:
        raise BadInput(f"{source}: has fewer bytes than its manifest says")
    return piece


def unpack(stream: Path, digest: str, temporary: Path) -> Manifest:
    """Make a sealed part of a stream that other hosts have sent. BadInput if it is not the part of `digest`."""
    with stream.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        text = file.read(min(length, stream.stat().st_size))
        if hashlib.sha256(text).hexdigest() != digest:
            raise BadInput(f"{stream}: the manifest in it has not the digest {digest:.16}")
        manifest = serialize.read(Manifest, serialize.parse_json(text), str(stream))
        for name, (size, expected) in manifest.files.items():
            path = temporary / name
            if not path.resolve().is_relative_to(temporary.resolve()):
                raise BadInput(f"{stream}: {name!r:.60} is outside of the part")
            path.parent.mkdir(parents=True, exist_ok=True)
            if _copy(file, path, size) != expected:
                raise BadInput(f"{stream}: {name} has not the SHA-256 {expected:.16} of the manifest")
    write_json(temporary / MANIFEST, serialize.write(manifest))
    fsync_tree(temporary)
    return manifest


def _copy(source: BinaryIO, path: Path, size: int) -> str:
    """Copy the next `size` bytes to a new file; their SHA-256."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        while size and (piece := source.read(min(size, READ_BYTES))):
            digest.update(piece)
            out.write(piece)
            size -= len(piece)
    return digest.hexdigest()


# ------------------------------------------------------------------------------------- what is on its way to this disk


def stream_path(run_dir: Path, version: int, digest: str) -> Path:
    return run_dir / FETCHING / f"{version:08d}-{digest[:16]}"


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


def keep_fetched(run_dir: Path, part: ev.Part) -> None:
    """Make a part of which all slices are here durable. BadInput if it is not what its digest says."""
    path = stream_path(run_dir, part.version, part.digest)
    temporary = temporary_part(run_dir, part.version)
    temporary.mkdir(parents=True)
    try:
        put_in_place(temporary, run_dir, unpack(path, part.digest, temporary))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        discard_fetched(run_dir, part.version, part.digest)


def discard_fetched(run_dir: Path, version: int, digest: str) -> None:
    """Delete what has been fetched of a part."""
    path = stream_path(run_dir, version, digest)
    _slices(path).unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def discard_older_fetched(run_dir: Path, version: int) -> None:
    """Delete what has been fetched of checkpoints before `version`."""
    for path in (run_dir / FETCHING).glob("*"):
        if path.name < f"{version:08d}":
            path.unlink(missing_ok=True)


def _slices(path: Path) -> Path:
    return path.with_name(f"{path.name}.slices")
