"""The targets of scripts/reproduce.py: how one is written, and compared with what is committed."""

import importlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.reproduce.results import FILE, Results
from matplotlib.image import imread

TARGETS = (
    "dtfm",
    "dtfm_gain",
    "sdpipe",
    "sdpipe_loss",
    "diloco",
    "square_cube",
    "swarm_table1",
    "swarm_table2",
    "swarm_tables34",
    "swarm_scaling",
    "swarm_rebalancing",
    "swarm_cost",
    "churn",
    "hybrid_ps_table1",
    "hybrid_ps",
    "hybrid_ps_figures",
    "hybrid_ps_planner",
    "outside",
)
ORIGIN = "{origin}"  # stands for that sentence until all values are there, of which some may be added
MODULES = {  # those in a folder below
    "outside": "tables.outside",
    "swarm_tables34": "tables.swarm_tables34",
    "hybrid_ps_table1": "tables.hybrid_ps_table1",
    "hybrid_ps": "hybrid_ps_parts.target",
    "hybrid_ps_figures": "hybrid_ps_parts.figures",
    "hybrid_ps_planner": "hybrid_ps_parts.planner",
    "sdpipe_loss": "sdpipe_parts.losses",
}


def write(name: str, out: Path, results: Results, arguments: Mapping[str, Any]) -> str:
    """Write the page of a target, its pictures and its values to a folder. Returns the page."""
    out.mkdir(parents=True, exist_ok=True)
    target = importlib.import_module(f"experiments.reproduce.{MODULES.get(name, name)}")
    text = target.run(out, ORIGIN, results, **arguments).replace(ORIGIN, origin(name, results))
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
    for file in sorted({path.name for folder in (committed, made) for path in folder.iterdir()}):
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
