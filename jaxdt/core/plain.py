"""Frozen dataclasses <-> plain data (what JSON and msgpack can hold), with every type checked on the way in.

One mechanism serves files and messages. Tuples travel as lists; a union is written as its member; a mapping has string
keys. `read` never builds an object from data of the wrong shape: it raises BadInput that names the field.
"""

import dataclasses
import functools
import sys
import types
import typing
from typing import Any

from jaxdt.core.errors import BadInput, nearest


def write(value: Any) -> Any:
    """Plain data for a dataclass, tuple, mapping or scalar."""
    if dataclasses.is_dataclass(value):
        return {field.name: write(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [write(item) for item in value]
    if isinstance(value, dict):
        return {key: write(item) for key, item in value.items()}
    return value


def read(kind: Any, data: Any, where: str) -> Any:
    """The value of type `kind` that `data` describes; `where` names it in errors."""
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, data, where)
    if origin in (types.UnionType, typing.Union):
        return _read_union(kind, data, where)
    if origin is tuple:
        return _read_tuple(kind, data, where)
    if origin is dict:
        if not isinstance(data, dict):
            raise BadInput(f"{where}: got {_short(data)}, expected an object")
        item_kind = typing.get_args(kind)[1]
        return {str(key): read(item_kind, item, f"{where}.{key}") for key, item in data.items()}
    if kind is Any or (kind is types.NoneType and data is None):
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        if abs(data) > sys.float_info.max:
            raise BadInput(f"{where}: got {_short(data)}, expected a number that fits a float")
        return float(data)
    if kind is dict and isinstance(data, dict):
        return data
    if not isinstance(kind, type) or not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise BadInput(f"{where}: got {_short(data)}, expected {getattr(kind, '__name__', kind)}")
    return data


@functools.cache
def _field_kinds(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_dataclass(kind: type, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise BadInput(f"{where}: got {_short(data)}, expected an object with the fields of {kind.__name__}")
    kinds = _field_kinds(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    prefix = f"{where}." if where else ""
    for name in data:
        if name not in known:
            raise BadInput(f"{prefix}{name}: unknown field{nearest(str(name), known)}; known: {', '.join(known)}")
    for name, field in known.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise BadInput(f"{prefix}{name}: missing")
    return kind(**{name: read(kinds[name], item, f"{prefix}{name}") for name, item in data.items()})


def _read_union(kind: Any, data: Any, where: str) -> Any:
    members = typing.get_args(kind)
    if data is None and types.NoneType in members:
        return None
    rest = [member for member in members if member is not types.NoneType]
    if len(rest) == 1:
        return read(rest[0], data, where)
    for member in rest:
        if isinstance(member, type) and isinstance(data, member) and isinstance(data, bool) == (member is bool):
            return data
    raise BadInput(f"{where}: got {_short(data)}, expected {kind}")


def _read_tuple(kind: Any, data: Any, where: str) -> tuple:
    if not isinstance(data, list | tuple):
        raise BadInput(f"{where}: got {_short(data)}, expected a list")
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(read(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(args) != len(data):
        raise BadInput(f"{where}: got {len(data)} items, expected {len(args)}")
    return tuple(read(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
