"""Faults from a recorded availability trace: how many machines of a spot market there were, and when.

A trace is JSON: `nodes[k]` machines from second `t_s[k]` on. Fewer machines are crashes of peers drawn from a seed,
more are joins of those that have been away for longest.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxdt.protocol.events import TEMPORARY_IDS
from jaxdt.sim.faults import CRASH, JOIN, Fault
from jaxdt.spec.errors import BadInput

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
    path: str | Path,
    stages: Sequence[Sequence[int]],
    seed: int,
    until_s: float,
    speed: float = 1.0,
    begin_s: float | None = None,
    spare: bool = False,
) -> list[Fault]:
    """Crashes and joins before until_s. The trace's largest count stands for all peers of `stages` (others are scaled
    and rounded); the run begins at the first moment with that count, and the trace's time goes `speed` times as fast.
    With `begin_s` the run begins at that second of the trace, and the largest count is that of the time it lasts.
    A machine that comes back is a newcomer, which a later crash names by its passing name. No stage is spared, unless
    `spare`: then nobody leaves who is alone at its stage, if newcomers go to the smallest."""
    counts = load(path)
    if begin_s is not None:
        counts = _part(counts, begin_s, begin_s + until_s * speed)
    most = max(n for _, n in counts)
    begin_s = next(t_s for t_s, n in counts if n == most) if begin_s is None else begin_s
    rng = random.Random(f"trace {seed}")
    stage_of = {peer: stage for stage, peers in enumerate(stages) for peer in peers}
    here, gone = sorted(stage_of), []
    machine_of = {peer: peer for peer in here}
    n_peers, n_came, faults = len(here), 0, []
    for t_s, n in counts:
        at_s = (t_s - begin_s) / speed
        if not 0.0 <= at_s < until_s:
            continue
        wanted = round(n_peers * n / most)
        while len(here) > wanted:
            sizes = Counter(stage_of[peer] for peer in here)
            may = [peer for peer in here if sizes[stage_of[peer]] > 1] if spare else here
            if not may:
                break
            peer = may[rng.randrange(len(may))]
            here.remove(peer)
            gone.append(machine_of[peer])
            faults.append(Fault(at_s, CRASH, peer))
        while len(here) < wanted:
            machine, newcomer = gone.pop(0), TEMPORARY_IDS + n_came
            faults.append(Fault(at_s, JOIN, n_came, others=(machine,)))
            sizes = Counter(stage_of[peer] for peer in here)
            stage_of[newcomer] = min(range(len(stages)), key=lambda stage: (sizes[stage], stage))
            here.append(newcomer)
            machine_of[newcomer] = machine
            n_came += 1
    return faults


def _part(counts: Counts, begin_s: float, end_s: float) -> Counts:
    """The counts of a part of the time, from its first second on."""
    before = [n for t_s, n in counts if t_s <= begin_s]
    if not before or counts[-1][0] < begin_s:
        raise BadInput(f"begin_s: got {begin_s:g}, expected {counts[0][0]:g} to {counts[-1][0]:g}, the trace's seconds")
    part = [(begin_s, before[-1]), *((t_s, n) for t_s, n in counts if begin_s < t_s < end_s)]
    if not any(n for _, n in part):
        raise BadInput(f"begin_s: got {begin_s:g}, expected a part of the trace that has machines")
    return part
