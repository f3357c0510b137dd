"""What one member knows of one group's round: who is in it, which slices it has, and when its result is whole."""

import functools
import itertools
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from jaxdt.protocol.events import GroupResult, Record, Reduced, Round, Shard, SliceKey, Tally, View
from jaxdt.protocol.ledger import Item, cover_problem
from jaxdt.spec.sizes import Group

Bounds = tuple[int, int]
Cover = tuple[tuple[int, ...], tuple[tuple[Item, ...], ...]]  # members, and the contributions of each


def round_of(group: Group, view: View, step: int) -> Round:
    """The round that a view makes of a group's exchange: another one whenever the group's members change."""
    return Round(step, group.name, max(view.stage_views[stage] for stage in group.stages))


@dataclass(frozen=True)
class Cut:
    """Who adds up which slices of a group's vector. `in_turn`: slices and owners, owners in turn rather than one after
    the other, so that all links are busy from the start. Not to be written to: all rounds of the members share it."""

    member_set: frozenset[int]
    slices: dict[int, list[Bounds]]
    owner_of: dict[Bounds, int]
    in_turn: tuple[tuple[Bounds, int], ...]


@functools.lru_cache(maxsize=64)
def cut(n_elements: int, members: tuple[int, ...], slice_elements: int) -> Cut:
    """Each member's shard of the vector, cut into slices."""
    slices = {}
    for rank, owner in enumerate(members):
        lo, end = (r * n_elements // len(members) for r in (rank, rank + 1))
        slices[owner] = [(start, min(start + slice_elements, end)) for start in range(lo, end, slice_elements)]
    owner_of = {bounds: owner for owner, own in slices.items() for bounds in own}
    turns = itertools.zip_longest(*slices.values())
    in_turn = tuple((bounds, owner) for turn in turns for bounds, owner in zip(turn, slices, strict=True) if bounds)
    return Cut(frozenset(members), slices, owner_of, in_turn)


class Exchange:
    """One round at `peer`; or, with `held`, a round of an earlier view whose result those holders have: nothing is
    added to it, and who lacks it takes it from them. `joining`: members that add nothing, and get the result all the
    same. `parts`: what has come of the slices that the peer adds up, until it does."""

    def __init__(
        self,
        peer: int,
        group: Group,
        view: View,
        step: int,
        slice_elements: int,
        held: tuple[Round, tuple[int, ...]] | None = None,
    ):
        self._peer, self.group = peer, group
        self.members = tuple(sorted({member for stage in group.stages for member in view.working(stage, step)}))
        here = {member for stage in group.stages for member in view.stage_peers(stage)}
        self.joining = tuple(sorted(here - set(self.members)))
        self.round, self.holders = held or (round_of(group, view, step), ())
        self.frozen = held is not None
        self._cut = cut(group.n_elements, () if held else self.members, slice_elements)
        self.member_set, self.owner_of, self.in_turn = self._cut.member_set, self._cut.owner_of, self._cut.in_turn
        self.parts: dict[Bounds, dict[int, Shard]] = {bounds: {} for bounds in self.slices(peer)}
        self.covers: dict[Bounds, tuple[Cover, int, Tally]] = {}
        self.sums: dict[Bounds, Reduced] = {}
        self.good_cover: Cover | None = None
        self._n_held = 0
        self.complete = not group.n_elements

    @property
    def receivers(self) -> tuple[int, ...]:
        """Everyone else: they get the sums."""
        return tuple([member for member in self.members + self.joining if member != self._peer])

    def key(self, bounds: Bounds, src: int | None = None) -> SliceKey:
        return SliceKey(self.round, *bounds, src)

    def slices(self, owner: int) -> list[Bounds]:
        return self._cut.slices.get(owner, [])

    def gives(self, src: int, bounds: Bounds) -> bool:
        """Whether a sum of such a slice is `src`'s to give."""
        return src in self.holders or self.owner_of.get(bounds) == src

    def problem(self, cover: Cover, n_microbatches: int) -> str:
        """'' if the cover is exact, which is then looked at no more: all slices of a round have one."""
        if cover == self.good_cover:
            return ""
        members, sets = cover
        if len(members) != len(sets):
            return f"{len(members)} members with {len(sets)} sets"
        problem = cover_problem(dict(zip(members, sets, strict=True)), self.group.stages, n_microbatches)
        if not problem:
            self.good_cover = cover
        return problem

    def hold(self, sum: Reduced) -> bool:
        """A slice's sum is here; whether all are."""
        lo, hi = sum.key.lo, sum.key.hi
        self.sums[lo, hi] = sum
        self._n_held += hi - lo
        self.complete = self._n_held == self.group.n_elements
        return self.complete

    def result(self) -> GroupResult:
        """The digest covers the slices' digests, so it is equal iff all the sums are. All slices have the same samples
        and losses."""
        sums = [self.sums[bounds] for bounds in sorted(self.sums)]
        digest = zlib.crc32(b"".join([sum.digest.to_bytes(4, "little") for sum in sums]))
        sq_norm = math.fsum([sum.sq_norm for sum in sums])
        return GroupResult(self.round, digest, sq_norm, sums[0].n_samples, sums[0].tally)


def total(tallies: Iterable[Tally]) -> Tally:
    """Their sum, in their order; a loop, since there are as many as slices times members."""
    loss_sum, n_losses, eval_sum, n_evals = 0.0, 0, 0.0, 0
    for tally in tallies:
        loss_sum += tally.loss_sum
        n_losses += tally.n_losses
        eval_sum += tally.eval_sum
        n_evals += tally.n_evals
    return Tally(loss_sum, n_losses, eval_sum, n_evals)


def update_scale(record: Record, clip_norm: float) -> float:
    """Factor on the summed gradient: the mean over samples, clipped to the global norm `clip_norm` (0: not)."""
    norm = math.sqrt(record.sq_norm) / record.n_samples
    clip = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
    return clip / record.n_samples
