"""The arrays of checkpoints: a stage's state by layer, and the folders that Orbax writes and reads."""

import asyncio
import contextlib
import functools
import sys
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxdt.model.base import completed, init_entry
from jaxdt.protocol import events as ev
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.runtime.storage.checkpoint import complete_record
from jaxdt.runtime.storage.model_folder import initial_entries
from jaxdt.runtime.storage.parts import find_part, part_name, whole_unless_changed

ASYNCIO = Path(asyncio.__file__).parent


def split_entries(state: tuple[Any, ...]) -> dict[str, dict]:
    """Split a state of ParameterVersions into {entry: {"params": tree, "optimizer": leaves}}, with delayed updates also
    "before": tree. Every subtree of the optimizer's state that mirrors the parameters is split like them. Scalars such
    as step counts go into every entry. An entry without trained parameters is left out."""
    params, opt_state, *before = state

    def mirrors(tree: Any) -> bool:
        return isinstance(tree, dict) and set(tree) == set(params)

    def optimizer_leaves(name: str) -> list:
        own = jax.tree.map(lambda tree: tree[name] if mirrors(tree) else tree, opt_state, is_leaf=mirrors)
        return jax.tree.leaves(own)

    names = _with_leaves(params)
    entries = {name: {"params": _without_none(params[name]), "optimizer": optimizer_leaves(name)} for name in names}
    for tree in before:
        for name, entry in entries.items():
            entry["before"] = _without_none(tree[name])
    return entries


def _with_leaves(params: dict[str, Any]) -> list[str]:
    return [name for name, tree in params.items() if jax.tree.leaves(tree)]


def _without_none(tree: Any) -> Any:
    """A tree of trained parameters without its frozen leaves, which are None."""
    if not isinstance(tree, dict):
        return tree
    return {name: _without_none(inner) for name, inner in tree.items() if jax.tree.leaves(inner)}


def _with_none(like: Any, tree: Any) -> Any:
    """The inverse of _without_none, for the structure of `like`."""
    if not isinstance(like, dict):
        return None if like is None else tree
    return {name: _with_none(inner, tree.get(name, {})) for name, inner in like.items()}


