"""Simulates small runs under faults and checks the invariants of the step protocol at every event. Needs no jax.

    python scripts/experiments/fuzz_protocol.py --seeds=0:10000
    python scripts/experiments/fuzz_protocol.py --seeds=K:K+1 --verbose [--wiring=fixed]
    python scripts/experiments/fuzz_protocol.py --seeds=0:5000 --wiring=independent
    python scripts/experiments/fuzz_protocol.py --seeds=0:5000 --wiring=pool

Each seed draws a run, its links and its faults (jaxdt/testing/cases.py). Without --wiring every fourth seed draws a
pool, whose workers come and go; "independent" draws pipelines whose replicas may differ. A seed that fails prints one
line with the time, the invariant, the peer that breaks it, and the flags that repeat the run. --verbose prints the
case, its faults and every event. Exit codes: 0 nothing found, 1 something found, 2 bad input.
"""

import time

from absl import flags

from jaxdt.cli import script_main
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import HeartbeatReport
from jaxdt.run.errors import BadInput
from jaxdt.sim.faults import Fault
from jaxdt.testing.case import finding
from jaxdt.testing.cases import INDEPENDENT, POOL, WIRINGS_DRAWN, draw_case

SEEDS = flags.DEFINE_string("seeds", "0:300", "LOW:HIGH, without HIGH itself; LOW:LOW+N are N seeds.")
WIRING = flags.DEFINE_enum(
    "wiring",
    "",
    ["", *sorted(set(WIRINGS_DRAWN)), POOL, INDEPENDENT],
    "The wiring of all cases, or independent for replicas that may differ; by default some of each kind whose replicas "
    "stay equal.",
)
VERBOSE = flags.DEFINE_bool("verbose", False, "Print each case, its faults and every event.")


def main() -> int:
    seeds = parse_seeds(SEEDS.value)
    repeat_flags = f"--wiring={WIRING.value} --verbose" if WIRING.value else "--verbose"
    began_s = time.monotonic()
    n_found = 0
    for seed in seeds:
        found = play_seed(seed)
        if found:
            n_found += 1
            print(f"seed {seed}: {found}   (--seeds={seed}:{seed + 1} {repeat_flags})", flush=True)
    rate = len(seeds) / (time.monotonic() - began_s)
    print(f"{len(seeds)} seeds, {n_found} with a finding, {rate:.1f} seeds/s")
    return 1 if n_found else 0


def play_seed(seed: int) -> str:
    """The finding in the case of a seed; '' if there is none."""
    is_pool = not WIRING.value and seed % 4 == 0
    case = draw_case(seed, POOL if is_pool else WIRING.value)
    if VERBOSE.value:
        print("\n".join(map(str, (case, *case.faults))))
    return finding(case, observer=show if VERBOSE.value else None)


def parse_seeds(text: str) -> range:
    low, _, high = text.partition(":")
    first, _, more = high.partition("+")
    if not (low.isdecimal() and first.isdecimal() and (more.isdecimal() or not more)):
        raise BadInput(f"--seeds: got {text!r}, expected LOW:HIGH")
    seeds = range(int(low), int(first) + int(more or 0))
    if not seeds:
        raise BadInput(f"--seeds: got {text!r}, expected LOW < HIGH")
    return seeds


def show(now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
    """Print an event and the actions that the machine of `peer` returned for it."""
    shown = str(event)
    if isinstance(event, ev.Received):
        shown = f"v{event.header.view} {name_of(event.header.src)}: {event.body}"
    returned = ", ".join(filter(None, map(in_short, actions)))
    print(f"{now_s:9.3f} {name_of(peer):2} {shown}{f'  ->  {returned}' if returned else ''}")


def name_of(peer: int) -> str:
    return "C" if peer == ev.COORDINATOR else f"p{peer}"


def in_short(action: ev.Action) -> str:
    match action:
        case ev.Send(dst, body):
            return f"{type(body).__name__} to {name_of(dst)}"
        case ev.Post(letters):
            return ", ".join(in_short(ev.Send(*letter)) for letter in letters)
        case ev.Run(work):
            return f"run {work}"
        case HeartbeatReport():
            return ""
    return str(action)


if __name__ == "__main__":
    script_main.run(main)
