"""Sharded all-reduce: each member of a group owns one shard of the gradient vector, as a colocated sharded parameter
server (DT-FM Eq. 2 is its cost).
Every member sends each other owner its part of that owner's shard, slice by slice; an owner adds a slice up as soon as
all members' parts are here, in the order of the members, and sends the sum to all. So halves of the exchange overlap,
and every member ends with the same bits. Vectors hold sums over samples: dividing once, by the samples in the
record, weighs peers with unequal shares of the microbatches rightly. The exchange never writes into the accumulator.
A result is a value: when members are lost, the view names the rounds whose result somebody holds, and who lacks it
takes it. Other groups that changed begin a new round, when the wiring has had the lost microbatches done again.
Who joins gets the state of its stage (jaxdt.sync.handover) and the step's result, and adds nothing: the commit waits.
A peer may be in two groups: the replicas of its stage, and, with a tied head, the holders of the token table on the
first and last stage, whose two gradients are summed here and counted once in the norm.
"""

from collections.abc import Iterable

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
    Forget,
    Free,
    Joined,
    LinkChanged,
    Message,
    Outside,
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
    Take,
    Tally,
    Updated,
    View,
    ViewChanged,
    Work,
)
from jaxdt.core.ledger import NO_LOSSES, Ledger
from jaxdt.core.sizes import Group
from jaxdt.sync.exchange import Bounds, Cover, Exchange, round_of, total, update_scale

FLOAT_BYTES = 4


