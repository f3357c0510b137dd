"""Plays small runs under faults and checks the invariants of the step protocol at every event. Needs no jax.

    python scripts/experiments/fuzz_protocol.py --seeds=0:10000
    python scripts/experiments/fuzz_protocol.py --seeds=K:K+1 --verbose [--wiring=fixed]

Each seed draws a run, its links and its faults (jaxdt/sim/fuzz/cases.py). A seed that fails prints one line with what
was broken, when and by whom, and the command that plays it again; --verbose prints the case, its faults and every
event. Exit codes: 0 nothing found, 1 something found, 2 bad input.
"""

import time

from absl import flags

from jaxdt.cli import script_main
from jaxdt.protocol.events import COORDINATOR, Action, Event, Post, Received, Report, Run, Send
from jaxdt.sim.faults import Fault
from jaxdt.sim.fuzz.cases import draw_case, finding
from jaxdt.spec.config import WIRINGS
from jaxdt.spec.errors import BadInput

SEEDS = flags.DEFINE_string("seeds", "0:300", "LOW:HIGH, the last one left out; HIGH may be written LOW+N.")
WIRING = flags.DEFINE_enum("wiring", "", ["", *WIRINGS], "Connection all cases so; else some of each kind.")
VERBOSE = flags.DEFINE_bool("verbose", False, "Print each case, its faults and every event.")


def main() -> int:
    seeds = parsed_seeds(SEEDS.value)
    again = f"--wiring={WIRING.value} --verbose" if WIRING.value else "--verbose"
    began_s, n_found = time.monotonic(), 0
    for seed in seeds:
        case = draw_case(seed, WIRING.value)
        if VERBOSE.value:
            print("\n".join(map(str, (case, *case.faults))))
        found = finding(case, observer=show if VERBOSE.value else None)
        if found:
            n_found += 1
            print(f"seed {seed}: {found}   (--seeds={seed}:{seed + 1} {again})", flush=True)
    rate = len(seeds) / (time.monotonic() - began_s)
    print(f"{len(seeds)} seeds, {n_found} with a finding, {rate:.1f} seeds/s")
    return 1 if n_found else 0


def parsed_seeds(text: str) -> range:
    low, _, high = text.partition(":")
    first, _, more = high.partition("+")
    if not (low.isdecimal() and first.isdecimal() and (more.isdecimal() or not more)):
        raise BadInput(f"--seeds: got {text!r}, expected LOW:HIGH")
    seeds = range(int(low), int(first) + int(more or 0))
    if not seeds:
        raise BadInput(f"--seeds: got {text!r}, expected LOW < HIGH")
    return seeds


def show(now_s: float, who: int, what: Event | Fault, actions: list[Action]) -> None:
    """An event and what it made its machine do."""
    name = "C " if who == COORDINATOR else f"p{who}"
    done = ", ".join(filter(None, map(in_short, actions)))
    if isinstance(what, Received):
        sender = "C" if what.header.src == COORDINATOR else f"p{what.header.src}"
        what = f"v{what.header.view} {sender}: {what.body}"
    print(f"{now_s:9.3f} {name} {what}{f'  ->  {done}' if done else ''}")


def in_short(action: Action) -> str:
    match action:
        case Send(dst, body):
            return f"{type(body).__name__} to {'C' if dst == COORDINATOR else f'p{dst}'}"
        case Post(letters):
            return ", ".join(in_short(Send(*letter)) for letter in letters)
        case Run(work):
            return f"run {work}"
        case Report("heartbeat"):
            return ""
    return str(action)


if __name__ == "__main__":
    script_main.run(main)
