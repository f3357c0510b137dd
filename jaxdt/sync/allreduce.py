"""Sharded all-reduce: each member of a group owns one shard of the gradient vector, as a colocated sharded parameter
server (DT-FM Eq. 2 is its cost).

Every member sends each other owner its part of that owner's shard, slice by slice; an owner adds a slice up as soon as
all members' parts are here, in the order of the members, and sends the sum to all. So halves of the exchange overlap,
and every member ends with the same bits. Vectors hold sums over samples: dividing once, by the samples in the
record, weighs peers with unequal shares of the microbatches rightly. The exchange never writes into the accumulator.

A peer may be in two groups: the replicas of its stage, and, with a tied head, the holders of the token table on the
first and last stage, whose two gradients are summed here and counted once in the norm.
"""

import itertools
import math
import zlib

from jaxdt.core.events import (
    BULK,
    COORDINATOR,
    GATHER,
    UPDATE,
    Accumulated,
    Action,
    Committed,
    Drained,
    Evaluated,
    Event,
    Free,
    GroupResult,
    Message,
    Prepared,
    Ran,
    Received,
    Record,
    Reduced,
    Restore,
    Restored,
    Round,
    Run,
    Send,
    Shard,
    SliceKey,
    Sum,
    Summed,
    Suspect,
    Updated,
    View,
    ViewChanged,
    Work,
)
from jaxdt.core.ledger import Item, Ledger, cover_problem
from jaxdt.core.sizes import Group

FLOAT_BYTES = 4
Cover = tuple[tuple[int, tuple[Item, ...]], ...]


