"""Writes docs/reference/config.md and the JSON Schemas of docs/reference/schemas, all from dataclasses, and the rows of
trials and comparisons in BUILD.md, from their files.

    python docs/generate.py            writes the files
    python docs/generate.py --check    writes nothing; exit code 1 if a file differs from what would be written

The rows of a table come from jaxdt/cli/config_fields.py, as those of `launch.py --help` do, and the text above a table
from the dataclass. A row of BUILD.md is the first line of a file's docstring. Needs no jax.
"""

import argparse
import ast
import json
import re
import sys
from pathlib import Path

from jaxdt.cli import config_fields
from jaxdt.run.model_spec import ModelSpec
from planner.model.file_schemas import schemas

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from experiments.ablation.grid import AblationConfig  # noqa: E402

PAGE = Path(__file__).resolve().parent / "reference" / "config.md"
SCHEMAS = PAGE.parent / "schemas"
BUILD = ROOT / "BUILD.md"
DRIVERS = {
    "trial": "trials",
    "compare": "comparisons",
}  # a script of scripts/experiments, and the folder of what it plays
ROWS = re.compile(rf"(?:^\| `python scripts/experiments/(?:{'|'.join(DRIVERS)})\.py .*\n)+", re.MULTILINE)

HEAD = """# Config fields

*Written by `python docs/generate.py` from the dataclasses in `jaxdt/run/`. Do not edit.*

A config file (`configs/*.py`) returns these fields; each one is a flag too: `--config.plan.stages=4`. A name that does
not exist is refused, with the nearest one that does. "Accepts" is the config's own error message, where there is one.

`scripts/launch.py --help` prints the same list. With `--print_config` it prints the config that a command line gives,
and for each field where its value comes from: config file, preset, plan, `--init_from`, resume, flag or default. It
starts nothing.
"""
MODEL = """`model.family` names a family, by default the one that has the preset. `model.preset` names a preset, by
default `debug`; the other fields change it. A changed `d_model` moves an unset `d_ff` in proportion. The vocabulary
defaults to that of the token file."""
ABLATION = "Only in the config of `scripts/ablate.py`."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    files = {PAGE: page(), BUILD: ROWS.sub(lambda _: played_rows(), BUILD.read_text())}
    files |= {SCHEMAS / name: json.dumps(schema, indent=1) + "\n" for name, schema in schemas().items()}
    if not parser.parse_args().check:
        SCHEMAS.mkdir(exist_ok=True)
        for path, text in files.items():
            path.write_text(text)
            print(f"wrote {path}")
        return 0
    wrong = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in wrong:
        print(f"{path}: differs from its sources, expected what `python docs/generate.py` writes", file=sys.stderr)
    return 1 if wrong else 0


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for section, kind in config_fields.sections().items():
        parts.append(f"## {section or 'Top level'}")
        is_model = issubclass(kind, ModelSpec)
        parts += [MODEL if is_model and MODEL not in parts else "", prose(kind), table(kind, section)]
        parts.append(presets(kind) if is_model and not kind.has_own_sources else "")
    parts += ["## ablation", ABLATION, prose(AblationConfig), table(AblationConfig, "ablation")]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def played_rows() -> str:
    """A row for each trial and each comparison: its command, what it does, and its page."""
    rows = []
    for script, folder in DRIVERS.items():
        for path in sorted((ROOT / "scripts/experiments" / folder).glob("[a-z]*.py")):
            text, name = path.read_text(), path.stem
            does = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].rstrip(".")
            of_page = re.search(r'page=ROOT / "(.*)"', text)
            link = f" ([page]({of_page[1]}/README.md))" if of_page else ""
            rows.append(f"| `python scripts/experiments/{script}.py {name} --run_dir=runs/{name}` | {does}{link} |\n")
    return "".join(rows)


def prose(kind: type) -> str:
    """The docstring of a dataclass as Markdown."""
    lines = (kind.__doc__ or "").splitlines()
    return "\n".join([lines[0], *(line.strip() for line in lines[1:])])


def table(kind: type, section: str) -> str:
    """One row for each field that is not a section of its own. The ablation's fields have their meanings above."""
    fields = config_fields.fields_of(kind, section)
    has_meanings = any(field.meaning for field in fields)
    head = ["field", *(["meaning"] if has_meanings else []), "type", "default", "accepts"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for field in fields:
        default = "of the preset" if field.default is None else f"`{field.default}`"
        cells = [f"`{field.name}`", *([field.meaning] if has_meanings else []), field.type_name, default, field.accepts]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def presets(kind: type[ModelSpec]) -> str:
    """One row for each preset of a family."""
    names = sorted({name for preset in kind.presets.values() for name in preset}, key=kind.field_names().index)
    rows = [f"| preset | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for preset, values in kind.presets.items():
        cells = [json.dumps(values[name]) if name in values else "" for name in names]
        rows.append(f"| `{preset}` | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
