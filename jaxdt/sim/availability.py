"""Faults from a recorded availability trace: how many machines of a spot market there were, and when.

A trace is JSON: `nodes[k]` machines from second `t_s[k]` on. Fewer machines are crashes of peers drawn from a seed,
more are joins of those that have been away for longest.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from jaxdt.core.errors import BadInput
from jaxdt.core.events import PASSING
from jaxdt.sim.faults import CRASH, JOIN, Fault

Counts = list[tuple[float, int]]


def load(path: str | Path) -> Counts:
    """(second, machines from then on), in order; BadInput for anything else."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
    times, nodes = (data.get(name) for name in ("t_s", "nodes")) if isinstance(data, dict) else (None, None)
    if not (isinstance(times, list) and isinstance(nodes, list) and len(times) == len(nodes) > 0):
        raise BadInput(f"{path}: expected t_s and nodes, two lists of one length")
    if not all(type(t) in (int, float) for t in times) or any(a >= b for a, b in zip(times, times[1:], strict=False)):
        raise BadInput(f"{path}: t_s: expected numbers that grow")
    if not all(type(n) is int and n >= 0 for n in nodes) or not any(nodes):
        raise BadInput(f"{path}: nodes: expected integers >= 0, not all of them 0")
    return list(zip(times, nodes, strict=True))


def from_trace(
    path: str | Path, stages: Sequence[Sequence[int]], seed: int, until_s: float, speed: float = 1.0
) -> list[Fault]:
    """Crashes and joins before until_s. The trace's largest count stands for all peers of `stages` (others are scaled
    and rounded); the run begins at the first moment with that count, and the trace's time goes `speed` times as fast.
    No stage is spared. A machine that comes back is a newcomer, which a later crash names by its passing name."""
    counts = load(path)
    most = max(n for _, n in counts)
    begin_s = next(t_s for t_s, n in counts if n == most)
    rng = random.Random(f"trace {seed}")
    here, gone = sorted(peer for peers in stages for peer in peers), []
    machine_of = {peer: peer for peer in here}
    n_peers, n_came, faults = len(here), 0, []
    for t_s, n in counts:
        at_s = (t_s - begin_s) / speed
        if not 0.0 <= at_s < until_s:
            continue
        wanted = round(n_peers * n / most)
        while len(here) > wanted:
            peer = here.pop(rng.randrange(len(here)))
            gone.append(machine_of[peer])
            faults.append(Fault(at_s, CRASH, peer))
        while len(here) < wanted:
            machine = gone.pop(0)
            faults.append(Fault(at_s, JOIN, n_came, others=(machine,)))
            here.append(PASSING + n_came)
            machine_of[PASSING + n_came] = machine
            n_came += 1
    return faults
