"""Faults from a recorded availability trace: how many machines of a spot market there were over time.

A trace is JSON: `nodes[k]` machines from second `t_s[k]` on. Where the number falls, peers drawn from a seed crash;
where it grows, newcomers join on the machines that have been away for longest.
"""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from jaxdt.protocol import events as ev
from jaxdt.run import serialize
from jaxdt.run.errors import BadInput, read_text
from jaxdt.sim.faults import CRASH, JOIN, Fault

Counts = list[tuple[float, int]]


def load(path: str | Path) -> Counts:
    """(second, number of machines from then on), in order; raises BadInput for anything else."""
    try:
        data = serialize.parse_json(read_text(path), keys_once=True)
    except ValueError as error:
        raise BadInput(f"{path}: not JSON ({error})") from None
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
    """Crashes and joins before until_s. The largest number of machines in the trace stands for all peers of `stages`;
    other numbers are scaled and rounded. The run begins at the first moment with the largest number, and the time of
    the trace goes `speed` times as fast. With `begin_s` the run begins at that second of the trace, and the largest
    number is that of the part of the trace that the run covers.

    A machine that comes back is a newcomer, which a later crash names by its temporary number. Stages may lose all
    their peers, unless `spare`: then the last peer of a stage does not leave, if newcomers go to the smallest stage."""
    counts = load(path)
    if begin_s is not None:
        counts = _part(counts, begin_s, begin_s + until_s * speed)
    most = max(n for _, n in counts)
    if begin_s is None:
        begin_s = next(t_s for t_s, n in counts if n == most)
    fleet = _Fleet(random.Random(f"trace {seed}"), stages, spare)
    n_peers = sum(map(len, stages))
    for t_s, n in counts:
        at_s = (t_s - begin_s) / speed
        if 0.0 <= at_s < until_s:
            fleet.resize(at_s, round(n_peers * n / most))
    return fleet.faults


class _Fleet:
    """The peers that run at one moment of a trace, and the faults that led there."""

    def __init__(self, rng: random.Random, stages: Sequence[Sequence[int]], spare: bool):
        self.faults: list[Fault] = []
        self._rng = rng
        self._n_stages = len(stages)
        self._spare = spare
        self._stage_of = {peer: stage for stage, peers in enumerate(stages) for peer in peers}
        self._running = sorted(self._stage_of)
        self._machine_of = {peer: peer for peer in self._running}
        self._free_machines: list[int] = []
        self._n_joined = 0

    def resize(self, at_s: float, n_wanted: int) -> None:
        """Crash peers, or let newcomers join, until n_wanted peers run."""
        while len(self._running) > n_wanted:
            sizes = self._stage_sizes()
            candidates = [peer for peer in self._running if not self._spare or sizes[self._stage_of[peer]] > 1]
            if not candidates:
                break
            self._crash(at_s, candidates[self._rng.randrange(len(candidates))])
        while len(self._running) < n_wanted:
            self._join(at_s)

    def _stage_sizes(self) -> Counter[int]:
        return Counter(self._stage_of[peer] for peer in self._running)

    def _crash(self, at_s: float, peer: int) -> None:
        self._running.remove(peer)
        self._free_machines.append(self._machine_of[peer])
        self.faults.append(Fault(at_s, CRASH, peer))

    def _join(self, at_s: float) -> None:
        machine = self._free_machines.pop(0)
        newcomer = ev.TEMPORARY_IDS + self._n_joined
        self.faults.append(Fault(at_s, JOIN, self._n_joined, others=(machine,)))
        sizes = self._stage_sizes()
        self._stage_of[newcomer] = min(range(self._n_stages), key=lambda stage: (sizes[stage], stage))
        self._machine_of[newcomer] = machine
        self._running.append(newcomer)
        self._n_joined += 1


def _part(counts: Counts, begin_s: float, end_s: float) -> Counts:
    """The counts from begin_s to end_s; the first one is that of begin_s."""
    before = [n for t_s, n in counts if t_s <= begin_s]
    if not before or counts[-1][0] < begin_s:
        raise BadInput(f"begin_s: got {begin_s:g}, expected {counts[0][0]:g} to {counts[-1][0]:g}, the trace's seconds")
    part = [(begin_s, before[-1]), *((t_s, n) for t_s, n in counts if begin_s < t_s < end_s)]
    if not any(n for _, n in part):
        raise BadInput(f"begin_s: got {begin_s:g}, expected a part of the trace that has machines")
    return part
