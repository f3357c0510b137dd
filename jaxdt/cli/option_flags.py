"""A dataclass of options (jaxdt.run.options) as flags of a script. A flag has the name, the default and the meaning of
its option; what the option accepts is checked where its value is used. Needs no jax."""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from absl import flags

from jaxdt.run.options import flag_names, meaning_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

flags.disclaim_key_flags()  # those that `define` makes are its caller's
DEFINED: Mapping[type, Callable[..., object]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    tuple: flags.DEFINE_list,
    str: flags.DEFINE_string,
}


def define(kind: "type[DataclassInstance]", *names: str) -> None:
    """Define a flag for each option of these names, or for each that has one. A script defines the flags that it reads:
    any other is refused."""
    kinds, chosen = _kinds(kind), names or flag_names(kind)
    for field in dataclasses.fields(kind):
        if field.name in chosen:
            DEFINED[kinds[field.name]](field.name, field.default, meaning_of(field))


def read(kind: type[Options]) -> Options:
    """The options as the command line gives them."""
    values = {name: flags.FLAGS[name].value for name in flag_names(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def as_text(value: object) -> str:
    """The value of an option as its flag writes it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def of_texts(kind: "type[DataclassInstance]", texts: Mapping[str, str]) -> dict[str, Any]:
    """The values of options by their names, from the texts of `as_text`."""
    kinds = _kinds(kind)
    return {name: tuple(t.split(",")) if kinds[name] is tuple else kinds[name](t) for name, t in texts.items()}


def _kinds(kind: type) -> dict[str, type]:
    """The type that the flag of each option reads: the option's own, or a text."""
    found: dict[str, type] = {}
    for name, hint in typing.get_type_hints(kind).items():
        parts = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        own = [typing.get_origin(part) or part for part in parts]
        found[name] = next((kind for kind in DEFINED if kind in own), str)
    return found