def slices_of(n_elements: int, members: tuple[int, ...], slice_elements: int) -> dict[int, list[tuple[int, int]]]:
    """Each member's shard, cut into slices."""
    slices = {}
    for rank, owner in enumerate(members):
        lo, end = (r * n_elements // len(members) for r in (rank, rank + 1))
        slices[owner] = [(start, min(start + slice_elements, end)) for start in range(lo, end, slice_elements)]
    return slices


class Exchange:
    """What one member knows of one group's round."""

    def __init__(self, group: Group, view: View, step: int, slice_elements: int):
        self.group = group
        self.members = tuple(sorted({peer for stage in group.stages for peer in view.stage_peers(stage)}))
        self.member_set = frozenset(self.members)
        self.round = Round(step, group.name, max(view.stage_views[stage] for stage in group.stages))
        self._slices = slices_of(group.n_elements, self.members, slice_elements)
        self.owner_of = {bounds: owner for owner, slices in self._slices.items() for bounds in slices}
        self.parts: dict[tuple[int, int], dict[int, tuple[tuple[Item, ...], int]]] = {}
        self.covers: dict[tuple[int, int], tuple[Cover, int]] = {}
        self.sums: dict[tuple[int, int], tuple[int, float]] = {}
        self.n_samples = 0
        self.good_cover: Cover | None = None

    def key(self, bounds: tuple[int, int], src: int | None = None) -> SliceKey:
        return SliceKey(self.round, *bounds, src)

    def slices(self, owner: int) -> list[tuple[int, int]]:
        return self._slices[owner]

    @property
    def in_turn(self) -> list[tuple[tuple[int, int], int]]:
        """Slices and owners, owners in turn rather than one after the other: all links are busy from the start."""
        turns = itertools.zip_longest(*self._slices.values())
        return [(bounds, owner) for turn in turns for bounds, owner in zip(turn, self._slices, strict=True) if bounds]

    @property
    def complete(self) -> bool:
        return len(self.sums) == len(self.owner_of)

    def result(self) -> GroupResult:
        """The digest covers the slices' digests, so it is equal iff all the sums are."""
        sums = [self.sums[bounds] for bounds in sorted(self.sums)]
        digest = zlib.crc32(b"".join(digest.to_bytes(4, "little") for digest, _ in sums))
        return GroupResult(self.round, digest, math.fsum(sq_norm for _, sq_norm in sums), self.n_samples)


class AllReduce:
    """One peer's side of it: rounds, `prepared`, and the update when the record is committed."""

    READS = frozenset({ViewChanged, Restored, Accumulated, Evaluated, Drained, Ran, Shard, Summed, Reduced, Committed})

    def __init__(
        self, peer: int, stage: int, groups: tuple[Group, ...], n_microbatches: int, slice_bytes: int, clip_norm: float
    ):
        self._peer, self._stage, self._groups = peer, stage, groups
        self._n_microbatches, self._clip_norm = n_microbatches, clip_norm
        self._slice_elements = max(1, slice_bytes // FLOAT_BYTES)
        self._ledger = Ledger()
        self._view: View | None = None
        self._exchanges: dict[tuple[int, str], Exchange] = {}
        self._losses: dict[int, list[float]] = {}
        self._version = 0
        self._updating = False

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        if type(event) is Received:
            return self._received(event.header.src, event.body)
        match event:
            case ViewChanged(view):
                return self._adopt(view)
            case Restored(version):
                return [Updated(self._stage, version)]
            case Accumulated(step, stage, microbatch, n_samples, loss_sum):
                self._ledger.add(step, (stage, microbatch), n_samples)
                self._count(step, 0, loss_sum, n_samples)
            case Evaluated(step, n_samples, loss_sum):
                self._count(step, 2, loss_sum, n_samples)
            case Drained(step):
                return [Run(Work(self._stage, GATHER, None, self._peer, step))]
            case Ran(Work(kind="G") as work):
                exchanges = [self._exchange(work.step, group) for group in self._groups]
                sends = [send for exchange in exchanges for send in self._freeze(exchange)]
                return sends + [a for exchange in exchanges for a in self._offer(exchange)]
            case Summed(key, digest, sq_norm):
                return self._on_summed(key, digest, sq_norm)
            case Ran(Work(kind="U") as work):
                return self._advance(work.step)
        return []

    def _received(self, src: int, body: Message) -> list[Action | Event]:
        match body:
            case Shard():
                return self._on_shard(src, body)
            case Reduced():
                return self._on_reduced(src, body)
            case Committed(record):
                return self._on_committed(record)
        return []

    def _adopt(self, view: View) -> list[Action]:
        """A new lineage voids everything that is under way, and begins with the checkpoint's state."""
        lost = range(view.n_committed, self._version + 2) if view.rolled_back else ()
        self._view, self._version = view, view.n_committed
        for step in lost:
            self._ledger.free(step)
            self._losses.pop(step, None)
        if not view.rolled_back:
            return []
        self._exchanges.clear()
        return [*(Free(step) for step in lost), Restore(view.n_committed, view.lineage)]

    def _count(self, step: int, at: int, loss_sum: float | None, n_samples: int) -> None:
        if loss_sum is not None:
            counts = self._losses.setdefault(step, [0.0, 0, 0.0, 0])
            counts[at] += loss_sum
            counts[at + 1] += n_samples

    def _exchange(self, step: int, group: Group) -> Exchange:
        at = (step, group.name)
        if at not in self._exchanges:
            self._exchanges[at] = Exchange(group, self._view, step, self._slice_elements)
        return self._exchanges[at]

    def _find(self, key: SliceKey) -> Exchange | None:
        """The exchange that a message belongs to; None for a round that is over or not one of ours."""
        step, name = key.round.step, key.round.group
        exchange = self._exchanges.get((step, name))
        if exchange is None:
            group = next((group for group in self._groups if group.name == name), None)
            if group is None or not self._version <= step <= self._version + 1:
                return None
            exchange = self._exchange(step, group)
        mine, theirs = exchange.round, key.round  # of one step and group, by the look-up
        same = mine.group_view == theirs.group_view and mine.attempt == theirs.attempt
        return exchange if same and (key.lo, key.hi) in exchange.owner_of else None

    # ---------------------------------------------------------------------------------------------------- exchange

    def _freeze(self, exchange: Exchange) -> list[Action]:
        """Our set is final and our vector is there: keep our own shard, send every other owner its slices."""
        step = exchange.round.step
        items, n_samples = self._ledger.items(step), self._ledger.n_samples(step)
        for bounds in exchange.slices(self._peer):
            exchange.parts.setdefault(bounds, {})[self._peer] = (items, n_samples)
        sends = []
        for bounds, owner in exchange.in_turn:
            if owner != self._peer:
                shard = Shard(SliceKey(exchange.round, *bounds, self._peer), items, n_samples)
                sends.append(Send(owner, shard, FLOAT_BYTES * (bounds[1] - bounds[0]), BULK))
        return sends

    def _offer(self, exchange: Exchange) -> list[Action]:
        """Add up what is complete in our own shard, once all groups' shards are on their way: others wait for those."""
        return [a for bounds in exchange.slices(self._peer) for a in self._try_sum(exchange, bounds)]

    def _on_shard(self, src: int, shard: Shard) -> list[Action]:
        exchange = self._find(shard.key)
        bounds = (shard.key.lo, shard.key.hi)
        if exchange is None or exchange.owner_of[bounds] != self._peer or src not in exchange.member_set:
            return []
        parts = exchange.parts.setdefault(bounds, {})
        parts[src] = (shard.items, shard.n_samples)
        return self._try_sum(exchange, bounds) if len(parts) == len(exchange.members) else []

    def _try_sum(self, exchange: Exchange, bounds: tuple[int, int]) -> list[Action]:
        parts = exchange.parts.get(bounds, {})
        if len(parts) < len(exchange.members):
            return []
        cover = tuple((src, items) for src, (items, _) in sorted(parts.items()))
        problem = self._problem(exchange, cover)
        if not problem:
            n_samples = sum(n for _, n in parts.values()) // len(exchange.group.stages)
            exchange.covers[bounds] = (cover, n_samples)
        return problem or [Sum(exchange.key(bounds), exchange.members)]

    def _on_summed(self, key: SliceKey, digest: int, sq_norm: float) -> list[Action]:
        exchange = self._find(key)
        bounds = (key.lo, key.hi)
        del exchange.parts[bounds]
        cover, n_samples = exchange.covers.pop(bounds)
        reduced = Reduced(key, cover, n_samples, digest, sq_norm)
        n_bytes = FLOAT_BYTES * (key.hi - key.lo)
        sends = [Send(member, reduced, n_bytes, BULK) for member in exchange.members if member != self._peer]
        return sends + self._hold(exchange, bounds, digest, sq_norm, n_samples)

    def _on_reduced(self, src: int, reduced: Reduced) -> list[Action]:
        exchange = self._find(reduced.key)
        bounds = (reduced.key.lo, reduced.key.hi)
        if exchange is None or exchange.owner_of[bounds] != src or bounds in exchange.sums:
            return []
        problem = self._problem(exchange, reduced.cover)
        return problem or self._hold(exchange, bounds, reduced.digest, reduced.sq_norm, reduced.n_samples)

    def _problem(self, exchange: Exchange, cover: Cover) -> list[Action]:
        """A sum is accepted only with an exact cover (step protocol, Sec. 4.3). All slices of a round have one."""
        if cover == exchange.good_cover:
            return []
        problem = cover_problem(dict(cover), exchange.group.stages, self._n_microbatches)
        if problem:
            return [Send(COORDINATOR, Suspect(self._peer, f"{exchange.round}: {problem}"))]
        exchange.good_cover = cover
        return []

    def _hold(self, exchange: Exchange, bounds, digest: int, sq_norm: float, n_samples: int) -> list[Action]:
        exchange.sums[bounds] = (digest, sq_norm)
        exchange.n_samples = n_samples
        step = exchange.round.step
        if not exchange.complete or not all(self._exchange(step, group).complete for group in self._groups):
            return []
        results = tuple(self._exchange(step, group).result() for group in self._groups)
        admission = next(member.admission for member in self._view.members if member.peer == self._peer)
        loss_sum, n_losses, eval_sum, n_evals = self._losses.pop(step, (0.0, 0, 0.0, 0))
        return [Send(COORDINATOR, Prepared(step, admission, results, loss_sum, int(n_losses), eval_sum, int(n_evals)))]

    # ------------------------------------------------------------------------------------------------------ commit

    def _on_committed(self, record: Record) -> list[Action | Event]:
        if record.step != self._version or self._updating:
            return []
        mine = [self._exchange(record.step, group) for group in self._groups]
        if not all(exchange.complete and exchange.round in record.rounds for exchange in mine):
            problem = f"the record of step {record.step} names a round that it is not prepared for"
            return [Send(COORDINATOR, Suspect(self._peer, problem))]
        if record.verdict == "skip":
            return self._advance(record.step)
        self._updating = True
        return [Run(Work(self._stage, UPDATE, None, self._peer, record.step), update_scale(record, self._clip_norm))]

    def _advance(self, step: int) -> list[Action | Event]:
        self._version, self._updating = step + 1, False
        self._ledger.free(step)
        for group in self._groups:
            self._exchanges.pop((step, group.name), None)
        return [Free(step), Updated(self._stage, self._version)]


def update_scale(record: Record, clip_norm: float) -> float:
    """Factor on the summed gradient: the mean over samples, clipped to the global norm `clip_norm` (0: not)."""
    norm = math.sqrt(record.sq_norm) / record.n_samples
    clip = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
    return clip / record.n_samples
