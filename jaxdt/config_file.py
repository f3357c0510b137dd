"""The base of every configs/*.py file: a ConfigDict with all fields of a run. Each field is also a --config.* flag."""

import dataclasses
import typing

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxdt.run import config, serialize
from jaxdt.run.model import option_classes


def base_config(preset: str = "debug") -> ConfigDict:
    """All fields with their defaults. Model fields, those of all families, are unset: those that stay unset get the
    values of the preset (jaxdt.run.config)."""
    model: dict[str, object] = {"preset": preset, "family": placeholder(str)}
    for options in option_classes().values():
        kinds = typing.get_type_hints(options)
        for name in options.field_names():
            model[name] = placeholder(typing.get_origin(kinds[name]) or kinds[name])
    fields: dict[str, object] = {"model": model}
    for field in dataclasses.fields(config.RunConfig):
        if field.name != "model":
            if field.default_factory is not dataclasses.MISSING:
                fields[field.name] = serialize.write(field.default_factory())
            else:
                fields[field.name] = serialize.write(field.default)
    return ConfigDict(fields)
