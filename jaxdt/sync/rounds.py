"""The rounds of equal replicas: which exchanges of a peer's groups are under way, by step; what a new view makes of
them; and results that are fetched from others."""

from collections.abc import Iterable
from dataclasses import replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.participants import ExactCover, Participants
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.sizes import Group
from jaxdt.sync.exchange import FLOAT_BYTES, Bounds, Exchange, RoundSpec


def round_in_view(group: Group, view: ev.View, step: int, n_microbatches: int) -> RoundSpec:
    """The round that a view makes of a group's exchange, another one whenever the group's members change. The members
    that compute the step contribute, and each owns a shard. Members that join add nothing, and get the result."""
    contributors = tuple(sorted({member for stage in group.stages for member in view.working(stage, step)}))
    members = {member for stage in group.stages for member in view.stage_peers(stage)}
    joining = tuple(sorted(members - set(contributors)))
    last_change = max(view.stage_views[stage] for stage in group.stages)
    return RoundSpec(
        round=RoundId(RoundKind.GRADIENT, group.stage, step, view=last_change),
        n_elements=group.n_elements,
        participants=Participants(contributors, contributors, contributors + joining),
        cover_rule=ExactCover(group.stages, n_microbatches),
    )


class Rounds:
    """The rounds of one peer, which syncs `groups`, in slices of `slice_bytes`."""

    def __init__(self, peer: int, groups: tuple[Group, ...], n_microbatches: int, slice_bytes: int):
        self.groups = {group.stage: group for group in groups}
        self._peer = peer
        self._n_microbatches = n_microbatches
        self._slice_elements = max(1, slice_bytes // FLOAT_BYTES)
        self._view: ev.View | None = None
        self._exchanges: dict[tuple[int, int], Exchange] = {}  # by step and stage

    def of(self, step: int) -> list[Exchange]:
        """The exchanges of all groups, made where there was none."""
        return [self._exchange(step, stage) for stage in self.groups]

    def known(self, step: int) -> list[Exchange] | None:
        """The exchanges of all groups; None if one is missing."""
        found = [self._exchanges.get((step, stage)) for stage in self.groups]
        return [exchange for exchange in found if exchange] if all(found) else None

    def find(self, round: RoundId, steps: range) -> Exchange | None:
        """The exchange that a message belongs to. None for a round that is over, a round of a step not in `steps`, and
        a round in which this peer has no part."""
        exchange = self._exchanges.get((round.number, round.stage))
        if exchange is None:
            is_known = round.kind == RoundKind.GRADIENT and round.stage in self.groups
            if not is_known or round.number not in steps:
                return None
            exchange = self._exchange(round.number, round.stage)
        return exchange if exchange.round == round else None

    def drop(self, steps: Iterable[int]) -> tuple[RoundId, ...]:
        """Forget the exchanges of these steps; their rounds."""
        places = [(step, stage) for step in steps for stage in self.groups]
        return tuple([self._exchanges.pop(place).round for place in places if place in self._exchanges])

    def enter(self, view: ev.View) -> list[ev.Action]:
        """The first view of this peer, or a later one: fetch results that others hold."""
        self._view = view
        held = [(round, holders) for round, holders in view.results if round.stage in self.groups]
        return [send for round, holders in held for send in self._fetch(round, holders)]

    def adopt(self, view: ev.View) -> list[ev.Action]:
        """A later view: rounds that are void in it are given up."""
        self._view = view
        held = {(round.number, round.stage): round for round, _ in view.results}
        actions: list[ev.Action] = []
        for step, stage in list(self._exchanges):
            if step >= view.n_committed:
                actions += self._renew(step, stage, held.get((step, stage)))
        return actions + self.enter(view)

    def give(self, src: int, round: RoundId) -> list[ev.Action]:
        """A peer fetches this peer's result, if the whole of it is here."""
        exchange = self._exchanges.get((round.number, round.stage))
        if exchange is None or exchange.round != round or not exchange.complete:
            return []
        return self._send_sums(src, exchange, sorted(exchange.sums))

    def _spec(self, step: int, stage: int) -> RoundSpec:
        assert self._view is not None
        return round_in_view(self.groups[stage], self._view, step, self._n_microbatches)

    def _exchange(self, step: int, stage: int) -> Exchange:
        place = (step, stage)
        if place not in self._exchanges:
            self._exchanges[place] = Exchange(self._peer, self._spec(step, stage), self._slice_elements)
        return self._exchanges[place]

    def _renew(self, step: int, stage: int, held: RoundId | None) -> list[ev.Action]:
        """Give up an exchange whose round is void in the view; the next look-up makes a new one."""
        exchange = self._exchanges[step, stage]
        spec = self._spec(step, stage)
        if exchange.round == (held or spec.round):
            return self._send_to_joining(exchange, spec.participants)
        del self._exchanges[step, stage]
        return [ev.Forget(exchange.round)]

    def _send_to_joining(self, exchange: Exchange, participants: Participants) -> list[ev.Action]:
        """Members that join get what was summed for the step before their view was here."""
        joining = tuple([m for m in participants.receivers if m not in participants.contributors])
        new = sorted(set(joining) - set(exchange.joining) - {self._peer})
        exchange.set_joining(joining)
        own = [bounds for bounds in exchange.own_slices if bounds in exchange.sums]
        return [send for peer in new for send in self._send_sums(peer, exchange, own)]

    def _fetch(self, round: RoundId, holders: tuple[int, ...]) -> list[ev.Action]:
        """Ask for the result that others hold, unless it is here too."""
        exchange = self._exchanges.get((round.number, round.stage))
        if exchange and exchange.complete:
            return []
        spec = self._spec(round.number, round.stage)
        without_owners = replace(spec.participants, owners=())
        held = replace(spec, round=round, participants=without_owners, holders=holders)
        self._exchanges[round.number, round.stage] = Exchange(self._peer, held, self._slice_elements)
        return [ev.Reopen(round), ev.Send(holders[0], ev.FetchResult(round))]

    def _send_sums(self, dst: int, exchange: Exchange, slices: Iterable[Bounds]) -> list[ev.Action]:
        return [ev.Send(dst, exchange.sums[lo, hi], FLOAT_BYTES * (hi - lo), ev.BULK) for lo, hi in slices]
