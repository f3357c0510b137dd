"""The targets of scripts/reproduce.py: how one is written.

A target is a module here and a page's template, configs/reproduce/TARGET/page.md. Its function `run(results)` gets the
values of its simulations from `results`, and returns what the template shows by name. `pictures` are its figures by
their files, with DPI dots an inch, or as many as the module says.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.page import ROOT, TEMPLATE, filled
from experiments.reproduce.results import FILE, Results

DPI = 80
PAGES = ROOT / "configs/reproduce"
# A target has a template, and a module of its name.
NAMES = {path.stem for path in Path(__file__).parent.glob("*.py")}
TARGETS = tuple(sorted(path.parent.name for path in PAGES.glob(f"*/{TEMPLATE}") if path.parent.name in NAMES))
ORIGIN = "{origin}"  # stands for that sentence until all values are there, of which some may be added


def write(name: str, out: Path, results: Results, arguments: Mapping[str, Any]) -> str:
    """Write the page of a target, its pictures and its values to a folder. Returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    target = importlib.import_module(f"experiments.reproduce.{name}")
    values = {"results": results, "origin": ORIGIN} | target.run(results, **arguments)
    for file, figure in values.get("pictures", {}).items():
        figure.savefig(out / file, dpi=getattr(target, "DPI", DPI))
    text = filled((PAGES / name / TEMPLATE).read_text(), target, values).replace(ORIGIN, origin(name, results))
    (out / FILE).write_text(results.lines())
    (out / "README.md").write_text(text)
    return text


def origin(name: str, results: Results) -> str:
    """The sentence under a page's title: its command, and the commit at which its values were simulated."""
    made = f"`python scripts/reproduce.py {name}` writes this page and its pictures"
    return f"{made}. Values (`{FILE}`): commit {results.commits()}."
