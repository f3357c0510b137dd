"""Frozen dataclasses <-> plain data (what JSON and msgpack can hold), with every type checked on the way in.

One mechanism serves files, messages and traces. Tuples travel as lists; a union is written as its member, and a member
of an enum as its value; a mapping has keys of text, or numbers that are written as text. `read` never builds an object
from data of the wrong shape: it raises BadInput that names the field. The reader of a type is made once, since messages
pass here by the thousand.
"""

import dataclasses
import enum
import functools
import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar, overload

from jaxdt.run.errors import BadInput, is_text, nearest, require_printable
from jaxdt.run.options import accepts_of, refusal

SCALARS: frozenset[type] = frozenset((int, float, str, bool, types.NoneType))
SHORT_CHARACTERS = 60
SCHEMA_KEY = "$schema"  # under which a file names the JSON Schema that it follows
T = TypeVar("T")
Reader = Callable[[Any], Any]


class _Mismatch(Exception):
    """Data that does not fit its type: what is wrong, and where below the top, as text such as `.members[2].peer`."""

    def __init__(self, text: str, path: str = ""):
        super().__init__(text)
        self.text = text
        self.path = path

    def inside(self, segment: str) -> "_Mismatch":
        """The same mismatch, seen from one level up."""
        self.path = segment + self.path
        return self


def is_object(data: Any) -> TypeGuard[dict[str, Any]]:
    """Whether plain data is what JSON calls an object."""
    return isinstance(data, dict)


def is_list(data: Any) -> TypeGuard[list[Any]]:
    """Whether plain data is a list."""
    return isinstance(data, list)