def join_entries(entries: dict[str, dict], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inverse of split_entries, for the structure of `like`. A run with delayed updates can use a checkpoint of a
    run without them: both of its versions are then the same."""
    params, opt_state, *before = like

    def mirrors(tree: Any) -> bool:
        return isinstance(tree, dict) and set(tree) == set(params)

    nodes, structure = jax.tree.flatten(opt_state, is_leaf=mirrors)
    names = _with_leaves(params)
    iterators = {name: iter(entries[name]["optimizer"]) for name in names}
    joined = []
    for node in nodes:
        if mirrors(node):
            joined.append(node | {name: _rebuilt(node[name], iterators[name]) for name in names})
        else:
            joined.append([next(iterator) for iterator in iterators.values()][0])
    of_params = {name: entries[name]["params"] for name in names}
    of_before = {name: entries[name].get("before", entries[name]["params"]) for name in names}
    joined_params, joined_before = (_with_none(params, found) for found in (of_params, of_before))
    return joined_params, jax.tree.unflatten(structure, joined), *(joined_before for _ in before)


def initial_params(config: RunConfig, names: list[str]) -> Iterator[tuple[str, Any]]:
    """Entries of the parameters with which a run begins, one by one: drawn, or those of its model. BadInput where that
    is not here."""
    model, seed = config.model, config.train.seed
    if not config.init.digest:
        return ((name, init_entry(model, name, seed)) for name in names)
    return ((name, completed(model, name, tree, seed)) for name, tree in initial_entries(config, names))


def whole_params(config: RunConfig, name: str, entry: dict[str, Any] | None) -> Any:
    """The parameters of an entry of a run, of which a checkpoint has the trained ones, or nothing. BadInput where its
    frozen ones are those of a model that is not here."""
    facts = next(one for one in config.model.facts.entries if one.name == name)
    if entry and facts.n_trained == facts.n_params:
        return entry["params"]
    ((_, begun),) = initial_params(config, [name])
    return _replaced(begun, entry["params"]) if entry else begun


def _replaced(tree: Any, part: Any) -> Any:
    """A tree with the leaves of `part`, which has some of its names."""
    if not isinstance(tree, dict):
        return part
    return {name: _replaced(inner, part[name]) if name in part else inner for name, inner in tree.items()}


def _rebuilt(like: Any, leaves) -> Any:
    return jax.tree.map(lambda _: next(leaves), like)


def leaves(entry: dict) -> list[np.ndarray]:
    return jax.tree.leaves(entry)


class _Copied(np.ndarray):
    """An array that nobody writes to any more. Orbax makes a deep copy of all arrays before it writes the first one:
    12 bytes a parameter, for nothing here."""

    def __deepcopy__(self, memo: Any) -> "_Copied":
        return self


def copy_of(entries: dict[str, dict]) -> dict[str, dict]:
    """The entries in arrays of their own, in this host's memory, which must not be written to."""
    return jax.tree.map(lambda leaf: np.array(leaf).view(_Copied), entries)


def write_entries(path: Path, entries: dict[str, dict]) -> None:
    """Write entries as arrays to a folder that does not exist yet. OSError or ValueError from a disk that refuses."""
    with _orbax() as checkpointer:
        checkpointer.save(path.absolute(), entries)


def _orbax() -> ocp.Checkpointer:
    _take_no_notice_of_late_results()
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


@functools.cache
def _take_no_notice_of_late_results() -> None:
    """Once a disk has refused one array, Orbax closes the event loop of all. TensorStore's threads then have no loop
    to which to bring the outcome of the other arrays, and would print a traceback for each: nobody waits for them."""
    show = sys.unraisablehook

    def show_others(ignored: "sys.UnraisableHookArgs") -> None:
        raised_in = traceback.extract_tb(ignored.exc_traceback)[-1:]
        if not (ignored.exc_type is RuntimeError and raised_in and Path(raised_in[0].filename).parent == ASYNCIO):
            show(ignored)

    sys.unraisablehook = show_others


def load_entries(folder: Path, names: list[str] | None = None) -> dict[str, dict]:
    """Entries of a complete checkpoint as numpy arrays: all, or those in `names`."""
    return load_parts(complete_record(folder).checkpoint.parts, [folder], names)


def load_parts(parts: Collection[ev.Part], folders: list[Path], names: list[str] | None = None) -> dict[str, dict]:
    """Entries of these parts, as far as they are in one of the folders: all, or those in `names`."""
    return dict(read_parts(parts, folders, names))


def read_parts(
    parts: Collection[ev.Part], folders: list[Path], names: list[str] | None = None
) -> Iterator[tuple[str, dict]]:
    """As load_parts, one entry at a time: each is read when it is asked for. BadInput at once where one is not there or
    its part is damaged."""
    places: dict[str, tuple[Path, Any]] = {}
    absent: list[str] = []
    for part in sorted(parts, key=lambda part: part.stage):
        path = find_part(folders, part.digest)
        if path:
            for name, leaves in _about_entries(path, part.digest).items():
                places.setdefault(name, (path, leaves))
        else:
            absent.append(part_name(part.stage, part.digest))
    required = names or []
    missing = sorted(set(required) - set(places))
    if missing and absent:
        lacks = f"{folders[-1]}: lacks {', '.join(absent)}, expected the parts with {', '.join(missing)}"
        raise BadInput(f"{lacks}; copy them from that folder on other hosts: each lies where a peer of its stage ran")
    if missing:
        raise BadInput(f"{folders[-1]}: holds no {missing[0]}, expected all of {', '.join(required)}")
    chosen = places if names is None else names
    return ((name, _read_entry(name, *places[name])) for name in chosen)


def _about_entries(part: Path, digest: str) -> dict[str, Any]:
    """Shapes and dtypes of the entries of one stage's part. Orbax and tensorstore read only files that are as they were
    written; whoever reads entry by entry has each file checked once."""
    whole_unless_changed(part, digest)
    with _reading(part) as checkpointer:
        about = checkpointer.metadata(part.absolute()).item_metadata
        if about is None:
            raise BadInput(f"{part}: its metadata cannot be read")
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), dict(about.tree))


def _read_entry(name: str, part: Path, leaves: Any) -> dict:
    """One entry of a part."""
    item = {name: leaves}
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    with _reading(part) as checkpointer:
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=as_numpy, partial_restore=True)
        return checkpointer.restore(part.absolute(), args=arguments)[name]


@contextlib.contextmanager
def _reading(part: Path) -> Iterator[ocp.Checkpointer]:
    """A reader of a part; BadInput for files that it cannot read."""
    try:
        with _orbax() as checkpointer:
            yield checkpointer
    except (OSError, ValueError) as error:
        raise BadInput(f"{part}: cannot be read ({str(error).splitlines()[0]})") from None
