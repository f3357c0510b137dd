"""The life of all rounds at one peer.

    a part comes             -> it is kept, or waits until its round is known; once all parts of a slice are here: Sum
    a slice is added up      -> its sum goes to all receivers
    a sum comes              -> it counts if its sender may give it, and its contributions are right
    all sums are here        -> the policy says what to do with the result
    a member asks for it     -> it gets the result, if all of it is here

The engine knows no kind of round. The policy, which is the machine of a sync, says who takes part in a round, when it
is over, and what its result is for.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections.abc import Iterable, Iterator
from dataclasses import replace

from jaxdt.protocol import events as ev
from jaxdt.protocol.ledger import Item
from jaxdt.protocol.round_id import Place, RoundId, RoundKind
from jaxdt.sync.exchange import Bounds, Exchange, RoundSpec, slice_elements

Contribution = tuple[RoundId, tuple[Item, ...], int, ev.Tally]  # its round, items, samples and losses


class RoundPolicy:
    """What a sync says about its rounds, which are of these kinds; it hears of no others. By default a round begins
    where the sync opens it, and parts that come before are of no use."""

    KINDS: frozenset[RoundKind]

    def spec(self, id: RoundId) -> RoundSpec | None:
        """A round that begins with the first part or sum that comes of it."""
        return None

    def is_over(self, id: RoundId) -> bool:
        """Whether parts of a round that is not open are of no use. Else they wait for it."""
        return True

    def whole(self, exchange: Exchange) -> ev.Actions:
        """The whole result of a round is here."""
        raise NotImplementedError

    def wrong(self, exchange: Exchange, problem: str) -> ev.Actions:
        """A slice's contributions are not right, so that this peer cannot continue, and suspects itself (step protocol,
        Sec. 4.3)."""
        return [ev.Send(ev.COORDINATOR, ev.Suspect(exchange.peer, f"{exchange.id}: {problem}"))]


class RoundEngine:
    """The rounds at `peer`, in slices of `slice_bytes`. One attempt of a round is open at a time."""

    MESSAGES = frozenset({ev.Shard, ev.Reduced, ev.FetchResult})
    READS = MESSAGES | {ev.Summed}

    def __init__(self, peer: int, slice_bytes: int, policy: RoundPolicy):
        self._peer = peer
        self._slice_elements = slice_elements(slice_bytes)
        self._policy = policy
        self._open: dict[Place, Exchange] = {}
        self._given_up: dict[RoundId, Exchange] = {}  # of rounds that are not over: one may count after all
        self._early: dict[RoundId, list[tuple[int, ev.Shard]]] = {}

    def __contains__(self, id: RoundId) -> bool:
        """Whether this attempt is open."""
        exchange = self._open.get(id.place)
        return exchange is not None and exchange.id == id

    def __iter__(self) -> Iterator[Exchange]:
        """The open attempts."""
        return iter(tuple(self._open.values()))

    def at(self, id: RoundId) -> Exchange | None:
        """The open attempt of a round."""
        return self._open.get(id.place)

    def was_given_up(self, id: RoundId) -> bool:
        return id in self._given_up

    def handle(self, event: ev.Event) -> ev.Actions:
        if type(event) is ev.Received:
            src, body = event.header.src, event.body
            if type(body) is ev.Shard:
                return self._on_shard(src, body)
            if type(body) is ev.Reduced:
                return self._on_reduced(src, body)
            if type(body) is ev.FetchResult and body.round in self:
                exchange = self._open[body.round.place]
                return list(exchange.given_to(src)) if exchange.complete else []
        elif type(event) is ev.Summed:
            return self._on_summed(event.key, event.digest, event.sq_norm)
        return []

    # ------------------------------------------------------------------------------------- what a policy asks for

    def open(self, spec: RoundSpec) -> Exchange:
        """Begin an attempt, with the parts of it that have come before. Another one of the round is given up."""
        id = spec.id
        if other := self._open.get(id.place):
            self.give_up(other)
        exchange = self._open[id.place] = Exchange(self._peer, spec, self._slice_elements)
        for src, shard in self._early.pop(id, []):
            self._keep(exchange, src, shard)
        return exchange

    def contribute(self, *contributions: Contribution) -> ev.Actions:
        """This peer's contributions to these rounds are final, and their vectors are there. All parts are sent before
        anything is added up, since others wait for them."""
        posts: ev.Actions = []
        sums: ev.Actions = []
        for id, items, n_samples, tally in contributions:
            exchange = self._open[id.place]
            posts.append(exchange.freeze(items, n_samples, tally))
            sums += self._add_up(exchange, exchange.addable)
        return posts + sums

    def fetch(self, spec: RoundSpec, holders: tuple[int, ...]) -> ev.Actions:
        """Others hold the result of an attempt, and nothing is added to it any more."""
        id = spec.id
        is_known = id in self or id in self._given_up
        if not is_known:
            self.open(replace(spec, participants=replace(spec.participants, owners=())))
        elif id not in self:
            self._open[id.place] = self._given_up.pop(id)
        self._open[id.place].hold_by(holders)
        return [*([] if is_known else [ev.Reopen(id)]), ev.Send(holders[0], ev.FetchResult(id))]

    def admit(self, exchange: Exchange, joining: tuple[int, ...]) -> ev.Actions:
        """These members add nothing and get the sums all the same: now those that this peer has given out before."""
        new = sorted(set(joining) - set(exchange.joining) - {self._peer})
        exchange.set_joining(joining)
        return [send for dst in new for send in exchange.given_to(dst, only_own=True)]

    def give_up(self, exchange: Exchange) -> None:
        """Stop work on an attempt. Its slices stay until the round is over: somebody may hold the result."""
        self._given_up[exchange.id] = self._open.pop(exchange.id.place)

    def close(self, id: RoundId) -> list[RoundId]:
        """A round is over. Returns its attempts that were known, for the caller that deletes their vectors."""
        known = [exchange.id for exchange in self._open.values()]
        attempts = sorted({other for other in (*known, *self._given_up, *self._early) if other.place == id.place})
        self._open.pop(id.place, None)
        for other in attempts:
            self._given_up.pop(other, None)
            self._early.pop(other, None)
        return attempts

    def forget(self, id: RoundId) -> ev.Actions:
        """A round is over, and its vectors can go."""
        return [ev.Forget(attempt) for attempt in self.close(id)]

    # ------------------------------------------------------------------------------------------- what comes of a round

    def _find(self, id: RoundId) -> Exchange | None:
        exchange = self._open.get(id.place)
        if exchange is None and id.kind in self._policy.KINDS and (spec := self._policy.spec(id)):
            exchange = self.open(spec)
        return exchange if exchange and exchange.id == id else None

    def _on_shard(self, src: int, shard: ev.Shard) -> ev.Actions:
        exchange = self._find(shard.key.round)
        if exchange is None:
            return self._keep_early(src, shard)
        bounds = self._keep(exchange, src, shard)
        return self._add_up(exchange, [bounds]) if bounds else []

    def _keep_early(self, src: int, shard: ev.Shard) -> ev.Actions:
        id = shard.key.round
        if id in self._given_up or id.kind not in self._policy.KINDS:
            return []
        if self._policy.is_over(id):
            return [ev.Forget(id)]
        self._early.setdefault(id, []).append((src, shard))
        return []

    def _keep(self, exchange: Exchange, src: int, shard: ev.Shard) -> Bounds | None:
        """A part of a slice that this peer adds up; its bounds if all parts are here now."""
        key = shard.key
        bounds = (key.lo, key.hi)
        parts = exchange.parts.get(bounds)
        if parts is None or src in parts or key.src != src or src not in exchange.contributor_set:
            return None
        parts[src] = shard
        return bounds if exchange.has_all_parts(bounds) else None

    def _add_up(self, exchange: Exchange, slices: Iterable[Bounds]) -> ev.Actions:
        actions: ev.Actions = []
        for bounds in slices:
            sum = exchange.add_up(bounds)
            actions += self._policy.wrong(exchange, sum) if isinstance(sum, str) else [sum]
        return actions

    def _on_summed(self, key: ev.SliceKey, digest: int, sq_norm: float) -> ev.Actions:
        given_out = self._open[key.round.place].give_out(key, digest, sq_norm) if key.round in self else None
        if given_out is None:
            return []  # of an attempt that was given up, or is over
        exchange, (post, sum) = self._open[key.round.place], given_out
        is_known = (key.lo, key.hi) in exchange.sums  # a holder has given it meanwhile
        return [*([post] if post.letters else []), *([] if is_known else self._hold(exchange, sum))]

    def _on_reduced(self, src: int, sum: ev.Reduced) -> ev.Actions:
        exchange, bounds = self._find(sum.key.round), (sum.key.lo, sum.key.hi)
        if exchange is None or bounds in exchange.sums or not exchange.gives(src, bounds):
            return []
        problem = exchange.problem(sum.cover)
        return self._policy.wrong(exchange, problem) if problem else self._hold(exchange, sum)

    def _hold(self, exchange: Exchange, sum: ev.Reduced) -> ev.Actions:
        return self._policy.whole(exchange) if exchange.hold(sum) else []
