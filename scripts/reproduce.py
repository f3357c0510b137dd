"""Reproduce a figure or table of a paper: its values and ours side by side, the assumptions, and the differences.

    python scripts/reproduce.py TARGET [--out=configs/reproduce]
    TARGET: dtfm, dtfm_gain, square_cube, swarm_table1, swarm_table2, swarm_scaling, swarm_rebalancing, swarm_cost

Writes OUT/TARGET/README.md and its pictures; needs no jax. dtfm and dtfm_gain take minutes, the others up to a minute.
swarm_rebalancing and swarm_cost accept other traces of node counts (--trace), and swarm_cost accepts other prices. Exit
codes: 0 done, 2 bad input.
"""

import importlib
from pathlib import Path

from absl import flags

from jaxdt.cli import script_main

TARGETS = (
    "dtfm",
    "dtfm_gain",
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


def main(name: str) -> int:
    out = Path(OUT.value) / name
    out.mkdir(parents=True, exist_ok=True)
    target = importlib.import_module(f"experiments.reproduce.{name}")
    text = target.run(out, f"python scripts/reproduce.py {name}", **arguments_of(name))
    (out / "README.md").write_text(text)
    print(text)
    return 0


def arguments_of(name: str) -> dict:
    """The flags of a target as arguments of its function `run`."""
    if name == "swarm_cost":
        return {"traces": TRACE.value, "reliable_usd": RELIABLE_USD.value, "spot_usd": SPOT_USD.value}
    return {"traces": TRACE.value} if name == "swarm_rebalancing" else {}


if __name__ == "__main__":
    script_main.run(main, TARGETS)
