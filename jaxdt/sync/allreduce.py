"""Sharded all-reduce: each member of a group owns one shard of the gradient vector, as a colocated sharded parameter
server (DT-FM Eq. 2 is its cost).
Every member sends each other owner its part of that owner's shard, slice by slice; an owner adds a slice up as soon as
all members' parts are here, in the order of the members, and sends the sum to all. So halves of the exchange overlap,
and every member ends with the same bits. Vectors hold sums over samples: dividing once, by the samples in the
record, weighs peers with unequal shares of the microbatches rightly. The exchange never writes into the accumulator.
A result is a value: when members are lost, the view names the rounds whose result somebody holds, and who lacks it
takes it. Other groups that changed begin a new round, when the wiring has had the lost microbatches done again.
Who joins gets the state of its stage (jaxdt.sync.state_transfer) and the step's result, and adds nothing: the commit
waits. A peer may be in two groups: the replicas of its stage, and, with a tied head, the holders of the token table on
the first and last stage, whose two gradients are summed here and counted once in the norm.
"""

from collections import Counter

from jaxdt.protocol.events import (
    BULK,
    COORDINATOR,
    Accumulated,
    Action,
    Committed,
    Drained,
    Evaluated,
    Event,
    Evicted,
    FetchResult,
    Free,
    Joined,
    LinkChanged,
    Message,
    Post,
    Prepared,
    Ran,
    Received,
    Record,
    Reduced,
    Restore,
    Restored,
    Run,
    Send,
    Shard,
    SliceKey,
    Sum,
    Summed,
    Suspect,
    Tally,
    Updated,
    View,
    ViewChanged,
)
from jaxdt.protocol.ledger import NO_LOSSES, Ledger
from jaxdt.spec.delay import Delay
from jaxdt.spec.sizes import Group
from jaxdt.spec.work import GATHER, UPDATE, Work
from jaxdt.sync.exchange import Bounds, Exchange, total, update_scale
from jaxdt.sync.rounds import FLOAT_BYTES, Rounds


