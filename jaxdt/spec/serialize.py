"""Frozen dataclasses <-> plain data (what JSON and msgpack can hold), with every type checked on the way in.

One mechanism serves files and messages. Tuples travel as lists; a union is written as its member; a mapping has string
keys. `read` never builds an object from data of the wrong shape: it raises BadInput that names the field. A type's
reader is made once, since messages pass here by the thousand.
"""

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

from jaxdt.spec.errors import BadInput, nearest

SCALARS = frozenset((int, float, str, bool, types.NoneType))


class _Wrong(Exception):
    """Where below the top, as text such as `.members[2].peer`, and what is wrong there."""

    def __init__(self, text: str, at: str = ""):
        super().__init__(text)
        self.text, self.at = text, at

    def under(self, segment: str) -> "_Wrong":
        self.at = segment + self.at
        return self


def write(value: Any) -> Any:
    """Plain data for a dataclass, tuple, mapping or scalar."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind is tuple or kind is list:
        return [write(item) for item in value]
    if kind is dict:
        return {key: write(item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return {name: write(getattr(value, name)) for name in _names(kind)}
    return value


def read(kind: Any, data: Any, where: str) -> Any:
    """The value of type `kind` that `data` describes; `where` names it in errors."""
    try:
        return _reader(kind)(data)
    except _Wrong as wrong:
        path = where + wrong.at
        raise BadInput(f"{path.removeprefix('.')}: {wrong.text}") from None


@functools.cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(kind)
    if origin is tuple:
        return _tuple_reader(kind)
    if origin is dict:
        return _mapping_reader(typing.get_args(kind)[1])
    if kind is Any:
        return lambda data: data
    if kind is float:
        return _read_float
    return functools.partial(_read_scalar, kind)


def _read_scalar(kind: type, data: Any) -> Any:
    if type(data) is kind or (kind is dict and isinstance(data, dict)):
        return data
    raise _Wrong(f"got {_short(data)}, expected {getattr(kind, '__name__', kind)}")


def _read_float(data: Any) -> float:
    if type(data) is float:
        return data
    if type(data) is not int:
        raise _Wrong(f"got {_short(data)}, expected float")
    if abs(data) > sys.float_info.max:
        raise _Wrong(f"got {_short(data)}, expected a number that fits a float")
    return float(data)


def _mapping_reader(item_kind: Any) -> Callable[[Any], dict]:
    def reader(data: Any) -> dict:
        if not isinstance(data, dict):
            raise _Wrong(f"got {_short(data)}, expected an object")
        return {str(key): _inner(item_reader, item, f".{key}") for key, item in data.items()}

    item_reader = _reader(item_kind)
    return reader


def _inner(reader: Callable[[Any], Any], item: Any, segment: str) -> Any:
    try:
        return reader(item)
    except _Wrong as wrong:
        raise wrong.under(segment) from None


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    kinds = typing.get_type_hints(kind)
    known = {field.name: field for field in dataclasses.fields(kind)}
    missing = dataclasses.MISSING
    required = [n for n, f in known.items() if f.default is missing and f.default_factory is missing]

    def reader(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _Wrong(f"got {_short(data)}, expected an object with the fields of {kind.__name__}")
        values = {}
        name = None
        try:
            for name, item in data.items():
                if name not in readers:
                    hint = nearest(str(name), known)
                    raise _Wrong(f"unknown field{hint}; known: {', '.join(known)}")
                values[name] = readers[name](item)
        except _Wrong as wrong:
            raise wrong.under(f".{name if name in readers else _named(name)}") from None
        for name in required:
            if name not in values:
                raise _Wrong("missing", f".{name}")
        return kind(**values)

    readers = {name: _reader(kinds[name]) for name in known}
    return reader


def _union_reader(kind: Any) -> Callable[[Any], Any]:
    members = typing.get_args(kind)
    rest = [member for member in members if member is not types.NoneType]
    only = _reader(rest[0]) if len(rest) == 1 else None

    def reader(data: Any) -> Any:
        if data is None and types.NoneType in members:
            return None
        if only:
            return only(data)
        if type(data) in rest:
            return data
        raise _Wrong(f"got {_short(data)}, expected {kind}")

    return reader


def _tuple_reader(kind: Any) -> Callable[[Any], tuple]:
    args = typing.get_args(kind)
    endless = len(args) == 2 and args[1] is Ellipsis
    readers = [_reader(arg) for arg in args if arg is not Ellipsis]

    def reader(data: Any) -> tuple:
        if not isinstance(data, list | tuple):
            raise _Wrong(f"got {_short(data)}, expected a list")
        if not endless and len(readers) != len(data):
            raise _Wrong(f"got {len(data)} items, expected {len(readers)}")
        values = []
        try:
            for item_reader, item in zip(readers * len(data) if endless else readers, data, strict=True):
                values.append(item_reader(item))
        except _Wrong as wrong:
            raise wrong.under(f"[{len(values)}]") from None
        return tuple(values)

    return reader


def _named(name: Any) -> str:
    """A field's name as somebody else wrote it, in one line."""
    text = str(name)
    return text if text.isprintable() and len(text) <= 60 else _short(name)


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."
