"""From the files of another project to a model folder, one tensor and one entry at a time."""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxdt.interop.tensor_names import Tensor, names_of, tensors_of
from jaxdt.run.errors import BadInput, shortened
from jaxdt.run.model_spec import ModelSpec
from jaxdt.runtime.storage.model_folder import ModelRecord, ModelWriter, new_folder


class Source(Protocol):
    """Files with a model. `where` names them in errors, `names` are the tensors that are parameters, and `origin` gives
    the small files that stay with the model. `names_of` a tensor are several where the files have one for each
    expert."""

    where: str
    options: ModelSpec

    @property
    def names(self) -> set[str]: ...
    @property
    def origin(self) -> Iterable[tuple[str, bytes]]: ...
    def names_of(self, tensor: Tensor) -> list[str]: ...
    def shape(self, tensor: Tensor, name: str) -> tuple[int, ...]: ...
    def read(self, tensor: Tensor) -> np.ndarray: ...


def import_model(source: Source, folder: Path) -> ModelRecord:
    """Write a new model folder. BadInput if the tensors are not those of the model; nothing is written then."""
    options = source.options
    tensors = {entry.name: tensors_of(options, entry.name) for entry in options.facts.entries}
    _check(source, tensors)
    with new_folder(folder, "a model") as temporary:
        writer = ModelWriter(temporary)
        for name, leaves in tensors.items():
            writer.add(name, {path: source.read(tensor) for path, tensor in leaves.items()})
        for name, content in source.origin:
            writer.add_origin(name, content)
        return writer.finish(options)


def _check(source: Source, tensors: dict[str, dict[str, Tensor]]) -> None:
    """BadInput that lists, in one line, the tensors that are missing, left over or of another shape."""
    names, missing, misshapen = source.names, list[str](), list[str]()
    left_over = set(names)
    for entry in source.options.facts.entries:
        for leaf in entry.leaves:
            tensor = tensors[entry.name][leaf.path]
            tensor_names = source.names_of(tensor)
            expected = leaf.shape[1:] if tensor_names == tensor.hf_names and tensor.n_experts else leaf.shape
            left_over.difference_update(tensor_names)
            missing += [name for name in tensor_names if name not in names]
            for name in names.intersection(tensor_names):
                if (shape := source.shape(tensor, name)) != expected:
                    misshapen.append(f"{name} {list(shape)} instead of {list(expected)}")
    if own_head := source.options.own_head:  # a tied one is a copy of the table, which some files have all the same
        left_over.difference_update(source.names_of(names_of(source.options)[own_head[0]][own_head[1]]))
    problems = {"lacks": sorted(missing), "has no use for": sorted(left_over), "has other shapes:": sorted(misshapen)}
    texts = [f"{what} {shortened(found)}" for what, found in problems.items() if found]
    if texts:
        raise BadInput(f"{source.where}: {'; '.join(texts)}; expected the tensors of the model of its config")
