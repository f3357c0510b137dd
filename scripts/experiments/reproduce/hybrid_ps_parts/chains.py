"""A static 1F1B pipeline that loses its whole chain: a bare model, since no wiring of this project loses so much.

Each chain has one machine of each stage and a share of the batch. A machine does a backward before a forward, the
oldest first, and has at most `depth` forwards that wait for their backward (one on the last stage, whose backward
contains its forward). Links carry one tensor at a time, beside computation. When a machine is lost, its chain computes
nothing more in this batch, and all gradients that the chain has accumulated are gone: its whole share is divided among
the chains that are left, by their power, from that moment on.
"""

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.reproduce.hybrid_ps_parts.fleets import Fleet
from experiments.reproduce.machines import BACKWARD_SHARE, shares


@dataclass(frozen=True)
class Chain:
    """Seconds of a microbatch: forward and backward by stage, and by hop of a tensor (occupied, latency) forward and
    back."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    ahead_s: tuple[tuple[float, float], ...] = ()
    back_s: tuple[tuple[float, float], ...] = ()
    depth: int = 2

    @property
    def n_stages(self) -> int:
        return len(self.forward_s)


class _Run:
    """One chain's batch: microbatch m may begin at released_s[m]."""

    def __init__(self, chain: Chain, released_s: Sequence[float]):
        n = chain.n_stages
        self._chain = chain
        self._events: list[tuple[float, int, str, int, int]] = []
        self._order = itertools.count()
        self._ready: list[dict[str, list[int]]] = [{"F": [], "B": []} for _ in range(n)]
        self._waiting = [0] * n  # forwards before their backward
        self._busy = [False] * n
        self._free_s = {"F": [0.0] * n, "B": [0.0] * n}  # of the link that leaves a stage, forward and back
        self.end_s = 0.0
        for m, at_s in enumerate(released_s):
            self._at(at_s, "arrives F", 0, m)

    def _at(self, when_s: float, what: str, stage: int, m: int) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), what, stage, m))

    def play(self) -> float:
        """When the last backward of the first stage ends; 0 without microbatches."""
        while self._events:
            now_s, _, what, stage, m = heapq.heappop(self._events)
            verb, kind = what.split()
            if verb == "arrives":
                heapq.heappush(self._ready[stage][self._kind(stage, kind)], m)
            else:
                self._busy[stage] = False
                self._finished(now_s, kind, stage, m)
            self._begin(now_s, stage)
        return self.end_s

    def _kind(self, stage: int, kind: str) -> str:
        return "B" if stage == self._chain.n_stages - 1 else kind

    def _begin(self, now_s: float, stage: int) -> None:
        ready = self._ready[stage]
        if self._busy[stage]:
            return
        if ready["B"]:
            kind = "B"
        elif ready["F"] and self._waiting[stage] < self._chain.depth:
            kind = "F"
            self._waiting[stage] += 1
        else:
            return
        self._busy[stage] = True
        seconds = (self._chain.forward_s if kind == "F" else self._chain.backward_s)[stage]
        self._at(now_s + seconds, f"ends {kind}", stage, heapq.heappop(ready[kind]))

    def _finished(self, now_s: float, kind: str, stage: int, m: int) -> None:
        if kind == "F":
            self._send(now_s, "F", stage, stage + 1, self._chain.ahead_s[stage], m)
            return
        self._waiting[stage] -= stage < self._chain.n_stages - 1
        if stage:
            self._send(now_s, "B", stage, stage - 1, self._chain.back_s[stage - 1], m)
        else:
            self.end_s = now_s

    def _send(self, now_s: float, kind: str, src: int, dst: int, hop: tuple[float, float], m: int) -> None:
        occupied_s, latency_s = hop
        sent_s = max(now_s, self._free_s[kind][src]) + occupied_s
        self._free_s[kind][src] = sent_s
        self._at(sent_s + latency_s, f"arrives {kind}", dst, m)


def chain_s(chain: Chain, released_s: Sequence[float]) -> float:
    """When a chain has done all microbatches, of which m may begin at released_s[m]."""
    return _Run(chain, released_s).play()


def chains_s(
    chains: Sequence[Chain], parts: Sequence[int], powers: Sequence[float], lost: Mapping[int, float]
) -> float:
    """Seconds of a batch. parts: microbatches of each chain; lost: chain -> the moment of its loss. inf if none is
    left."""
    released: dict[int, list[float]] = {c: [0.0] * n for c, n in enumerate(parts)}
    ends_s = {c: chain_s(chains[c], released[c]) for c in released}
    for c, at_s in sorted(lost.items(), key=lambda item: (item[1], item[0])):
        if at_s >= max(ends_s.values()):
            break
        again = len(released.pop(c))
        del ends_s[c]
        if not released:
            return float("inf")
        left = sorted(released)
        for other, n in zip(left, shares(again, [powers[other] for other in left]), strict=True):
            released[other] += [at_s] * n
            ends_s[other] = chain_s(chains[other], released[other])
    return max(ends_s.values())


@dataclass(frozen=True)
class Static:
    """Pipelines of a fleet. by_power: their shares, and those of what is done again, follow their power; equal ones
    otherwise. together: machines that may fail share pipelines; each is in one of its own otherwise."""

    by_power: bool = True
    together: bool = False
    depth: int = 2

    def batch_s(self, fleet: Fleet, lost: Mapping[int, float]) -> float:
        """Seconds of a batch, in which machines are lost at shares of the batch without losses."""
        rows = self.rows(fleet)
        chains = [_chain(fleet, row, self.depth) for row in rows]
        powers = [1 / max(map(fleet.stage_s, row)) if self.by_power else 1.0 for row in rows]
        parts = shares(fleet.n_microbatches, powers)
        clean_s = chains_s(chains, parts, powers, {})
        moments: dict[int, float] = {}
        for c, row in enumerate(rows):
            if at := [lost[device] for device in row if device in lost]:
                moments[c] = clean_s * min(at)
        return chains_s(chains, parts, powers, moments)

    def rows(self, fleet: Fleet) -> list[tuple[int, ...]]:
        """The machines of each chain, stage by stage. Those of a stage in order, the fastest first; `together` shifts
        the slow ones of each stage by one against those of the stage before."""
        columns = [fleet.stage(stage) for stage in range(fleet.n_stages)]
        if self.together:
            columns = [_shifted(fleet, column, stage) for stage, column in enumerate(columns)]
        return list(zip(*columns, strict=True))


def _shifted(fleet: Fleet, column: list[int], by: int) -> list[int]:
    slow = [d for d in column if fleet.devices[d].slowdown > 1]
    fast = column[: len(column) - len(slow)]
    return fast + slow[by:] + slow[:by]


def _chain(fleet: Fleet, row: Sequence[int], depth: int) -> Chain:
    *others, last = [fleet.stage_s(device) for device in row]
    hops = list(itertools.pairwise(row))
    return Chain(
        forward_s=(*((1 - BACKWARD_SHARE) * s for s in others), 0.0),
        backward_s=(*(BACKWARD_SHARE * s for s in others), last),
        ahead_s=tuple(_hop(fleet, a, b) for a, b in hops),
        back_s=tuple(_hop(fleet, b, a) for a, b in hops),
        depth=depth,
    )


def _hop(fleet: Fleet, src: int, dst: int) -> tuple[float, float]:
    link = fleet.link(src, dst)
    return link.occupied_s(fleet.boundary_bytes), link.latency_s
