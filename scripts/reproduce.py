"""Reproduce a figure or table of a paper: its values and ours side by side, the assumptions, and the differences.

    python scripts/reproduce.py TARGET [--out=configs/reproduce] [--from_results | --add]
    python scripts/reproduce.py TARGET|all --check
    TARGET: dtfm, dtfm_gain, sdpipe, sdpipe_loss, diloco, square_cube, swarm_table1, swarm_table2, swarm_tables34,
            swarm_scaling, swarm_rebalancing, swarm_cost, churn, hybrid_ps_table1, hybrid_ps,
            hybrid_ps_figures, hybrid_ps_planner, outside, bubble
    all:    every target that has a page

Writes OUT/TARGET/README.md from its template configs/reproduce/TARGET/page.md, its pictures and results.jsonl: the
commit, and the simulated values that the page is written from. With --from_results they are read from there, and
nothing is simulated; with --add, only what is not there is simulated, and named with its own commit. With --check
nothing in OUT changes: the target is made again, all of it, and compared with what stands there, text and values byte
for byte, pictures pixel for pixel. Uses all cores.
sdpipe_loss and diloco train with jax, for minutes and for hours; the others need no jax. dtfm, dtfm_gain, sdpipe,
swarm_table2, swarm_tables34, swarm_scaling, hybrid_ps and hybrid_ps_figures take minutes, the others up to a minute.
swarm_rebalancing and swarm_cost accept other traces of node counts (--trace), and swarm_cost accepts other prices. Exit
codes: 0 done, 1 a page is not what its command writes, 2 bad input.
"""

import check_installed  # noqa: F401

# isort: split
import tempfile
from pathlib import Path

from absl import flags
from experiments.page import commit, differences
from experiments.reproduce.results import Results, read
from experiments.reproduce.targets import TARGETS, write

from jaxdt.cli import script_main
from jaxdt.run.errors import BadInput

ALL = "all"
OUT = flags.DEFINE_string("out", "configs/reproduce", "Folder with one folder per target.")
CHECK = flags.DEFINE_bool("check", False, "Compare with what stands in OUT and change nothing.")
FROM_RESULTS = flags.DEFINE_bool("from_results", False, "Write the page from the values in OUT, without a simulation.")
ADD = flags.DEFINE_bool("add", False, "Keep the values in OUT, and simulate only those that the page lacks.")
TRACE = flags.DEFINE_multi_string(
    "trace", [], "Node counts (t_s, nodes, duration_s as JSON), for the targets that use some."
)
RELIABLE_USD = flags.DEFINE_float("reliable_usd", 7.834, "swarm_cost: price of an hour of the 8 reliable GPUs.", 0.0)
T4_USD = flags.DEFINE_float("t4_usd", 3.536, "swarm_cost: price of an hour of the 32 preemptible T4.", 0.0)
SPOT_USD = flags.DEFINE_float("spot_usd", 5.383, "swarm_cost: price of an hour of the 8 preemptible GPUs.", 0.0)


def main(name: str) -> int:
    out = Path(OUT.value)
    if CHECK.value:
        names = [target for target in TARGETS if (out / target).is_dir()] if name == ALL else [name]
        lines = [line for target in names for line in check(target, out / target)]
        print("\n".join(lines) or "what is committed is what the command writes")
        return 1 if lines else 0
    if name == ALL:
        raise BadInput("command: got all, expected one target, or all --check")
    if FROM_RESULTS.value and ADD.value:
        raise BadInput("--add: got it with --from_results, expected one of the two")
    if FROM_RESULTS.value or ADD.value:
        results = read(out / name, adds=commit() if ADD.value else "")
    else:
        results = Results(commit=commit())
    print(write(name, out / name, results, arguments_of(name)))
    return 0


def check(name: str, committed: Path) -> list[str]:
    """Make a target again. Returns a line for each difference from the committed one."""
    if not committed.is_dir():
        raise BadInput(f"{committed}: there is no such folder, expected the one that {name} was written to")
    with tempfile.TemporaryDirectory() as folder:
        known = read(committed)
        write(name, Path(folder), Results(commit=known.commit, added=known.added), arguments_of(name))
        return differences(committed, Path(folder))


def arguments_of(name: str) -> dict:
    """The flags of a target as arguments of its function `run`."""
    if name == "swarm_cost":
        return {"traces": TRACE.value, "prices": (RELIABLE_USD.value, SPOT_USD.value, T4_USD.value)}
    return {"traces": TRACE.value} if name == "swarm_rebalancing" else {}


if __name__ == "__main__":
    script_main.run(main, (*TARGETS, ALL))
