"""The decorator of values that are made by the hundred thousand: a frozen dataclass with slots, whose constructor and
whose comparison with itself are fast.

The constructor of a frozen dataclass calls object.__setattr__ once per field, which takes most of its time. This one
writes through the descriptors of the slots and takes a third of the time. And a value is mostly compared with the very
object that was handed on before. Everything else is the dataclass's.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")


@overload
def frozen_dataclass(cls: type[T], /) -> type[T]: ...
@overload
def frozen_dataclass(*, order: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def frozen_dataclass(cls: type[Any] | None = None, /, *, order: bool = False) -> Any:
    """@frozen_dataclass or @frozen_dataclass(order=True): dataclass(frozen=True, slots=True, order=...) with a fast
    __init__ and __eq__."""
    if cls is None:
        return functools.partial(_with_fast_constructor, order=order)
    return _with_fast_constructor(cls, order=order)


def _with_fast_constructor(cls: type[T], *, order: bool) -> type[T]:
    assert "__eq__" not in vars(cls), "it would be replaced"
    made = dataclasses.dataclass(frozen=True, slots=True, order=order)(cls)
    fields = dataclasses.fields(made)  # pyright: ignore[reportArgumentType]
    if fields:
        made.__init__ = _constructor(made, fields)
        made.__eq__ = _comparison([field.name for field in fields if field.compare])
    return made


def _comparison(names: list[str]) -> Callable[..., bool]:
    own, others = ("".join(f"{value}.{name}, " for name in names) for value in ("self", "other"))
    scope: dict[str, Any] = {}
    exec(
        "def __eq__(self, other):\n"
        "    if other is self: return True\n"
        f"    return ({own}) == ({others}) if other.__class__ is self.__class__ else NotImplemented",
        scope,
    )
    return scope["__eq__"]


def _constructor(cls: type[Any], fields: tuple[dataclasses.Field[Any], ...]) -> Callable[..., None]:
    missing = dataclasses.MISSING
    scope: dict[str, Any] = {"MISSING": missing}
    parameters: list[str] = []
    factories: list[str] = []
    assignments: list[str] = []
    for field in fields:
        name = field.name
        scope[f"set_{name}"] = getattr(cls, name).__set__
        scope[f"default_{name}"] = field.default
        scope[f"make_{name}"] = field.default_factory
        required = field.default is missing and field.default_factory is missing
        parameters.append(name if required else f"{name}=default_{name}")
        if field.default_factory is not missing:
            factories.append(f"    if {name} is MISSING: {name} = make_{name}()")
        assignments.append(f"    set_{name}(self, {name})")
    body = "\n".join(sorted(factories) + assignments)
    exec(f"def __init__(self, {', '.join(parameters)}):\n{body}", scope)
    return scope["__init__"]
