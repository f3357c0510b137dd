"""The text of `launch.py --help`: flags by subject, and every field of the config. Needs no jax."""

import textwrap
from collections.abc import Mapping, Sequence

from absl import flags

from jaxdt.cli.config_fields import ConfigField, fields_of, sections

WIDTH = 120
FLAG_COLUMNS, FIELD_COLUMNS = 24, 44  # of a flag, or of a field as a flag; its text begins behind them
FIELDS = """The fields of the config, as flags with their defaults

The defaults of the model are those of its preset, --config.model.preset, and of its family, --config.model.family (by
default the one that has the preset). A config file may set any of them, and a flag has the last word; --print_config
shows what comes of it. More words on each field: docs/reference/config.md"""


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
