"""Writes docs/reference/config.md and the JSON Schemas of docs/reference/schemas, all from dataclasses.

    python docs/generate.py            writes the files
    python docs/generate.py --check    writes nothing; exit code 1 if a file differs from what would be written

Names, defaults and descriptions come from the dataclasses. What a field accepts comes from the table that it names an
entry of, else from the error message that the config gives for a value that no field accepts. Needs no jax.
"""

import argparse
import dataclasses
import json
import re
import sys
import typing
from pathlib import Path

from jaxdt.ablation.grid import AblationConfig
from jaxdt.spec import config as configs
from jaxdt.spec.errors import BadInput
from jaxdt.spec.model import PRESETS, GPTConfig
from jaxdt.sync.base import SYNCS
from jaxdt.wiring.base import WIRINGS
from planner.model.file_schemas import schemas

PAGE = Path(__file__).resolve().parent / "reference" / "config.md"
SCHEMAS = PAGE.parent / "schemas"
TABLES = {"wiring.kind": WIRINGS, "sync.kind": SYNCS}  # fields that name an entry of a table
NO_VALUE = {str: "?", int: -1, float: -1.0}  # values that no restricted field accepts
SIZE = re.compile(r"((?:model\.)?(?:n_layers|d_model|seq_len)) \d+")  # a size of the config that was tried

HEAD = """# Config fields

*Written by `python docs/generate.py` from the dataclasses in `jaxdt/spec/`. Do not edit.*

A config file (`configs/*.py`) returns these fields; each one is a flag too: `--config.plan.stages=4`. A name that does
not exist is refused, with the nearest one that does. "Accepts" is the config's own error message, where there is one.
"""
TOP = "## Top level"
MODEL = """`model.preset` names a preset; the other fields change it. A changed `d_model` moves an unset `d_ff` to
4 `d_model`. The vocabulary defaults to that of the token file."""
ABLATION = "Only in the config of `scripts/ablate.py`."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    files = {PAGE: page()} | {SCHEMAS / name: json.dumps(schema, indent=1) + "\n" for name, schema in schemas().items()}
    if not parser.parse_args().check:
        SCHEMAS.mkdir(exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
            print(f"wrote {path}")
        return 0
    wrong = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in wrong:
        print(f"{path}: differs from the dataclasses, expected what `python docs/generate.py` writes", file=sys.stderr)
    return 1 if wrong else 0


def page() -> str:
    """The whole page."""
    parts = [HEAD, TOP, prose(configs.RunConfig), table(configs.RunConfig, "")]
    sections = typing.get_type_hints(configs.RunConfig)
    for field in dataclasses.fields(configs.RunConfig):
        kind = sections[field.name]
        if field.name != "model" and dataclasses.is_dataclass(kind):
            parts += [f"## {field.name}", prose(kind), table(kind, field.name)]
    parts += ["## model", MODEL, prose(GPTConfig), table(GPTConfig, "model"), presets()]
    parts += ["## ablation", ABLATION, prose(AblationConfig), table(AblationConfig, "ablation")]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def prose(kind: type) -> str:
    """The docstring of a dataclass as Markdown."""
    lines = (kind.__doc__ or "").splitlines()
    return "\n".join([lines[0], *(line.strip() for line in lines[1:])])


def table(kind: type, section: str) -> str:
    """One row for each field that is not a section of its own."""
    kinds = typing.get_type_hints(kind)
    rows = ["| field | type | default | accepts |", "|---|---|---|---|"]
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(kinds[field.name]):
            continue
        name = f"{section}.{field.name}" if section else field.name
        cells = [f"`{name}`", type_name(kinds[field.name]), default(field), accepts(section, field.name, kinds)]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def type_name(kind: typing.Any) -> str:
    """As people write it: int, or tuple[int, ...]."""
    return kind.__name__ if isinstance(kind, type) and not typing.get_origin(kind) else str(kind)


def default(field: dataclasses.Field) -> str:
    """The default as JSON."""
    if field.default is not dataclasses.MISSING:
        return f"`{json.dumps(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    return "of the preset"


def accepts(section: str, name: str, kinds: dict[str, typing.Any]) -> str:
    """What the config expects of a field; '' where nothing but the type is checked."""
    if f"{section}.{name}" in TABLES:
        return f"one of {', '.join(TABLES[f'{section}.{name}'])}"
    value = NO_VALUE.get(kinds[name])
    if value is None or section == "ablation":
        return ""
    data: dict[str, typing.Any] = {"model": {"preset": "debug"}}
    (data.setdefault(section, {}) if section else data)[name] = value
    try:
        configs.parse(data)
    except BadInput as error:
        return SIZE.sub(r"\1", str(error).partition("expected ")[2])
    return ""


def presets() -> str:
    """One row for each preset."""
    known = [field.name for field in dataclasses.fields(GPTConfig)]
    names = sorted({name for preset in PRESETS.values() for name in preset}, key=known.index)
    rows = [f"| preset | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for preset, values in PRESETS.items():
        cells = [json.dumps(values[name]) if name in values else "" for name in names]
        rows.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
