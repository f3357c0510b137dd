"""The targets of scripts/reproduce.py: how one is written, and compared with what is committed.

A target is a module here and a page's template, configs/reproduce/TARGET/page.md. Its function `run(out, results)` gets
the values of its simulations from `results`, draws pictures into `out`, and returns what the template shows by name.
"""

import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.page import TEMPLATE, filled
from experiments.reproduce.results import FILE, ROOT, Results
from matplotlib.image import imread

PAGES = ROOT / "configs/reproduce"
# A target has a template, and a module of its name.
NAMES = {path.stem for path in Path(__file__).parent.glob("*.py")}
TARGETS = tuple(sorted(path.parent.name for path in PAGES.glob(f"*/{TEMPLATE}") if path.parent.name in NAMES))
ORIGIN = "{origin}"  # stands for that sentence until all values are there, of which some may be added


def write(name: str, out: Path, results: Results, arguments: Mapping[str, Any]) -> str:
    """Write the page of a target, its pictures and its values to a folder. Returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    target = importlib.import_module(f"experiments.reproduce.{name}")
    values = {"results": results, "origin": ORIGIN} | target.run(out, results, **arguments)
    text = filled((PAGES / name / TEMPLATE).read_text(), target, values).replace(ORIGIN, origin(name, results))
    (out / FILE).write_text(results.lines())
    (out / "README.md").write_text(text)
    return text


def origin(name: str, results: Results) -> str:
    """The sentence under a page's title: its command, and the commit at which its values were simulated."""
    made = f"`python scripts/reproduce.py {name}` writes this page and its pictures"
    return f"{made}. Values (`{FILE}`): commit {results.commits()}."


def differences(committed: Path, made: Path) -> list[str]:
    """A line for each file that is not alike in both folders: text and values byte for byte, pictures pixel for
    pixel."""
    lines = []
    for file in sorted({path.name for folder in (committed, made) for path in folder.iterdir()} - {TEMPLATE}):
        old, new = committed / file, made / file
        if not old.exists() or not new.exists():
            lines.append(f"{old}: {'is no longer written' if old.exists() else 'is missing'}")
        elif file.endswith(".png"):
            if imread(old).tobytes() != imread(new).tobytes():
                lines.append(f"{old}: the picture differs")
        elif old.read_bytes() != new.read_bytes():
            lines.append(f"{old}: differs from what its command writes: {first_difference(old, new)}")
    return lines


def first_difference(old: Path, new: Path) -> str:
    """The first pair of lines in which two text files differ."""
    pairs = itertools.zip_longest(*(path.read_text().split("\n") for path in (old, new)))
    number, (was, now) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    return f"line {number} was {was!r:.200}, now {now!r:.200}"
