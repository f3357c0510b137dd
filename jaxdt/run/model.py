"""The table of families of models, and options that plain data describes. The options of a family are in
jaxdt/run/families, its functions in jaxdt/model/families, each in the file of its name. What follows from options, such
as sizes and FLOP, are the facts of the model (jaxdt.run.model_facts).
"""

import warnings
from collections.abc import Mapping
from importlib import import_module
from typing import Any, get_type_hints

from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, require_one_of
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.own_model import OwnModel, is_own

# The first family is that of files which name none.
FAMILIES = ("gpt", "llama", "moe")


def option_classes() -> dict[str, type[ModelSpec]]:
    """All classes of options, by the name of the family; that of models of one's own comes last."""
    return {family: options_class(family) for family in FAMILIES} | {"your own": OwnModel}


def renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with the names of today. An earlier program recorded an old name; one that a person wrote is read
    too, with a warning. BadInput for both names at once."""
    found = dict(options)
    if "seq_len" not in found:
        return found
    ways = "data.seq_len for the tokens of a sample, or model.max_len for the most that the model takes"
    if "max_len" in found:
        raise BadInput(f"model.seq_len: got {found['seq_len']!r} beside model.max_len, expected {ways}")
    names = set(get_type_hints(options_class(FAMILIES[0]).__init__)) - {"return"}
    if names - set(found) != {"max_len"}:
        warnings.warn(f"model.seq_len is an old name: use {ways}", FutureWarning, stacklevel=2)
    found["max_len"] = found.pop("seq_len")
    return found


def options_class(family: str) -> type[ModelSpec]:
    """The class of a family's options."""
    return import_module(f"jaxdt.run.families.{family}").OPTIONS


def options_of(preset: Any = "debug", family: Any = None, **overrides: Any) -> ModelSpec:
    """The options of a preset with the given fields replaced. Without a family, the first one that has the preset.
    Values are checked here, since they may come straight from a file."""
    if is_own(family):
        return OwnModel.of(preset, family=family, **renamed(overrides))
    if family is None:
        owners = [(name, owner) for owner in FAMILIES for name in options_class(owner).presets]
        require_one_of("model.preset", preset, tuple(dict(owners)))
        family = next(owner for name, owner in owners if name == preset)
    return _class_named(family, "model").of(preset, **renamed(overrides))


def read_options(data: Any, where: str) -> ModelSpec:
    """The options that plain data describes in full; `where` names them in errors."""
    if serialize.is_object(data) and is_own(data.get("family")):
        return OwnModel.of("debug", **data)
    options = renamed(data) if serialize.is_object(data) else data
    family = options.pop("family", FAMILIES[0]) if serialize.is_object(options) else FAMILIES[0]
    return serialize.read(_class_named(family, where), options, where)


def as_fields(options: ModelSpec) -> dict[str, Any]:
    """The fields of the section `model` of a config that describe these options; read_options reads them too."""
    return {"family": options.family, **recorded(options)}


def recorded(options: ModelSpec) -> dict[str, Any]:
    """The options as plain data for a record that is compared with others, without an empty adapter, which those of
    before lack."""
    return {name: value for name, value in serialize.write(options).items() if name != "adapter" or value}


def _class_named(family: Any, where: str) -> type[ModelSpec]:
    require_one_of(f"{where}.family", family, FAMILIES)
    return options_class(family)
