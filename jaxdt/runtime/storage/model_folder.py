"""A model folder: the parameters of a model with which runs can begin. It has no optimizer, no data and no length.

  model.json           the family, its options, and the size and SHA-256 of each file
  entries/tok.npz      the arrays of one entry, by the paths of its leaves
  origin/config.json   what came with the model and leaves with it: its config, tokenizer, chat template

The options have the greatest length of which the parameters know; a run chooses its own. The digest of the model is the
SHA-256 of what model.json says. A run keeps it in its config, so it never continues with another model. An entry is
read by itself, and only if it is as it was written. Needs no jax.
"""

import contextlib
import functools
import hashlib
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, why
from jaxdt.run.model import as_fields, read_options
from jaxdt.run.model_facts import Entry
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.run_folder import canonical, read_json
from jaxdt.runtime.storage.durable import fsync, fsync_tree, write_json

RECORD = "model.json"
ENTRIES = "entries"
ORIGIN = "origin"
FORMAT = "1"
WHOLE = "array"  # the name in a file of an entry that is one array
IN_A_RUN = "model"  # in the folder of a run: what it knows of the model with which it began, without the entries
Leaves = dict[str, np.ndarray]


@dataclass(frozen=True)
class ModelRecord:
    """The content of model.json. `options`: those of the model, with its family. `files`: size in bytes and SHA-256."""

    options: dict[str, Any]
    files: dict[str, tuple[int, str]]
    format: str = FORMAT

    @property
    def digest(self) -> str:
        return hashlib.sha256(canonical(serialize.write(self))).hexdigest()


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that was opened; its entries need not be there."""

    folder: Path
    record: ModelRecord
    options: ModelSpec

    @property
    def digest(self) -> str:
        return self.record.digest

    @property
    def origin(self) -> Path:
        """The folder of what came with the model."""
        return self.folder / ORIGIN

    def load(self, name: str) -> Leaves:
        """The arrays of an entry by the paths of its leaves. BadInput if they are not as they were written."""
        file = self._file_of(name)
        self._check(file)
        with np.load(self.folder / file, allow_pickle=False) as arrays:
            return {"" if path == WHOLE else path: arrays[path] for path in arrays.files}

    def check_sizes(self, names: Iterable[str]) -> None:
        """BadInput if the file of one of these entries is missing or has another size; `load` also looks into it."""
        for file in map(self._file_of, names):
            path, (size, _) = self.folder / file, self.record.files[file]
            got_bytes = path.stat().st_size if path.exists() else 0
            if got_bytes != size:
                raise BadInput(f"{path}: damaged, it has {got_bytes} bytes, expected {size}; import it again")

    def _file_of(self, name: str) -> str:
        file = f"{ENTRIES}/{name}.npz"
        if file not in self.record.files:
            raise BadInput(f"{self.folder / RECORD}: names no {file}, expected each entry of its model")
        return file

    def _check(self, file: str) -> None:
        path, (size, expected) = self.folder / file, self.record.files[file]
        try:
            with path.open("rb") as content:
                got = hashlib.file_digest(content, "sha256").hexdigest()
            if path.stat().st_size != size or got != expected:
                raise BadInput(f"{path}: damaged, it has SHA-256 {got:.16}, expected {expected:.16}; import it again")
        except OSError as error:
            raise BadInput(f"{path}: cannot be read ({why(error)}), expected a file of the model") from None

    def entry_of(self, options: ModelSpec, entry: Entry) -> Any:
        """The parameters of an entry for a run with these options, which may have a head of its own: its matrix, where
        the model has none, is the transposed table of the embedding."""
        arrays = self.load(entry.name)
        found: Leaves = {}
        for leaf in entry.leaves:
            if leaf.path in arrays:
                array = arrays[leaf.path]
            elif options.own_head and (entry.name, leaf.path) == options.own_head[:2]:
                array = np.ascontiguousarray(self.load(options.own_head[2])[""].T)
            else:
                raise BadInput(f"{self.folder}: entry {entry.name} has no {leaf.path}, which this run's model has")
            if array.shape != leaf.shape:
                expected = f"expected {list(leaf.shape)}"
                raise BadInput(
                    f"{self.folder}: {entry.name} {leaf.path}: got the shape {list(array.shape)}, {expected}"
                )
            found[leaf.path] = array
        return as_tree(found)


def open_model(folder: Path) -> ModelFolder:
    """The model folder of this name. BadInput if it is none."""
    path = folder / RECORD
    if not path.exists():
        made = "scripts/tools/import_model.py makes one of files of Hugging Face"
        raise BadInput(f"{folder}: holds no {RECORD}, expected a model folder; {made}")
    content = read_json(path)
    version = content.get("format") if serialize.is_object(content) else None
    if version != FORMAT:
        raise BadInput(f"{path}: format: got {version!r:.20}, expected {FORMAT!r}; import the model again")
    record = serialize.read(ModelRecord, content, str(path))
    return ModelFolder(folder, record, read_options(record.options, f"{path}: options"))


def model_of_run(config: RunConfig) -> ModelFolder:
    """The model folder with which a run begins. BadInput, in one line, on a host that has another one or none."""
    path, digest = config.init.path, config.init.digest
    try:
        found = open_model(Path(path))
    except BadInput as problem:
        begins = f"init.path: this run begins with the model {digest:.16}"
        raise BadInput(f"{begins}: {problem}; copy the folder to this host") from None
    if found.digest != digest:
        raise BadInput(f"init.path: {path} is the model {found.digest:.16}, this run begins with {digest:.16}")
    return found


def check_model_of_run(config: RunConfig, *, resumes: bool) -> None:
    """BadInput where a process of a run lacks the model that it reads. A checkpoint has all but frozen parameters."""
    if config.init.digest and (not resumes or config.model.facts.frozen):
        model_of_run(config)


def initial_entries(config: RunConfig, names: list[str]) -> Iterator[tuple[str, Any]]:
    """The parameters of entries of the model with which a run begins; each is read when it is asked for. BadInput at
    once where the model is not here, or not whole by its sizes."""
    model = model_of_run(config)
    model.check_sizes(names)
    options = config.model.without_adapter()
    entries = {entry.name: entry for entry in options.facts.entries}
    return ((name, model.entry_of(options, entries[name])) for name in names)


def as_tree(leaves: Mapping[str, Any]) -> Any:
    """The tree of an entry from its leaves by path; an entry that is one array has the path ''."""
    if set(leaves) == {""}:
        return leaves[""]
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *inner, last = path.split("/")
        functools.reduce(lambda node, name: node.setdefault(name, {}), inner, tree)[last] = leaf
    return tree


def as_leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """The inverse of as_tree."""
    if not isinstance(tree, Mapping):
        return {path: tree}
    found: dict[str, Any] = {}
    for name, inner in tree.items():
        found |= as_leaves(inner, f"{path}/{name}" if path else name)
    return found


class ModelWriter:
    """A model folder that is being written: its entries one by one, then `finish`."""

    def __init__(self, folder: Path):
        self._folder = folder
        (folder / ENTRIES).mkdir(parents=True)
        (folder / ORIGIN).mkdir()

    def add(self, name: str, leaves: Leaves) -> None:
        """Write an entry, by the paths of its leaves."""
        named: dict[str, Any] = {path or WHOLE: np.asarray(leaf, np.float32) for path, leaf in leaves.items()}
        np.savez(self._folder / ENTRIES / f"{name}.npz", allow_pickle=False, **named)

    def add_origin(self, name: str, content: bytes) -> None:
        """Write a file that came with the model."""
        (self._folder / ORIGIN / name).write_bytes(content)

    def finish(self, options: ModelSpec) -> ModelRecord:
        """Write model.json, and make the folder survive a loss of power."""
        files: dict[str, tuple[int, str]] = {}
        for path in sorted(path for path in self._folder.rglob("*") if path.is_file()):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.relative_to(self._folder).as_posix()] = (path.stat().st_size, digest)
        record = ModelRecord(as_fields(options), files)
        write_json(self._folder / RECORD, serialize.write(record))
        fsync_tree(self._folder)
        return record


@contextlib.contextmanager
def new_folder(folder: Path, what: str) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written; after an error nothing is left. BadInput for a
    name that is taken; `what` says what it is to hold."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder}: is not an empty folder, expected a new name for {what}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        fsync_tree(temporary)
        temporary.replace(folder)
        fsync(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def copy_description(config: RunConfig, folder: Path) -> None:
    """Write into the folder of a run what is known of the model with which it begins, without the entries: the digest,
    the tokenizer and the config with which it leaves again. A run that is resumed has that already."""
    copy = folder / IN_A_RUN
    if not config.init.digest or (copy / RECORD).exists():
        return
    model = model_of_run(config)
    with new_folder(copy, "the description of a model") as temporary:
        shutil.copytree(model.origin, temporary / ORIGIN)
        shutil.copyfile(model.folder / RECORD, temporary / RECORD)