class AllReduce:
    """One peer's side of it: rounds, `prepared`, and the update when the record is committed."""

    READS = frozenset(
        {
            ViewChanged,
            Evicted,
            Restored,
            Accumulated,
            Evaluated,
            Drained,
            Ran,
            Shard,
            Summed,
            Reduced,
            FetchResult,
            Committed,
        }
        | {Joined, LinkChanged}
    )

    def __init__(
        self,
        peer: int,
        stage: int,
        groups: tuple[Group, ...],
        n_microbatches: int,
        slice_bytes: int,
        clip_norm: float,
        delay: Delay,
    ):
        self._peer, self._stage = peer, stage
        self._n_microbatches, self._clip_norm, self._delay = n_microbatches, clip_norm, delay
        self._rounds = Rounds(peer, groups, slice_bytes)
        self._ledger = Ledger()
        self._view: View | None = None
        self._updated_to(0)
        self._joining = False
        self._updating: Record | None = None
        self._next_record: Record | None = None  # with a delay it may come before we are ready for it
        self._rollback: View | None = None  # which waits for the update that runs
        self._drained: set[int] = set()
        self._n_gathers: Counter[int] = Counter()

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:  # the frequent ones first
            case Received():
                return self._received(event.header.src, event.body) if self._view else []
            case Accumulated():
                self._ledger.add(event.step, (event.stage, event.microbatch), event.n_samples)
                if event.loss_sum is not None:
                    self._ledger.measured(event.step, Tally(event.loss_sum, event.n_samples))
            case Ran():
                return self._ran(event.work)
            case Summed(key, digest, sq_norm):
                return self._on_summed(key, digest, sq_norm)
            case Evaluated(step, n_samples, loss_sum):
                self._ledger.measured(step, Tally(0.0, 0, loss_sum, n_samples))
            case Drained(step):
                return self._gather(step)
            case ViewChanged(view):
                return self._adopt(view)
            case Evicted(view):
                return self._leave(view)
            case Joined():
                self._joining = False
                return self._say_prepared_again()
            case LinkChanged(peer, up) if peer == COORDINATOR and up and self._view:
                return self._say_prepared_again()
            case Restored(version):
                return [Updated(self._stage, version)]
        return []

    def _received(self, src: int, body: Message) -> list[Action | Event]:
        match body:
            case Shard():
                return self._on_shard(src, body)
            case Reduced():
                return self._on_reduced(src, body)
            case FetchResult(round):
                return self._rounds.give(src, round)
            case Committed(record):
                return self._on_committed(record)
        return []

    def _ran(self, work: Work) -> list[Action | Event]:
        if work.kind == GATHER:
            return self._on_gathered(work.step)
        return self._advance(work.step) if work.kind == UPDATE else []

    # --------------------------------------------------------------------------------------------------------- views

    def _adopt(self, view: View) -> list[Action | Event]:
        if view.rolled_back:
            self._rollback = view
            return [] if self._updating else self._go_back()
        if self._view is None:
            return self._enter(view)
        # What is committed is applied before anything is given up because of the view (step protocol, Sec. 5.3).
        told = [action for record in view.records for action in self._on_committed(record)]
        self._view = view
        self._drained.clear()
        return told + self._rounds.adopt(view) + self._say_prepared_again()

    def _enter(self, view: View) -> list[Action | Event]:
        """The first view of ours: with the run's first we begin, in any other we join."""
        self._view = view
        self._updated_to(view.n_committed)
        self._drained.clear()
        self._joining = self._peer in view.joining
        begins = [] if self._joining else [Updated(self._stage, self._version)]
        return [*self._rounds.enter(view), *begins]

    def _leave(self, view: View) -> list[Action | Event]:
        """The run goes on without us: apply what is committed, give up the rest."""
        told = [action for record in view.records for action in self._on_committed(record)] if self._view else []
        steps = self._steps[1 if self._updating else 0 :]
        self._view = self._next_record = self._rollback = None
        self._drained.clear()
        self._ledger.free(steps)
        self._rounds.drop(steps)
        return told if self._updating else [*told, Free(steps[-1])]

    def _updated_to(self, version: int) -> None:
        """The steps of which something may be here are as many as may be under way at once, and as many again, since
        others may have applied the updates of all of those already."""
        self._version, self._steps = version, range(version, version + 2 * (1 + self._delay.steps))

    def _go_back(self) -> list[Action]:
        """A new generation voids everything that is under way, and begins with the checkpoint's state."""
        steps, view, self._rollback = self._steps, self._rollback, None
        self._view, self._next_record = view, None
        self._updated_to(view.n_committed)
        self._drained.clear()
        self._joining = False
        self._ledger.free(steps)
        self._rounds.drop(steps)
        self._rounds.enter(view)
        return [Free(steps[-1]), Restore(view.n_committed, view.generation)]

    # ---------------------------------------------------------------------------------------------------- exchange

    def _gather(self, step: int) -> list[Action]:
        """Nothing more will be added: lay the gradient out for the exchange, unless it was sent already."""
        if step < self._version:
            return []  # somebody's word on a step that is over here
        self._drained.add(step)
        if all(exchange.frozen for exchange in self._rounds.of(step)):
            return []
        self._n_gathers[step] += 1
        return [Run(Work(self._stage, GATHER, None, self._peer, step))]

    def _on_gathered(self, step: int) -> list[Action]:
        """A view in between may have asked for another gathering, with what was done again in it: the last counts."""
        self._n_gathers[step] -= 1
        if self._n_gathers[step]:
            return []
        del self._n_gathers[step]
        if step not in self._drained:
            return []
        exchanges = [exchange for exchange in self._rounds.of(step) if not exchange.frozen]
        sends = [send for exchange in exchanges for send in self._freeze(exchange)]
        return sends + [a for exchange in exchanges for a in self._offer(exchange)]

    def _freeze(self, exchange: Exchange) -> list[Action]:
        """Our set is final and our vector is there: keep our own shard, send every other owner its slices."""
        exchange.frozen = True
        round, me = exchange.round, self._peer
        own_stage = exchange.group.stages == (self._stage,)  # losses are counted in one group only
        tally = self._ledger.tally(round.step) if own_stage else NO_LOSSES
        part = (self._ledger.items(round.step), self._ledger.n_samples(round.step), tally)
        for (lo, hi), parts in exchange.parts.items():
            parts[me] = Shard(SliceKey(round, lo, hi, me), *part)
        letters = [
            (owner, Shard(SliceKey(round, lo, hi, me), *part), FLOAT_BYTES * (hi - lo))
            for (lo, hi), owner in exchange.in_turn
            if owner != me
        ]
        return [Post(tuple(letters), BULK)]

    def _offer(self, exchange: Exchange) -> list[Action]:
        """Add up what is complete in our own shard, once all groups' shards are on their way: others wait for those."""
        complete = [bounds for bounds, parts in exchange.parts.items() if len(parts) == len(exchange.members)]
        return [self._sum(exchange, bounds) for bounds in complete]

    def _on_shard(self, src: int, shard: Shard) -> list[Action]:
        exchange, bounds = self._rounds.find(shard.key.round, self._steps), (shard.key.lo, shard.key.hi)
        if exchange is None or bounds not in exchange.parts or src not in exchange.member_set:
            return []
        parts = exchange.parts[bounds]
        parts[src] = shard
        return [self._sum(exchange, bounds)] if len(parts) == len(exchange.members) else []

    def _sum(self, exchange: Exchange, bounds: Bounds) -> Action:
        parts = exchange.parts[bounds]
        shards = [parts[src] for src in exchange.members]
        cover = (exchange.members, tuple([shard.items for shard in shards]))
        if problem := exchange.problem(cover, self._n_microbatches):
            return self._suspect(exchange, problem)
        n_samples = sum([shard.n_samples for shard in shards]) // len(exchange.group.stages)
        exchange.covers[bounds] = (cover, n_samples, total([shard.tally for shard in shards]))
        return Sum(exchange.key(bounds), exchange.members)

    def _on_summed(self, key: SliceKey, digest: int, sq_norm: float) -> list[Action]:
        exchange = self._rounds.find(key.round, self._steps)
        bounds = (key.lo, key.hi)
        if exchange is None or bounds not in exchange.covers:
            return []  # of a round that is void by now
        del exchange.parts[bounds]
        cover, n_samples, tally = exchange.covers.pop(bounds)
        body, n_bytes = Reduced(key, cover, n_samples, digest, sq_norm, tally), FLOAT_BYTES * (key.hi - key.lo)
        letters = [(member, body, n_bytes) for member in exchange.receivers]
        return [Post(tuple(letters), BULK), *self._hold(exchange, body)]

    def _on_reduced(self, src: int, reduced: Reduced) -> list[Action]:
        exchange, bounds = self._rounds.find(reduced.key.round, self._steps), (reduced.key.lo, reduced.key.hi)
        if exchange is None or bounds in exchange.sums or not exchange.gives(src, bounds):
            return []
        problem = exchange.problem(reduced.cover, self._n_microbatches)
        return [self._suspect(exchange, problem)] if problem else self._hold(exchange, reduced)

    def _suspect(self, exchange: Exchange, problem: str) -> Action:
        """A sum is accepted only with an exact cover (step protocol, Sec. 4.3)."""
        return Send(COORDINATOR, Suspect(self._peer, f"{exchange.round}: {problem}"))

    def _hold(self, exchange: Exchange, sum: Reduced) -> list[Action]:
        return self._say_prepared(exchange.round.step) if exchange.hold(sum) else []

    def _say_prepared_again(self) -> list[Action]:
        """Of all steps under way."""
        return [send for step in self._delay.open(self._version) for send in self._say_prepared(step)]

    def _say_prepared(self, step: int) -> list[Action]:
        """Once the results of all groups are here; again in every view."""
        mine = self._rounds.known(step)
        if self._joining or mine is None or not all(exchange.complete for exchange in mine):
            return []
        admission = self._view.by_peer[self._peer].admission
        return [Send(COORDINATOR, Prepared(step, admission, tuple([exchange.result() for exchange in mine])))]

    # ------------------------------------------------------------------------------------------------------ commit

    def _on_committed(self, record: Record) -> list[Action | Event]:
        if record.step == self._version + 1:
            self._next_record = record
        if record.step != self._version or self._updating or self._joining:
            return []
        mine = self._rounds.of(record.step)
        if not all(exchange.complete and exchange.round in record.rounds for exchange in mine):
            problem = f"the record of step {record.step} names a round that it is not prepared for"
            return [Send(COORDINATOR, Suspect(self._peer, problem))]
        self._updating = record
        skips = record.verdict == "skip"
        rounds = () if skips else tuple(exchange.round for exchange in mine)
        work = Work(self._stage, UPDATE, None, self._peer, record.step)
        return [Run(work, 0.0 if skips else update_scale(record, self._clip_norm), rounds)]

    def _advance(self, step: int) -> list[Action | Event]:
        done, self._updating = self._updating, None
        if self._rollback:
            return self._go_back()
        if self._view and (done.generation, step) != (self._view.generation, self._version):
            return [Free(step)]  # we were outside meanwhile, and join at a later version
        self._updated_to(step + 1)
        self._ledger.free([step])
        self._rounds.drop([step])
        if self._view is None:  # since then: what was under way beside it is void
            return [Free(self._steps[-1]), Updated(self._stage, self._version)]
        record, self._next_record = self._next_record, None
        more = self._on_committed(record) if record else []
        return [Free(step), Updated(self._stage, self._version), *more]