class AllReduce:
    """One peer's side of it: rounds, `prepared`, and the update when the record is committed."""

    READS = frozenset(
        {ViewChanged, Outside, Restored, Accumulated, Evaluated, Drained, Ran, Shard, Summed, Reduced, Take, Committed}
        | {Joined, LinkChanged}
    )

    def __init__(
        self, peer: int, stage: int, groups: tuple[Group, ...], n_microbatches: int, slice_bytes: int, clip_norm: float
    ):
        self._peer, self._stage, self._groups = peer, stage, groups
        self._n_microbatches, self._clip_norm = n_microbatches, clip_norm
        self._slice_elements = max(1, slice_bytes // FLOAT_BYTES)
        self._ledger = Ledger()
        self._view: View | None = None
        self._exchanges: dict[tuple[int, str], Exchange] = {}
        self._version = 0
        self._updating = self._joining = False
        self._drained = -1
        self._n_gathers = 0

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        if type(event) is Received:
            return self._received(event.header.src, event.body) if self._view else []
        match event:
            case ViewChanged(view):
                return self._adopt(view)
            case Outside(view):
                return self._leave(view)
            case Joined(version):
                self._joining = False
                return self._say_prepared(version)
            case LinkChanged(peer, up) if peer == COORDINATOR and up and self._view:
                return self._say_prepared(self._version)
            case Restored(version):
                return [Updated(self._stage, version)]
            case Accumulated(step, stage, microbatch, n_samples, loss_sum):
                self._ledger.add(step, (stage, microbatch), n_samples)
                if loss_sum is not None:
                    self._ledger.measured(step, Tally(loss_sum, n_samples))
            case Evaluated(step, n_samples, loss_sum):
                self._ledger.measured(step, Tally(0.0, 0, loss_sum, n_samples))
            case Drained(step):
                return self._gather(step)
            case Ran(Work(kind="G") as work):
                return self._on_gathered(work.step)
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
            case Take(round):
                return self._on_take(src, round)
            case Committed(record):
                return self._on_committed(record)
        return []

    # --------------------------------------------------------------------------------------------------------- views

    def _adopt(self, view: View) -> list[Action | Event]:
        if view.rolled_back:
            return self._go_back(view)
        if self._view is None:
            return self._enter(view)
        # What is committed is applied before anything is given up because of the view (step protocol, Sec. 5.3).
        told = [action for record in view.records for action in self._on_committed(record)]
        self._view, self._drained = view, -1
        held = {round.group: (round, holders) for round, holders in view.results}
        for step, name in list(self._exchanges):
            if step >= view.n_committed:
                told += self._renew(step, name, held.get(name) if step == view.n_committed else None)
        told += self._take_held(view)
        return told + self._say_prepared(view.n_committed)

    def _enter(self, view: View) -> list[Action | Event]:
        """The first view of ours: with the run's first we begin, in any other we join."""
        self._view, self._version, self._drained = view, view.n_committed, -1
        self._joining = self._peer in view.joining
        return self._take_held(view)

    def _leave(self, view: View) -> list[Action | Event]:
        """The run goes on without us: apply what is committed, give up the rest."""
        told = [action for record in view.records for action in self._on_committed(record)] if self._view else []
        steps = range(self._version + self._updating, self._version + 2)
        self._view, self._drained = None, -1
        self._ledger.free(steps)
        self._exchanges = {at: exchange for at, exchange in self._exchanges.items() if at[0] not in steps}
        return told if self._updating else [*told, Free(steps[-1])]

    def _take_held(self, view: View) -> list[Action]:
        mine = {group.name: group for group in self._groups}
        held = [(mine[round.group], (round, holders)) for round, holders in view.results if round.group in mine]
        return [send for group, result in held for send in self._take(view.n_committed, group, result)]

    def _go_back(self, view: View) -> list[Action]:
        """A new lineage voids everything that is under way, and begins with the checkpoint's state."""
        highest = self._version + 1
        lost = range(view.n_committed, highest + 1)
        self._view, self._version, self._drained = view, view.n_committed, -1
        self._joining = False
        self._ledger.free(lost)
        self._exchanges.clear()
        return [Free(highest), Restore(view.n_committed, view.lineage)]

    def _renew(self, step: int, name: str, held: tuple[Round, tuple[int, ...]] | None) -> list[Action]:
        """Give up an exchange whose round is void in the view; the next look makes a new one."""
        exchange = self._exchanges[step, name]
        good = held[0] if held else round_of(exchange.group, self._view, step)
        if exchange.round == good:
            return self._catch_up(exchange)
        del self._exchanges[step, name]
        return [Forget(exchange.round)]

    def _catch_up(self, exchange: Exchange) -> list[Action]:
        """Who joins gets what was summed for the step before its view was here."""
        now = Exchange(exchange.group, self._view, exchange.round.step, self._slice_elements)
        new, exchange.joining = set(now.joining) - set(exchange.joining), now.joining
        mine = [bounds for bounds in exchange.slices(self._peer) if bounds in exchange.sums]
        return [send for peer in sorted(new - {self._peer}) for send in self._send_sums(peer, exchange, mine)]

    def _take(self, step: int, group: Group, held: tuple[Round, tuple[int, ...]]) -> list[Action]:
        """Ask for the result that others hold, unless we hold it too."""
        exchange = self._exchanges.get((step, group.name))
        if exchange and exchange.complete:
            return []
        self._exchanges[step, group.name] = Exchange(group, self._view, step, self._slice_elements, held)
        return [Send(held[1][0], Take(held[0]))]

    def _on_take(self, src: int, round: Round) -> list[Action]:
        exchange = self._exchanges.get((round.step, round.group))
        if exchange is None or exchange.round != round or not exchange.complete:
            return []
        return self._send_sums(src, exchange, sorted(exchange.sums))

    def _send_sums(self, dst: int, exchange: Exchange, slices: Iterable[Bounds]) -> list[Action]:
        bodies = [exchange.reduced(bounds) for bounds in slices]
        return [Send(dst, body, FLOAT_BYTES * (body.key.hi - body.key.lo), BULK) for body in bodies]

    def _exchange(self, step: int, group: Group) -> Exchange:
        at = (step, group.name)
        if at not in self._exchanges:
            self._exchanges[at] = Exchange(group, self._view, step, self._slice_elements)
        return self._exchanges[at]

    def _find(self, key: SliceKey) -> Exchange | None:
        """The exchange that a message belongs to; None for a round that is over or not one of ours."""
        theirs = key.round
        step, name = theirs.step, theirs.group
        exchange = self._exchanges.get((step, name))
        if exchange is None:
            group = next((group for group in self._groups if group.name == name), None)
            if group is None or not self._version <= step <= self._version + 1:
                return None
            exchange = self._exchange(step, group)
        mine = exchange.round  # of the same step and group, by the look-up
        if mine.group_view != theirs.group_view or mine.attempt != theirs.attempt:
            return None
        return exchange if (key.lo, key.hi) in exchange.owner_of or exchange.holders else None

    # ---------------------------------------------------------------------------------------------------- exchange

    def _gather(self, step: int) -> list[Action]:
        """Nothing more will be added: lay the gradient out for the exchange, unless it was sent already."""
        if step < self._version:
            return []  # somebody's word on a step that is over here
        self._drained = step
        if all(self._exchange(step, group).frozen for group in self._groups):
            return []
        self._n_gathers += 1
        return [Run(Work(self._stage, GATHER, None, self._peer, step))]

    def _on_gathered(self, step: int) -> list[Action]:
        """A view in between may have asked for another gathering, with what was done again in it: the last counts."""
        self._n_gathers -= 1
        if self._n_gathers or self._drained != step:
            return []
        exchanges = [e for group in self._groups if not (e := self._exchange(step, group)).frozen]
        sends = [send for exchange in exchanges for send in self._freeze(exchange)]
        return sends + [a for exchange in exchanges for a in self._offer(exchange)]

    def _freeze(self, exchange: Exchange) -> list[Action]:
        """Our set is final and our vector is there: keep our own shard, send every other owner its slices."""
        exchange.frozen = True
        step = exchange.round.step
        own_stage = exchange.group.stages == (self._stage,)  # losses are counted in one group only
        tally = self._ledger.tally(step) if own_stage else NO_LOSSES
        part = (self._ledger.items(step), self._ledger.n_samples(step), tally)
        for bounds in exchange.slices(self._peer):
            exchange.parts.setdefault(bounds, {})[self._peer] = part
        round, me = exchange.round, self._peer
        return [
            Send(owner, Shard(SliceKey(round, lo, hi, me), *part), FLOAT_BYTES * (hi - lo), BULK)
            for (lo, hi), owner in exchange.in_turn
            if owner != me
        ]

    def _offer(self, exchange: Exchange) -> list[Action]:
        """Add up what is complete in our own shard, once all groups' shards are on their way: others wait for those."""
        return [a for bounds in exchange.slices(self._peer) for a in self._try_sum(exchange, bounds)]

    def _on_shard(self, src: int, shard: Shard) -> list[Action]:
        exchange = self._find(shard.key)
        bounds = (shard.key.lo, shard.key.hi)
        if exchange is None or exchange.owner_of.get(bounds) != self._peer or src not in exchange.member_set:
            return []
        parts = exchange.parts.setdefault(bounds, {})
        parts[src] = (shard.items, shard.n_samples, shard.tally)
        return self._try_sum(exchange, bounds) if len(parts) == len(exchange.members) else []

    def _try_sum(self, exchange: Exchange, bounds: Bounds) -> list[Action]:
        parts = exchange.parts.get(bounds, {})
        if len(parts) < len(exchange.members):
            return []
        in_order = [parts[src] for src in exchange.members]
        cover = (exchange.members, tuple([items for items, _, _ in in_order]))
        problem = self._problem(exchange, cover)
        if not problem:
            n_samples = sum(n for _, n, _ in in_order) // len(exchange.group.stages)
            exchange.covers[bounds] = (cover, n_samples, total(tally for _, _, tally in in_order))
        return problem or [Sum(exchange.key(bounds), exchange.members)]

    def _on_summed(self, key: SliceKey, digest: int, sq_norm: float) -> list[Action]:
        exchange = self._find(key)
        bounds = (key.lo, key.hi)
        if exchange is None or bounds not in exchange.covers:
            return []  # of a round that is void by now
        del exchange.parts[bounds]
        cover, n_samples, tally = exchange.covers.pop(bounds)
        body, n_bytes = Reduced(key, cover, n_samples, digest, sq_norm, tally), FLOAT_BYTES * (key.hi - key.lo)
        sends = [Send(member, body, n_bytes, BULK) for member in exchange.receivers if member != self._peer]
        return sends + self._hold(exchange, body)

    def _on_reduced(self, src: int, reduced: Reduced) -> list[Action]:
        exchange = self._find(reduced.key)
        bounds = (reduced.key.lo, reduced.key.hi)
        if exchange is None or not exchange.gives(src, bounds) or bounds in exchange.sums:
            return []
        return self._problem(exchange, reduced.cover) or self._hold(exchange, reduced)

    def _problem(self, exchange: Exchange, cover: Cover) -> list[Action]:
        """A sum is accepted only with an exact cover (step protocol, Sec. 4.3). All slices of a round have one."""
        problem = exchange.problem(cover, self._n_microbatches)
        return [Send(COORDINATOR, Suspect(self._peer, f"{exchange.round}: {problem}"))] if problem else []

    def _hold(self, exchange: Exchange, sum: Reduced) -> list[Action]:
        exchange.hold(sum)
        return self._say_prepared(exchange.round.step) if exchange.complete else []

    def _say_prepared(self, step: int) -> list[Action]:
        """Once the results of all groups are here; again in every view."""
        mine = [self._exchanges.get((step, group.name)) for group in self._groups]
        if self._joining or not all(exchange and exchange.complete for exchange in mine):
            return []
        admission = next(member.admission for member in self._view.members if member.peer == self._peer)
        return [Send(COORDINATOR, Prepared(step, admission, tuple(exchange.result() for exchange in mine)))]

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
        rounds = tuple(exchange.round for exchange in mine)
        work = Work(self._stage, UPDATE, None, self._peer, record.step)
        return [Run(work, update_scale(record, self._clip_norm), rounds)]

    def _advance(self, step: int) -> list[Action | Event]:
        self._updating = False
        if step != self._version:
            return [Free(step)]  # we were outside meanwhile, and join at a later version
        self._version = step + 1
        self._ledger.free([step])
        for group in self._groups:
            self._exchanges.pop((step, group.name), None)
        return [Free(step), Updated(self._stage, self._version)]
