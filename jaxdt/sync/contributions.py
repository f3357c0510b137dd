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
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.codec import CodecSpec
from jaxdt.sync.engine import RoundEngine, RoundPolicy
from jaxdt.sync.exchange import Exchange, RoundSpec, slice_elements


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
    """Numbers of each sync group of a stage, by its `stage`; bytes of a slice; how its numbers travel."""

    sizes: Mapping[int, int]
    slice_bytes: int
    codec: CodecSpec

    def spec(self, server: int, worker: int, round: RoundId) -> RoundSpec:
        participants = Participants(contributors=(worker,), owners=(server,), receivers=())
        n_elements = self.sizes[round.stage]
        return RoundSpec(round, n_elements, participants, _FromOne(worker), codec=self.codec)


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
        """It is sent once, so nothing of it is kept."""
        spec = self._shape.spec(self._server, self._peer, round)
        exchange = Exchange(self._peer, spec, slice_elements(self._shape.slice_bytes))
        return [exchange.freeze(items, 0, NO_LOSSES), ev.Forget(round)]


class ContributionCollector(RoundPolicy):
    """A server's side: contributions that have begun, until all their slices are here."""

    KINDS = frozenset({RoundKind.CONTRIBUTION})
    READS = frozenset({ev.ContributionBegins, ev.ContributionVoid, ev.Shard, ev.Summed})

    def __init__(self, peer: int, shape: ContributionShape):
        self._peer = peer
        self._shape = shape
        self._engine = RoundEngine(peer, shape.slice_bytes, self)
        self._begun: dict[RoundId, ev.ContributionBegins] = {}

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.Received(header, ev.Shard() as body, tensor) if body.key.round in self._engine:
                actions = self._engine.handle(event)
                is_kept = any(isinstance(action, ev.Sum) for action in actions)
                # Workers are no members, so nothing else has kept what they send.
                return (
                    [ev.StoreTensor(header.src, body, tensor), *actions] if is_kept and tensor is not None else actions
                )
            case ev.Summed():
                return self._engine.handle(event)
            case ev.ContributionBegins(worker, rounds):
                for round in rounds:
                    self._engine.open(self._shape.spec(self._peer, worker, round))
                    self._begun[round] = event
            case ev.ContributionVoid(rounds):
                self._close(rounds)
        return []

    def whole(self, exchange: Exchange) -> ev.Actions:
        begun = self._begun[exchange.id]
        exchanges = [one for one in self._engine if one.id in begun.rounds and one.complete]
        if len(exchanges) < len(begun.rounds):
            return []
        items = {sum.cover[1] for other in exchanges for sum in other.sums.values()}
        if len(items) != 1:
            return self.wrong(exchange, "its parts hold different things")
        self._close(begun.rounds)
        ((held,),) = items
        sq_norms = [other.result().sq_norm for other in exchanges]
        return [ev.ContributionReceived(begun.worker, begun.rounds, held, math.fsum(sq_norms))]

    def wrong(self, exchange: Exchange, problem: str) -> ev.Actions:
        """Give up a contribution: report it as one without gradients, which never counts."""
        begun = self._begun[exchange.id]
        return [ev.ContributionReceived(begun.worker, begun.rounds, (), 0.0)]

    def _close(self, rounds: Iterable[RoundId]) -> None:
        for round in rounds:
            self._begun.pop(round, None)
            if round in self._engine:  # and not a later contribution of the worker to the same step
                self._engine.close(round)
