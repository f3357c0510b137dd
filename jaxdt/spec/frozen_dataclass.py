"""The decorator of values that are made by the hundred thousand: a frozen dataclass with slots and a fast constructor.

The constructor of a frozen dataclass calls object.__setattr__ once per field, which takes most of its time; this one
writes through the slots' own descriptors and takes a third of it. Everything else is the dataclass's.
"""

import dataclasses
from typing import dataclass_transform


@dataclass_transform(frozen_default=True)
def frozen_dataclass(cls: type | None = None, /, **options):
    """@frozen_dataclass or @frozen_dataclass(order=True): dataclass(frozen=True, slots=True, ...) with a fast
    __init__."""
    if cls is None:
        return lambda cls: frozen_dataclass(cls, **options)
    made = dataclasses.dataclass(frozen=True, slots=True, **options)(cls)
    fields = dataclasses.fields(made)
    if fields:
        made.__init__ = _constructor(made, fields)
    return made


def _constructor(cls: type, fields: tuple[dataclasses.Field, ...]):
    scope = {f"set_{field.name}": getattr(cls, field.name).__set__ for field in fields}
    scope |= {f"default_{field.name}": field.default for field in fields}
    scope |= {f"make_{field.name}": field.default_factory for field in fields} | {"MISSING": dataclasses.MISSING}
    made_here = {field.name for field in fields if field.default_factory is not dataclasses.MISSING}
    has_none = lambda field: field.default is dataclasses.MISSING and field.name not in made_here  # noqa: E731
    parameters = ", ".join(field.name + ("" if has_none(field) else f"=default_{field.name}") for field in fields)
    lines = [f"    if {name} is MISSING: {name} = make_{name}()" for name in sorted(made_here)]
    body = "\n".join(lines + [f"    set_{field.name}(self, {field.name})" for field in fields])
    exec(f"def __init__(self, {parameters}):\n{body}", scope)
    return scope["__init__"]
