"""The decorator of values that are made by the hundred thousand: a frozen dataclass with slots and a fast constructor.

The constructor of a frozen dataclass calls object.__setattr__ once per field, which takes most of its time; this one
writes through the slots' own descriptors and takes a third of it. Everything else is the dataclass's.
"""

import dataclasses
from typing import dataclass_transform


@dataclass_transform(frozen_default=True)
def value(cls: type | None = None, /, **options):
    """@value or @value(order=True): dataclass(frozen=True, slots=True, ...) with a fast __init__."""
    if cls is None:
        return lambda cls: value(cls, **options)
    made = dataclasses.dataclass(frozen=True, slots=True, **options)(cls)
    fields = dataclasses.fields(made)
    if fields and not any(field.default_factory is not dataclasses.MISSING for field in fields):
        made.__init__ = _constructor(made, fields)
    return made


def _constructor(cls: type, fields: tuple[dataclasses.Field, ...]):
    scope = {f"set_{field.name}": getattr(cls, field.name).__set__ for field in fields}
    scope |= {f"default_{field.name}": field.default for field in fields}
    given = lambda field: "" if field.default is dataclasses.MISSING else f"=default_{field.name}"  # noqa: E731
    parameters = ", ".join(field.name + given(field) for field in fields)
    body = "\n".join(f"    set_{field.name}(self, {field.name})" for field in fields)
    exec(f"def __init__(self, {parameters}):\n{body}", scope)
    return scope["__init__"]
