"""A paper's figure and ours, side by side, with what was assumed and where ours differs.

    python scripts/reproduce.py dtfm|square_cube|swarm_table1|swarm_table2|swarm_scaling [--out=configs/reproduce]

Writes OUT/TARGET/README.md and its pictures; needs no jax. Minutes for dtfm, up to a minute for the others. Exit codes:
0 done, 2 bad input.
"""

import importlib
import sys
from pathlib import Path

from absl import app, flags

from jaxdt.core.errors import BadInput, nearest

TARGETS = ("dtfm", "square_cube", "swarm_table1", "swarm_table2", "swarm_scaling")
OUT = flags.DEFINE_string("out", "configs/reproduce", "Folder with one folder per target.")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        raise BadInput(f"TARGET: got {len(arguments) - 1} arguments, expected one of {', '.join(TARGETS)}")
    name = arguments[1]
    if name not in TARGETS:
        raise BadInput(f"TARGET: got {name!r}{nearest(name, TARGETS)}, expected one of {', '.join(TARGETS)}")
    out = Path(OUT.value) / name
    out.mkdir(parents=True, exist_ok=True)
    text = importlib.import_module(f"targets.{name}").run(out, f"python scripts/reproduce.py {name}")
    (out / "README.md").write_text(text)
    print(text)
    return 0


def guarded(arguments: list[str]) -> None:
    try:
        sys.exit(main(arguments))
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(guarded)
