"""The rules by which peers change stages (SWARM Sec. 3.2, Algorithm 2): a table of queue lengths in, moves out.

The stage with the greatest load (the sum of its peers' queues) gets a peer. The paper takes the peer from the stage
with the least load. But in a pipeline that is in balance with its slowest stage, all other stages have equal loads,
whatever their sizes (Little's law), so the least load is noise. Here the peer comes from the stage that stays fastest
without it. The rate of a stage that never waits is its number of peers over the share of time in which they compute.
The peer with the shortest queue moves, as in the paper.

Nothing moves if the giving stage would then be no faster than the receiving stage is now. So a move never makes the
slowest stage slower, and the next move does not undo it. One machine decides from one table, so two peers never both
move for the same reason.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxdt.membership.rebalance_api import ByNumber, Move, Stages
from jaxdt.protocol import events as ev

Table = Sequence[Mapping[int, ev.Load]]
THRESHOLD = 1.0  # Works by which the loads of two stages differ at least before a peer moves
MARGIN = 0.25  # of a peer, by which the stage that gives must stay faster: shares of time are measured, not known
FRESH_PERIODS = 1.0  # reports that are older are left out


@dataclass(frozen=True)
class StageLoad:
    """Peers of a stage, the sum of their queues, and the share of time in which they compute, summed too."""

    n_peers: int
    queue: float
    busy: float

    def rate(self, fewer: float = 0.0) -> float:
        """The factor by which the run could speed up until this stage limits it, if the stage had `fewer` peers
        less."""
        n = self.n_peers - fewer
        return n / self.busy if self.busy and n > 0 else float("inf") if n > 0 else 0.0

    def with_one_more(self) -> "StageLoad":
        n = self.n_peers
        return replace(self, n_peers=n + 1, queue=self.queue * n / (n + 1))

    def with_one_less(self) -> "StageLoad":
        return replace(self, n_peers=self.n_peers - 1)


def loads_of(table: Table, sizes: Sequence[int] | None = None) -> list[StageLoad]:
    """The load of each stage. `sizes`: its number of peers, if some have reported nothing. A peer on its way will take
    a share of the queue."""
    found: list[StageLoad] = []
    for stage, own in enumerate(table):
        n = len(own) if sizes is None else sizes[stage]
        # fsum: the last bit of a sum, which differs between Python 3.11 and 3.12, would decide between equal stages
        queue, busy = (math.fsum(getattr(load, name) for load in own.values()) for name in ("queue", "busy"))
        found.append(StageLoad(n, queue * len(own) / n if n else 0.0, busy))
    return found


def decide(
    table: Table,
    n_moves: int = 1,
    before: Collection[Move] = (),
    may_move: Collection[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Move]:
    """At most n_moves moves of different peers, of all or of those that `may_move`. A move that undoes one of
    `before`, those of the last period, is not made: the sign of a difference that flips at once was noise."""
    loads = loads_of(table, sizes)
    left = [{p: load for p, load in own.items() if may_move is None or p in may_move} for own in table]
    barred = {(move.dst, move.src) for move in before}
    n_own = [load.n_peers for load in loads]  # who is yet to come has no state: somebody else stays
    made: list[Move] = []
    while len(made) < n_moves and len(loads) > 1:
        dst = neediest(loads, measured=not made)
        src = max((s for s in range(len(loads)) if s != dst), key=lambda s: (loads[s].rate(1), loads[s].n_peers, -s))
        if n_own[src] < 2 or not left[src] or (src, dst) in barred or not gains(loads, src, dst, measured=not made):
            break
        peer = min(left[src], key=lambda p: (left[src][p].queue, p))
        del left[src][peer]
        n_own[src] -= 1
        made.append(Move(peer, src, dst))
        loads[src], loads[dst] = loads[src].with_one_less(), loads[dst].with_one_more()
    return made


def neediest(loads: Sequence[StageLoad], measured: bool = True) -> int:
    """The stage that a peer would help most: one without any, else that of the greatest load. After a move the
    queues are not measured yet (`measured` is false), and the slowest stage is the neediest."""
    stages = range(len(loads))
    if measured:
        return max(stages, key=lambda s: (not loads[s].n_peers, loads[s].queue, -s))
    return min(stages, key=lambda s: (loads[s].rate(), -loads[s].queue, s))


def slowest(loads: Sequence[StageLoad]) -> int:
    """The stage for a newcomer: one without any peers, else that which holds the others up. Queues do not say which one
    that is while stages keep pace with each other, nor do reports from before a loss. So of stages that are about
    equally slow, the one with the fewest peers."""
    least = min(load.rate() for load in loads)
    equal = [stage for stage, load in enumerate(loads) if load.rate(MARGIN) <= least]
    return min(equal, key=lambda s: (loads[s].n_peers, -loads[s].queue, s))


def gains(loads: Sequence[StageLoad], src: int, dst: int, measured: bool = True) -> bool:
    """Whether stage src can spare a peer that helps dst."""
    if loads[src].n_peers < 2 or loads[src].rate(1 + MARGIN) <= loads[dst].rate():
        return False
    return not loads[dst].n_peers or not measured or loads[dst].queue - loads[src].queue >= THRESHOLD


class Rebalancer(ByNumber):
    """The table, from the peers' reports, and a decision every period_s seconds."""

    def __init__(self, period_s: float, n_moves: int = 1):
        self._period_s, self._n_moves = period_s, n_moves
        self._reports: dict[int, tuple[float, ev.Load]] = {}
        self._now_s, self._due_s = 0.0, None
        self._before: list[Move] = []

    def report(self, now_s: float, peer: int, load: ev.Load) -> None:
        self._now_s, self._reports[peer] = now_s, (now_s, load)

    def moves(self, now_s: float, stages: Stages, may_move: Collection[int]) -> list[Move]:
        self._now_s = now_s
        if self._due_s is None:
            self._due_s = now_s + self._period_s
        if now_s < self._due_s:
            return []
        self._due_s = now_s + self._period_s
        table = self._table(stages)
        self._before = decide(table, self._n_moves, self._before, may_move, _sizes(stages)) if table else []
        return self._before

    def stage_for(self, stages: Stages) -> int:
        """The slowest stage; without a table the smallest."""
        table = self._table(stages)
        return slowest(loads_of(table, _sizes(stages))) if table else super().stage_for(stages)

    def better(self, stages: Stages, peer: int) -> int | None:
        """The stage that `stage_for` would choose, if it needs the joining `peer` more than the peer's own stage does;
        else None."""
        table = self._table(stages)
        if not table:
            return ByNumber().better(stages, peer)
        loads = loads_of(table, _sizes(stages))
        own, best = next(s for s, peers in enumerate(stages) if peer in peers), slowest(loads)
        is_smaller = loads[own].n_peers - 1 > loads[best].n_peers
        return best if best != own and (is_smaller or loads[own].rate(1 + MARGIN) > loads[best].rate()) else None

    def _table(self, stages: Stages) -> list[dict[int, ev.Load]]:
        """The fresh reports, per stage; empty if a stage with peers has none."""
        fresh_s = self._now_s - FRESH_PERIODS * self._period_s
        self._reports = {peer: report for peer, report in self._reports.items() if report[0] >= fresh_s}
        fresh = {peer: load for peer, (_, load) in self._reports.items()}
        table = [{peer: fresh[peer] for peer in sorted(peers) if peer in fresh} for peers in stages]
        return [] if any(peers and not own for peers, own in zip(stages, table, strict=True)) else table


