"""One round of averaging at one peer: its participants, the slices that are here, and the result once it is whole.

The vector is cut into shards, one for each owner, and shards into slices. Contributors send each owner their part of
its shard. An owner adds a slice up once all parts are here, and sends the sum to all receivers. The machine that makes
a round names its participants and says which contributions are right; an exchange derives neither.
"""

import functools
import itertools
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.protocol.ledger import Item
from jaxdt.protocol.participants import Cover, CoverRule, Participants
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.codec import EXACT, FLOAT32_BYTES, CodecSpec, exchanged_bytes

Bounds = tuple[int, int]  # of a slice: its elements lo..hi-1


@dataclass(frozen=True)
class Sharding:
    """The owner of each slice of a vector, which adds that slice up. `in_turn`: all slices with their owners, owners in
    turn rather than one after the other, so that all links are busy from the start. Do not write to it: the rounds of
    all members share it."""

    slices: dict[int, list[Bounds]]
    owner_of: dict[Bounds, int]
    in_turn: tuple[tuple[Bounds, int], ...]


@functools.lru_cache(maxsize=64)
def sharding(n_elements: int, owners: tuple[int, ...], slice_elements: int, block: int = 0) -> Sharding:
    """Each owner's shard of a vector, cut into slices. The blocks of a codec stay whole: all slices begin with one."""
    slices: dict[int, list[Bounds]] = {}
    block = max(1, block)
    slice_elements = max(block, slice_elements // block * block)
    n_blocks = -(-n_elements // block)
    for rank, owner in enumerate(owners):
        lo, end = (min(r * n_blocks // len(owners) * block, n_elements) for r in (rank, rank + 1))
        slices[owner] = [(start, min(start + slice_elements, end)) for start in range(lo, end, slice_elements)]
    owner_of = {bounds: owner for owner, own in slices.items() for bounds in own}
    turns = itertools.zip_longest(*slices.values())
    in_turn = tuple((bounds, owner) for turn in turns for bounds, owner in zip(turn, slices, strict=True) if bounds)
    return Sharding(slices, owner_of, in_turn)


def slice_elements(slice_bytes: int) -> int:
    return max(1, slice_bytes // FLOAT32_BYTES)


@dataclass(frozen=True)
class RoundSpec:
    """Who takes part in a round of a vector of `n_elements`, and which contributions are right. `n_stages`: those that
    count the same samples in it. `codec`: how the numbers travel, contributions and sums."""

    id: RoundId
    n_elements: int
    participants: Participants
    cover_rule: CoverRule
    n_stages: int = 1
    codec: CodecSpec = EXACT


class Exchange:
    """A round at `peer`. `parts`: what has come of the slices that the peer adds up, until it does; `sums`: the slices'
    sums that are here. `is_frozen`: the peer's own contribution is final, or not needed. `holders`: the members that
    have the whole result, if the peer gets it from them."""

    def __init__(self, peer: int, spec: RoundSpec, slice_elements: int):
        self.spec = spec
        self.id = spec.id
        self.holders: tuple[int, ...] = ()
        self.contributors = spec.participants.contributors
        self.contributor_set = frozenset(self.contributors)
        self.peer = peer
        receivers = spec.participants.receivers
        self._contributing_receivers = tuple([m for m in self.contributors if m in receivers])
        self.set_joining(tuple([m for m in receivers if m not in self.contributor_set]))
        self.is_frozen = False
        self._sharding = sharding(spec.n_elements, spec.participants.owners, slice_elements, spec.codec.block)
        self.in_turn = self._sharding.in_turn
        self.own_slices = self._sharding.slices.get(peer, [])
        self.parts: dict[Bounds, dict[int, ev.Shard]] = {bounds: {} for bounds in self.own_slices}
        self.covers: dict[Bounds, tuple[Cover, int, ev.Tally]] = {}
        self.sums: dict[Bounds, ev.Reduced] = {}
        self.complete = not spec.n_elements
        self._right_cover: Cover | None = None
        self._n_summed = 0

    def key(self, bounds: Bounds, src: int | None = None) -> ev.SliceKey:
        return ev.SliceKey(self.id, *bounds, src)

    def has_all_parts(self, bounds: Bounds) -> bool:
        return len(self.parts[bounds]) == len(self.contributors)

    def gives(self, src: int, bounds: Bounds) -> bool:
        """Whether `src` may give the sum of such a slice."""
        return src in self.holders or self._sharding.owner_of.get(bounds) == src

    def set_joining(self, joining: tuple[int, ...]) -> None:
        """The members that add nothing and get the sums all the same; contributors get them first."""
        self.joining = joining
        receivers = self._contributing_receivers + joining
        self.receivers = tuple([member for member in receivers if member != self.peer])

    def freeze(self, items: tuple[Item, ...], n_samples: int, tally: ev.Tally) -> ev.Post:
        """This peer's contribution is final and its vector is there: keep the own shard, send every other owner its
        slices."""
        self.is_frozen = True
        own = self.peer
        for bounds, parts in self.parts.items():
            parts[own] = ev.Shard(self.key(bounds, own), items, n_samples, tally)
        letters = [
            (owner, ev.Shard(self.key(bounds, own), items, n_samples, tally), self.n_bytes(bounds))
            for bounds, owner in self.in_turn
            if owner != own
        ]
        return ev.Post(tuple(letters), ev.BULK)

    def n_bytes(self, bounds: Bounds) -> int:
        return exchanged_bytes(self.spec.codec, bounds[1] - bounds[0])

    @property
    def addable(self) -> list[Bounds]:
        return [bounds for bounds in self.parts if self.has_all_parts(bounds)]

    def add_up(self, bounds: Bounds) -> ev.Sum | str:
        """Add up a slice whose parts are all here; or what is wrong with them."""
        parts = self.parts[bounds]
        shards = [parts[src] for src in self.contributors]
        cover = (self.contributors, tuple([shard.items for shard in shards]))
        if problem := self.problem(cover):
            return problem
        n_samples = sum([shard.n_samples for shard in shards]) // self.spec.n_stages
        self.covers[bounds] = (cover, n_samples, total([shard.tally for shard in shards]))
        return ev.Sum(self.key(bounds), self.contributors)

    def give_out(self, key: ev.SliceKey, digest: int, sq_norm: float) -> tuple[ev.Post, ev.Reduced] | None:
        """A slice is added up: its sum for all receivers. None if the slice is not one that was to be added up."""
        bounds = (key.lo, key.hi)
        if bounds not in self.covers:
            return None
        del self.parts[bounds]
        cover, n_samples, tally = self.covers.pop(bounds)
        body, n_bytes = ev.Reduced(key, cover, n_samples, digest, sq_norm, tally), self.n_bytes(bounds)
        return ev.Post(tuple([(member, body, n_bytes) for member in self.receivers]), ev.BULK), body

    def given_to(self, dst: int, only_own: bool = False) -> list[ev.Send]:
        """The sums that are here, or those that this peer has added up, for a member that lacks them."""
        slices = self.own_slices if only_own else sorted(self.sums)
        held = [bounds for bounds in slices if bounds in self.sums]
        return [ev.Send(dst, self.sums[bounds], self.n_bytes(bounds), ev.BULK) for bounds in held]

    def hold_by(self, holders: tuple[int, ...]) -> None:
        """From now on the result comes from those who hold it."""
        self.holders = holders
        self.is_frozen = True
        self.parts.clear()
        self.covers.clear()

    def problem(self, cover: Cover) -> str:
        """'' if the contributions are right. All slices of a round have the same cover, which is checked once."""
        if cover == self._right_cover:
            return ""
        problem = self.spec.cover_rule.problem(cover)
        if not problem:
            self._right_cover = cover
        return problem

    def hold(self, sum: ev.Reduced) -> bool:
        """A slice's sum is here; whether all are."""
        lo, hi = sum.key.lo, sum.key.hi
        self.sums[lo, hi] = sum
        self._n_summed += hi - lo
        self.complete = self._n_summed == self.spec.n_elements
        return self.complete

    def result(self) -> ev.GroupResult:
        """The digest covers the slices' digests, so it is equal iff all the sums are. All slices have the same samples
        and losses."""
        sums = [self.sums[bounds] for bounds in sorted(self.sums)]
        digest = zlib.crc32(b"".join([sum.digest.to_bytes(4, "little") for sum in sums]))
        sq_norm = math.fsum([sum.sq_norm for sum in sums])
        return ev.GroupResult(self.id, digest, sq_norm, sums[0].n_samples, sums[0].tally)


def total(tallies: Iterable[ev.Tally]) -> ev.Tally:
    """Their sum, in their order; a loop, since there are as many as slices times members."""
    loss_sum, n_losses = 0.0, 0
    for tally in tallies:
        loss_sum += tally.loss_sum
        n_losses += tally.n_losses
    return ev.Tally(loss_sum, n_losses)


def update_scale(sq_norm: float, n_samples: int, clip_norm: float) -> float:
    """Factor on a summed gradient of this squared norm: the mean over samples, clipped to `clip_norm` (0: not). 0 for a
    gradient that is not finite."""
    if not math.isfinite(sq_norm):
        return 0.0
    norm = math.sqrt(sq_norm) / n_samples
    clip = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
    return clip / n_samples