def write(value: Any) -> Any:
    """Plain data for a dataclass, tuple, mapping, member of an enum, or scalar."""
    kind: type[Any] = value.__class__
    if kind in SCALARS:
        return value
    if kind is tuple or kind is list:
        return [write(item) for item in value]
    if kind is dict:
        return {key: write(item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return {name: write(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, enum.Enum):
        return value.value
    return value


@overload
def read(kind: type[T], data: Any, where: str) -> T: ...
@overload
def read(kind: types.UnionType, data: Any, where: str) -> Any: ...
def read(kind: Any, data: Any, where: str) -> Any:
    """The value of type `kind` that `data` describes; `where` names it in errors."""
    return _read(kind, data, where, False)


def read_known(kind: Any, data: Any, where: str) -> Any:
    """Reads as `read` does, but leaves out fields that the type does not have."""
    return _read(kind, data, where, True)


def fits(kind: Any, data: Any) -> bool:
    """Whether `read_known` reads this data."""
    try:
        _reader(kind, True)(data)
    except _Mismatch:
        return False
    return True


def _read(kind: Any, data: Any, where: str, lenient: bool) -> Any:
    try:
        return _reader(kind, lenient)(data)
    except _Mismatch as mismatch:
        path = where + mismatch.path
        raise BadInput(f"{path.removeprefix('.')}: {mismatch.text}") from None


def parse_json(text: str | bytes, *, keys_once: bool = False) -> Any:
    """The value of a JSON text. ValueError for one that is none, or that is nested too deeply to be read, and with
    `keys_once`, for what people write, for an object with a key twice, of which Python would take the last."""
    try:
        return json.loads(text, object_pairs_hook=_with_keys_once if keys_once else None)
    except RecursionError:
        raise ValueError("objects or lists are nested too deeply") from None


def _with_keys_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.60} occurs {names.count(twice)} times in one object, expected once")
    return found


def json_object(text: str, source: str, file_format: str) -> dict[str, Any]:
    """The object that a file of this format holds, without its fields `format` and `$schema`; `source` names the file
    in errors."""
    try:
        data: Any = parse_json(text, keys_once=True)
    except ValueError as error:
        raise BadInput(f"{source}: not JSON ({error})") from None
    if not is_object(data) or data.pop("format", None) != file_format:
        raise BadInput(f'{source}: format: expected "{file_format}"')
    require_printable(data, source)
    data.pop(SCHEMA_KEY, None)
    return data


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _reader(kind: Any, lenient: bool) -> Reader:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind, lenient)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(kind, lenient)
    if origin is tuple:
        return _tuple_reader(kind, lenient)
    if origin is list:
        read_items = _tuple_reader(tuple[*typing.get_args(kind), ...], lenient)
        return lambda data: list(read_items(data))
    if origin in (dict, Mapping):
        key_kind, item_kind = typing.get_args(kind)
        return _mapping_reader(key_kind, item_kind, lenient)
    if kind is Any:
        return lambda data: data
    if kind is float:
        return _read_float
    if kind is str:
        return _read_str
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return functools.partial(_read_member, {member.value: member for member in kind})
    return functools.partial(_read_scalar, kind)


def _read_scalar(kind: Any, data: Any) -> Any:
    if type(data) is kind or (kind is dict and is_object(data)) or (kind not in SCALARS and isinstance(data, kind)):
        return data  # or a value that was read before
    raise _Mismatch(f"got {_short(data)}, expected {getattr(kind, '__name__', kind)}")


def _read_member(members: dict[str, Any], data: Any) -> Any:
    if type(data) is str and data in members:
        return members[data]
    raise _Mismatch(f"got {_short(data)}, expected one of {', '.join(members)}")


def _read_str(data: Any) -> str:
    if type(data) is not str:
        raise _Mismatch(f"got {_short(data)}, expected str")
    if not is_text(data):
        raise _Mismatch(f"got {_short(data)}, expected text that UTF-8 can hold")
    return data


def _read_float(data: Any) -> float:
    if type(data) is float:
        return data
    if type(data) is not int:
        raise _Mismatch(f"got {_short(data)}, expected float")
    if abs(data) > sys.float_info.max:
        raise _Mismatch(f"got {_short(data)}, expected a number that fits a float")
    return float(data)


def _mapping_reader(key_kind: Any, item_kind: Any, lenient: bool) -> Reader:
    def reader(data: Any) -> dict[Any, Any]:
        if not is_object(data):
            raise _Mismatch(f"got {_short(data)}, expected an object")
        return {key_reader(key): _read_inside(item_reader, item, f".{key}") for key, item in data.items()}

    key_reader, item_reader = _read_number if key_kind is int else str, _reader(item_kind, lenient)
    return reader


def _read_number(key: str) -> int:
    """A number that is the key of an object, which JSON makes text of."""
    if not key.removeprefix("-").isdecimal():
        raise _Mismatch(f"got the key {_short(key)}, expected an integer")
    return int(key)


def _read_inside(reader: Reader, item: Any, segment: str) -> Any:
    try:
        return reader(item)
    except _Mismatch as mismatch:
        raise mismatch.inside(segment) from None


def _dataclass_reader(kind: Any, lenient: bool) -> Reader:
    kinds = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    missing = dataclasses.MISSING
    required = [name for name, f in fields.items() if f.default is missing and f.default_factory is missing]

    def reader(data: Any) -> Any:
        if not is_object(data):
            raise _Mismatch(f"got {_short(data)}, expected an object with the fields of {kind.__name__}")
        values: dict[str, Any] = {}
        name: Any = None
        try:
            for name, item in data.items():
                if name not in readers:
                    if lenient:
                        continue
                    hint = nearest(str(name), fields)
                    raise _Mismatch(f"unknown field{hint}; known: {', '.join(fields)}")
                values[name] = readers[name](item)
        except _Mismatch as mismatch:
            raise mismatch.inside(f".{name if name in readers else _one_line(name)}") from None
        for name in required:
            if name not in values:
                raise _Mismatch("missing", f".{name}")
        return kind(**values)

    readers = {name: _accepted(field, _reader(kinds[name], lenient)) for name, field in fields.items()}
    return reader


def _accepted(field: "dataclasses.Field[Any]", reader: Reader) -> Reader:
    """A reader that also refuses what an option does not accept (jaxdt.run.options), where it stands in the data."""
    accepts = accepts_of(field)
    if accepts is None:
        return reader

    def accepted(data: Any) -> Any:
        value = reader(data)
        if refused := refusal(value, accepts, field.default):
            raise _Mismatch(refused)
        return value

    return accepted


def _union_reader(kind: Any, lenient: bool) -> Reader:
    members = typing.get_args(kind)
    others = [member for member in members if member is not types.NoneType]
    single_reader = _reader(others[0], lenient) if len(others) == 1 else None

    def reader(data: Any) -> Any:
        if data is None and types.NoneType in members:
            return None
        if single_reader:
            return single_reader(data)
        if type(data) in others:
            return data
        raise _Mismatch(f"got {_short(data)}, expected {kind}")

    return reader


def _tuple_reader(kind: Any, lenient: bool) -> Reader:
    args = typing.get_args(kind)
    endless = len(args) == 2 and args[1] is Ellipsis
    readers = [_reader(arg, lenient) for arg in args if arg is not Ellipsis]

    def reader(data: Any) -> tuple[Any, ...]:
        if not _is_list_or_tuple(data):
            raise _Mismatch(f"got {_short(data)}, expected a list")
        if not endless and len(readers) != len(data):
            raise _Mismatch(f"got {len(data)} items, expected {len(readers)}")
        values: list[Any] = []
        try:
            for item_reader, item in zip(readers * len(data) if endless else readers, data, strict=True):
                values.append(item_reader(item))
        except _Mismatch as mismatch:
            raise mismatch.inside(f"[{len(values)}]") from None
        return tuple(values)

    return reader


def _is_list_or_tuple(data: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    return isinstance(data, list | tuple)


def _one_line(name: Any) -> str:
    """A field's name as the file or the peer wrote it, in one line."""
    text = str(name)
    return text if text.isprintable() and len(text) <= SHORT_CHARACTERS else _short(name)


def _short(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= SHORT_CHARACTERS else text[: SHORT_CHARACTERS - 3] + "..."
