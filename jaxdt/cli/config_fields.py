"""The fields of a run's config as people read about them: meaning, type, default, and what is accepted.

`launch.py --help` and the page docs/reference/config.md are made from this list. All of it stands at the fields of the
dataclasses (jaxdt.run.options), but for the names of a table that is not known there. Needs no jax.
"""

import dataclasses
import json
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from absl import flags

from jaxdt.run import config as configs
from jaxdt.run.model import option_classes
from jaxdt.run.model_spec import ModelSpec
from jaxdt.run.options import accepts_of, meaning_of
from jaxdt.sync.base import SYNCS
from jaxdt.sync.matching.base import MATCHERS
from jaxdt.wiring.base import WIRINGS

TOP = ""  # the section of the fields that stand in none
# Fields that name an entry of a table.
TABLES = {"wiring.kind": WIRINGS, "sync.kind": SYNCS, "sync.groups.match": MATCHERS}


WIDTH = 120
FLAG_COLUMNS, FIELD_COLUMNS = 24, 44  # of a flag, or of a field as a flag; its text begins behind them
FIELDS = """The fields of the config, as flags with their defaults

The defaults of the model are those of its preset, --config.model.preset, and of its family, --config.model.family (by
default the one that has the preset). A config file may set any of them, and a flag has the last word; --print_config
shows what comes of it. More words on each field: docs/reference/config.md"""


@dataclass(frozen=True)
class ConfigField:
    """One field. `name`: such as train.steps. `default`: as JSON, None where the model preset has it. `accepts`: the
    config's own words, "" where nothing but the type is checked."""

    name: str
    type_name: str
    default: str | None
    accepts: str
    meaning: str


def sections() -> dict[str, type]:
    """The dataclass of each section by its dotted name, in order: the top level first, the model last, once for each
    family, whose name stands behind it in parentheses."""
    models = {f"model ({family})": options for family, options in option_classes().items()}
    return dict(_sections(configs.RunConfig, TOP)) | models


def prefix_of(section: str) -> str:
    """What stands before the dot in the names of a section's fields."""
    return section.partition(" ")[0]


def all_names() -> list[str]:
    """The dotted name of each field once, whichever families have it."""
    return list(dict.fromkeys(field.name for name, kind in sections().items() for field in fields_of(kind, name)))


def _sections(kind: type, name: str) -> Iterator[tuple[str, type]]:
    yield name, kind
    for field, field_kind in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(field_kind) and isinstance(field_kind, type):
            yield from _sections(field_kind, f"{name}.{field}" if name else field)


def fields_of(kind: type, section: str) -> list[ConfigField]:
    """The fields of a section that are no sections themselves."""
    kinds = typing.get_type_hints(kind)
    found: list[ConfigField] = []
    for field in dataclasses.fields(kind):
        is_section = dataclasses.is_dataclass(kinds[field.name]) or kinds[field.name] is ModelSpec
        if is_section or (issubclass(kind, ModelSpec) and field.name not in kind.field_names()):
            continue
        name = f"{prefix_of(section)}.{field.name}" if section else field.name
        found.append(
            ConfigField(
                name=name,
                type_name=_type_name(kinds[field.name]),
                default=_default(field),
                accepts=_accepts(field, name),
                meaning=meaning_of(field),
            )
        )
    return found


def _type_name(kind: typing.Any) -> str:
    """The name of a type as people write it: int, or tuple[int, ...]."""
    return kind.__name__ if isinstance(kind, type) and not typing.get_origin(kind) else str(kind)


def _default(field: dataclasses.Field[typing.Any]) -> str | None:
    if field.default is not dataclasses.MISSING:
        return json.dumps(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return json.dumps(field.default_factory())
    return None


def _accepts(field: dataclasses.Field[typing.Any], name: str) -> str:
    """The values that the config accepts for a field, as text; "" where only the type is checked."""
    if name in TABLES:
        return f"one of {', '.join(TABLES[name])}"
    accepts = accepts_of(field)
    return accepts.text if accepts else ""


# ------------------------------------------------------------------------------------------------------------ --help


def help_text(about: str, subjects: Mapping[str, Sequence[str]]) -> str:
    """The help of a script: what it is `about`, the flags of each subject, and the fields of the config."""
    parts = [about.strip()]
    for subject, names in subjects.items():
        parts.append("\n".join([subject, *(_flag_entry(flags.FLAGS[name]) for name in names)]))
    parts.append(FIELDS)
    for section, kind in sections().items():
        entries = [_field_entry(field) for field in fields_of(kind, section)]
        parts.append("\n".join([section or "top level", *entries]))
    return "\n\n".join(parts)


def _flag_entry(flag: flags.Flag) -> str:
    if flag.name == "config":
        usage = "--config=FILE"
    elif flag.boolean:
        usage = f"--{flag.name}" if not flag.default else f"--{flag.name}=true"
    else:
        usage = f"--{flag.name}={'...' if flag.default in (None, '', []) else flag.default}"
    return _entry(usage, flag.help, FLAG_COLUMNS)


def _field_entry(field: ConfigField) -> str:
    value = "..." if field.default is None else field.default.strip('"')
    meaning = field.meaning or field.type_name
    text = f"{meaning} ({field.accepts})" if field.accepts else meaning
    return _entry(f"--config.{field.name}={value}", text, FIELD_COLUMNS)


def _entry(usage: str, text: str, columns: int) -> str:
    """The usage, and the text beside it, or below it where the usage is long."""
    usage = f"  {usage}"
    lines = textwrap.wrap(" ".join(text.split()), WIDTH - columns)
    if len(usage) < columns - 1:
        usage = f"{usage:{columns}}{lines.pop(0)}"
    return "\n".join([usage, *(" " * columns + line for line in lines)])