class Algorithm2(ByNumber):
    """SWARM's Algorithm 2 as its listing says it. Each period the peer with the shortest queue of the stage with the
    least load (the sum of its peers' queues) moves to the stage with the greatest load, and so do `n_moves` one after
    the other. Nothing else is asked: not how far the loads differ, nor whether the stage that gives a peer is then the
    slowest one. A newcomer joins the stage with the greatest load. Not in the listing, but without it the run would
    end: a stage keeps its last peer."""

    def __init__(self, period_s: float, n_moves: int = 1):
        self._period_s, self._n_moves = period_s, n_moves
        self._due_s: float | None = None
        self._queues: dict[int, float] = {}

    def report(self, now_s: float, peer: int, load: ev.Load) -> None:
        """The share of time in which a peer computes does not count."""
        self._queues[peer] = load.queue

    def moves(self, now_s: float, stages: Stages, may_move: Collection[int]) -> list[Move]:
        if self._due_s is None:
            self._due_s = now_s + self._period_s
        if now_s < self._due_s:
            return []
        self._due_s = now_s + self._period_s
        left = [set(peers) for peers in stages]
        found: list[Move] = []
        while len(found) < self._n_moves and (move := self._move(left, set(may_move) - {m.peer for m in found})):
            left[move.src].remove(move.peer)
            left[move.dst].add(move.peer)
            found.append(move)
        return found

    def _move(self, stages: Stages, may_move: Collection[int]) -> Move | None:
        loads = self._loads(stages)
        src, dst = (pick(range(len(loads)), key=loads.__getitem__) for pick in (min, max))
        candidates = [peer for peer in sorted(stages[src]) if peer in may_move and peer in self._queues]
        if src == dst or len(stages[src]) < 2 or not candidates:
            return None
        return Move(min(candidates, key=self._queues.__getitem__), src, dst)

    def stage_for(self, stages: Stages) -> int:
        """The stage with the greatest load; without reports the smallest."""
        loads = self._loads(stages)
        return max(range(len(loads)), key=loads.__getitem__) if any(loads) else super().stage_for(stages)

    def better(self, stages: Stages, peer: int) -> int | None:
        """A newcomer stays with the stage that it was given."""

    def _loads(self, stages: Stages) -> list[float]:
        return [sum(self._queues.get(peer, 0.0) for peer in sorted(peers)) for peers in stages]


def _sizes(stages: Stages) -> list[int]:
    return [len(peers) for peers in stages]
