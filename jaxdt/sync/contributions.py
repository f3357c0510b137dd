"""Gradient contributions of a pool's workers: each worker's accumulated gradient on the way to its server, in slices.

A contribution goes whole to one server, which adds it to its own accumulator; the servers of a stage then average as
replicas do, and know nothing of workers. So a worker may vanish as soon as its contribution has been added. All workers
together send what they would send if each server got a shard of every contribution, and a server gets as much on
average. Each slice comes with the list of the gradients in its contribution; the wiring decides whether it counts.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxdt.protocol import events as ev
from jaxdt.protocol.ledger import NO_LOSSES
from jaxdt.protocol.participants import Cover, Participants
from jaxdt.protocol.round_id import RoundId
from jaxdt.sync.exchange import Exchange, RoundSpec


class _FromOne:
    """The rule for one worker's slices: all of them have to name the same gradients, of this worker alone."""

    def __init__(self, worker: int):
        self._worker = worker
        self._cover: Cover | None = None

    def problem(self, cover: Cover) -> str:
        contributors, _ = cover
        self._cover = self._cover or cover
        if contributors == (self._worker,) and cover == self._cover:
            return ""
        return f"slices of {contributors} that hold different things, expected one contribution of {self._worker}"


@dataclass(frozen=True)
class ContributionShape:
    """Numbers of each sync group of a stage, numbers of a slice, and bytes of a number on the way."""

    sizes: Mapping[int, int]
    slice_elements: int
    number_bytes: int

    def exchange(self, peer: int, server: int, worker: int, round: RoundId) -> Exchange:
        """The exchange of a contribution at one of its two ends."""
        n_elements = self.sizes[round.stage]
        participants = Participants(contributors=(worker,), owners=(server,), receivers=())
        spec = RoundSpec(round, n_elements, participants, _FromOne(worker), number_bytes=self.number_bytes)
        return Exchange(peer, spec, self.slice_elements)


class ContributionSender:
    """A worker's side."""

    READS = frozenset({ev.ContributionGathered})

    def __init__(self, peer: int, server: int, shape: ContributionShape):
        self._peer = peer
        self._server = server
        self._shape = shape

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ContributionGathered(rounds, items):
                return [action for round in rounds for action in self._send(round, items)]
        return []

    def _send(self, round: RoundId, items: tuple[tuple[int, int], ...]) -> list[ev.Action]:
        """Nobody asks for it again, so nothing of it is kept."""
        exchange = self._shape.exchange(self._peer, self._server, self._peer, round)
        return [exchange.freeze(items, 0, NO_LOSSES), ev.Forget(round)]


class ContributionCollector:
    """A server's side: contributions that have begun, until all their slices are here."""

    READS = frozenset({ev.ContributionBegins, ev.ContributionVoid, ev.Shard, ev.Summed})

    def __init__(self, peer: int, shape: ContributionShape):
        self._peer = peer
        self._shape = shape
        self._exchanges: dict[RoundId, Exchange] = {}
        self._begun: dict[RoundId, ev.ContributionBegins] = {}

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Received(header, ev.Shard() as body) if body.key.round in self._exchanges:
                return self._on_shard(header.src, body, event.tensor)
            case ev.Summed(key, digest, sq_norm) if key.round in self._exchanges:
                return self._on_summed(key, digest, sq_norm)
            case ev.ContributionBegins(worker, rounds):
                for round in rounds:
                    self._exchanges[round] = self._shape.exchange(self._peer, self._peer, worker, round)
                    self._begun[round] = event
            case ev.ContributionVoid(rounds):
                self._drop(rounds)
        return []

    def _drop(self, rounds: Iterable[RoundId]) -> None:
        for round in rounds:
            self._begun.pop(round, None)
            self._exchanges.pop(round, None)

    def _on_shard(self, src: int, shard: ev.Shard, tensor: object) -> ev.Actions:
        key = shard.key
        exchange, bounds = self._exchanges[key.round], (key.lo, key.hi)
        if src not in exchange.contributor_set or key.src != src or bounds not in exchange.parts:
            return []  # or it is here and added up
        if exchange.parts[bounds]:
            return []
        exchange.parts[bounds][src] = shard
        added = exchange.add_up(bounds)
        store = [ev.StoreTensor(src, shard, tensor)] if tensor is not None else []
        if isinstance(added, str):
            return self._give_up(key.round)
        return [*store, added]

    def _give_up(self, round: RoundId) -> ev.Actions:
        """Give up a contribution: report it as one without gradients, which never counts."""
        begun = self._begun[round]
        return [ev.ContributionReceived(begun.worker, begun.rounds, (), 0.0)]

    def _on_summed(self, key: ev.SliceKey, digest: int, sq_norm: float) -> ev.Actions:
        exchange, begun = self._exchanges[key.round], self._begun[key.round]
        given_out = exchange.give_out(key, digest, sq_norm)
        if given_out is None or not exchange.hold(given_out[1]):
            return []
        exchanges = [self._exchanges[round] for round in begun.rounds]
        if not all(other.complete for other in exchanges):
            return []
        items = {sum.cover[1] for other in exchanges for sum in other.sums.values()}
        if len(items) != 1:
            return self._give_up(key.round)
        self._drop(begun.rounds)
        ((held,),) = items
        sq_norms = [other.result().sq_norm for other in exchanges]
        return [ev.ContributionReceived(begun.worker, begun.rounds, held, math.fsum(sq_norms))]
