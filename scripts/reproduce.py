"""A paper's figure and ours, side by side, with what was assumed and where ours differs.

    python scripts/reproduce.py TARGET [--out=configs/reproduce]
    TARGET: dtfm, square_cube, swarm_table1, swarm_table2, swarm_scaling, swarm_rebalancing, swarm_cost

Writes OUT/TARGET/README.md and its pictures; needs no jax. Minutes for dtfm, up to a minute for the others. Exit codes:
0 done, 2 bad input. The last two take other traces of node counts (--trace), swarm_cost other prices.
"""

import importlib
import sys
from pathlib import Path

from absl import app, flags

from jaxdt.spec.errors import BadInput, nearest

TARGETS = (
    "dtfm",
    "square_cube",
    "swarm_table1",
    "swarm_table2",
    "swarm_scaling",
    "swarm_rebalancing",
    "swarm_cost",
)
OUT = flags.DEFINE_string("out", "configs/reproduce", "Folder with one folder per target.")
TRACE = flags.DEFINE_multi_string(
    "trace", [], "Node counts (t_s, nodes, duration_s as JSON), for the targets that use some."
)
RELIABLE_USD = flags.DEFINE_float("reliable_usd", 7.834, "swarm_cost: price of an hour of the 8 reliable GPUs.", 0.0)
SPOT_USD = flags.DEFINE_float("spot_usd", 5.383, "swarm_cost: price of an hour of the 8 preemptible GPUs.", 0.0)


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        raise BadInput(f"TARGET: got {len(arguments) - 1} arguments, expected one of {', '.join(TARGETS)}")
    name = arguments[1]
    if name not in TARGETS:
        raise BadInput(f"TARGET: got {name!r}{nearest(name, TARGETS)}, expected one of {', '.join(TARGETS)}")
    out = Path(OUT.value) / name
    out.mkdir(parents=True, exist_ok=True)
    text = importlib.import_module(f"experiments.reproduce.{name}").run(
        out, f"python scripts/reproduce.py {name}", **own_flags(name)
    )
    (out / "README.md").write_text(text)
    print(text)
    return 0


def own_flags(name: str) -> dict:
    """The arguments of the targets that have flags of their own."""
    if name == "swarm_cost":
        return {"traces": TRACE.value, "reliable_usd": RELIABLE_USD.value, "spot_usd": SPOT_USD.value}
    return {"traces": TRACE.value} if name == "swarm_rebalancing" else {}


def guarded(arguments: list[str]) -> None:
    try:
        sys.exit(main(arguments))
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(guarded)
