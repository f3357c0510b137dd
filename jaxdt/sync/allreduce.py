"""Sharded all-reduce: each member of a group owns one shard of the gradient vector, as a colocated sharded parameter
server (DT-FM Eq. 2 is its cost).

Every member sends each other owner its part of that owner's shard, slice by slice. An owner adds a slice up as soon as
all members' parts are here, in the order of the members, and sends the sum to all. So the halves of the exchange
overlap, and every member ends with the same bits. Vectors hold sums over samples: dividing once, by the samples in the
record, weighs peers with unequal shares of the microbatches rightly. The exchange never writes into the accumulator.

A result is a value. When members are lost, the view names the rounds whose result somebody holds, and a member that
lacks it fetches it. Other groups that changed begin a new round, once the wiring has had the lost microbatches done
again. A member that joins gets the state of its stage (jaxdt.sync.state_transfer) and the step's result, and adds
nothing: the commit waits for it.

A peer may be in two groups: the replicas of its stage, and, with a tied head, the holders of the token table on the
first and last stage, whose two gradients are summed here and counted once in the norm.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections import Counter

from jaxdt.membership.agreement import Agreement
from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.membership.held_out_rows import HeldOutRows
from jaxdt.protocol import events as ev
from jaxdt.protocol.ledger import NO_LOSSES, Ledger
from jaxdt.protocol.round_id import RoundId
from jaxdt.run.config import RunConfig
from jaxdt.run.delay import Delay
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import sync_groups
from jaxdt.run.work import GATHER, UPDATE, Work
from jaxdt.sync.base import SyncEntry
from jaxdt.sync.exchange import Bounds, Exchange, update_scale
from jaxdt.sync.own_state import OwnState
from jaxdt.sync.rounds import Rounds


class AllReduce:
    """One peer's side: its rounds, `Prepared`, and the update once the record is committed."""

    READS = frozenset(
        {
            ev.ViewChanged,
            ev.Evicted,
            ev.Restored,
            ev.Accumulated,
            ev.Evaluated,
            ev.Drained,
            ev.Ran,
            ev.Shard,
            ev.Summed,
            ev.Reduced,
            ev.FetchResult,
        }
        | {ev.Committed, ev.Joined, ev.LinkChanged, ev.Digested, ev.Repair, ev.WorkOverdue, ev.Updated}
    )

    def __init__(
        self, peer: int, stage: int, rounds: Rounds, clip_norm: float, delay: Delay, check_every_steps: int = 0
    ):
        self._peer = peer
        self._own_state = OwnState(stage, check_every_steps)
        self._stage = stage
        self._clip_norm = clip_norm
        self._delay = delay
        self._rounds = rounds
        self._ledger = Ledger()
        self._view: ev.View | None = None
        self._set_version(0)
        self._generation = 0
        self._state: ev.StateName | None = None  # None before the first update, and while it is fetched or restored
        self._is_joining = False
        self._updating: ev.Record | None = None
        self._next_record: ev.Record | None = None  # with a delay it may come before this peer is ready for it
        self._rollback: ev.View | None = None  # which waits for the update that runs
        self._abandoned: tuple[RoundId, ...] = ()  # which were under way beside an update when this peer was evicted
        self._drained: set[int] = set()
        self._n_gathers: Counter[int] = Counter()
        self._held_out = ev.HeldOutMeasured(0, ())  # the last version's held-out losses that were measured here

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:  # the frequent ones first
            case ev.Received():
                return self._received(event.header.src, event.body) if self._view else []
            case ev.Accumulated():
                self._ledger.add(event.step, (event.stage, event.microbatch), event.n_samples)
                if event.loss_sum is not None:
                    self._ledger.measured(event.step, ev.Tally(event.loss_sum, event.n_samples))
            case ev.Ran():
                return self._ran(event.work)
            case ev.Updated():
                return self._update_again()
            case ev.Summed(key, digest, sq_norm):
                return self._on_summed(key, digest, sq_norm)
            case ev.Evaluated():
                return self._evaluated(event)
            case ev.Drained(step):
                return self._gather(step)
            case ev.ViewChanged(view):
                return self._adopt(view)
            case ev.Evicted(view):
                return self._leave(view)
            case ev.Joined():
                self._is_joining = False
                self._state = self._entered_state()
                return [*self._prepared_again(), ev.Holds(self._state)]
            case ev.LinkChanged(peer, up) if peer == ev.COORDINATOR and up and self._view:
                return self._prepared_again()
            case ev.Restored(version) if version == self._version:  # else another rollback is on its way
                self._state = self._state or ev.StateName(self._generation, version)
                return [ev.Updated(self._stage, version), *([] if self._view else [ev.Holds(self._state)])]
            case ev.WorkOverdue() if self._n_gathers or self._own_state.is_awaited:
                return [ev.StepBlocked()]  # others wait for this peer's part of the gradient, or for its vote
            case ev.Digested():
                self._own_state.arrived(event)
                return self._prepared(self._version) if self._view else []
        return []

    def _received(self, src: int, body: ev.Message) -> ev.Actions:
        match body:
            case ev.Shard():
                return self._on_shard(src, body)
            case ev.Reduced():
                return self._on_reduced(src, body)
            case ev.FetchResult(round):
                return [*self._rounds.give(src, round)]
            case ev.Committed(record):
                return self._on_committed(record)
            case ev.Repair():
                return self._repair(body)
        return []

    def _ran(self, work: Work) -> ev.Actions:
        step = work.step
        assert step is not None  # as in all Work of a run
        if work.kind == GATHER:
            return self._on_gathered(step)
        return self._advance(step) if work.kind == UPDATE else []

    # --------------------------------------------------------------------------------------------------------- views

    def _adopt(self, view: ev.View) -> ev.Actions:
        if view.rolled_back:
            self._rollback = view
            return [] if self._updating else self._roll_back(view)
        if self._view is None:
            return self._enter(view)
        # Committed steps are applied before anything is given up because of the view (step protocol, Sec. 5.3).
        actions = [action for record in view.records for action in self._on_committed(record)]
        self._view = view
        self._drained.clear()
        return actions + self._rounds.adopt(view) + self._prepared_again()

    def _entered_state(self) -> ev.StateName:
        """The name of the state that the view's members hold, this peer included."""
        assert self._view is not None  # nobody joins outside of a view
        return ev.StateName(self._generation, self._version, self._view.rounds_of(self._version - 1))

    def _enter(self, view: ev.View) -> ev.Actions:
        """The first view of this peer, or the first since it was evicted: it joins, or it has the state and begins. A
        peer that was evicted drops first what Work from before has left behind."""
        self._view = view
        self._generation = view.generation
        self._set_version(view.n_committed)
        self._drained.clear()
        self._forget_next_record()
        self._is_joining = self._peer in view.joining
        returns = self._state is not None
        if self._is_joining:
            self._state = None
            begins = []
        elif returns:
            begins = [ev.Restore(self._version, view.generation, view.n_reseeds, in_place=True)]
        else:
            self._state = self._entered_state()
            begins = [ev.Updated(self._stage, self._version)]
        return [*self._rounds.enter(view), *begins]

    def _forget_next_record(self) -> None:
        """The step after the one that is being applied will not be applied here."""
        if self._next_record:
            steps = range(self._next_record.step, self._next_record.step + 1)
            self._ledger.free(steps)
            self._rounds.drop(steps)
            self._next_record = None

    def _leave(self, view: ev.View) -> ev.Actions:
        """The run goes on without this peer: apply what is committed, give up the rest."""
        actions: ev.Actions = []
        if self._view:
            actions += [action for record in view.records for action in self._on_committed(record)]
        if self._next_record and not (self._updating and not self._rollback and self._is_prepared(self._next_record)):
            self._next_record = None
        n_applied = bool(self._updating) + bool(self._next_record)
        self._view = self._rollback = None
        self._drained.clear()
        free = self._free(self._steps[n_applied:])
        if self._updating:  # the rest is freed with its step
            self._abandoned = free.rounds
            return actions
        return [*actions, free, ev.Holds(self._state)]

    def _set_version(self, version: int) -> None:
        """This peer may hold data of as many steps as may be under way at once, and of as many again, since other peers
        may have applied the updates of all those steps already."""
        self._version = version
        self._own_state.changed()
        self._steps = range(version, version + 2 * (1 + self._delay.steps))

    def _free(self, steps: range) -> ev.Free:
        """Forget all that is here of these steps and of older ones."""
        self._ledger.free(steps)
        self._drained.difference_update(steps)
        return ev.Free(steps[-1], self._rounds.drop(steps))

    def _roll_back(self, view: ev.View) -> ev.Actions:
        """A new generation voids everything that is under way, and begins with the checkpoint's state."""
        free = self._free(self._steps)
        self._rollback = None
        self._view = view
        self._generation = view.generation
        self._state = self._next_record = None
        self._held_out = ev.HeldOutMeasured(0, ())
        self._set_version(view.n_committed)
        self._drained.clear()
        self._is_joining = False
        self._rounds.enter(view)
        return [free, ev.GoBack(view)]

    # ---------------------------------------------------------------------------------------------------- exchange

    def _gather(self, step: int) -> ev.Actions:
        """Nothing more will be added: lay the gradient out for the exchange, unless it was sent already."""
        if step < self._version:
            return []  # a message about a step that is over here
        self._drained.add(step)
        rounds = tuple([exchange.round for exchange in self._rounds.of(step) if not exchange.is_frozen])
        if not rounds:
            return []
        self._n_gathers[step] += 1
        digest = self._ask_for_digest() if step == self._version else []
        return [ev.Run(Work(self._stage, GATHER, None, self._peer, step), rounds=rounds), *digest]

    def _on_gathered(self, step: int) -> ev.Actions:
        """A view in between may have asked for another gathering, with what was done again in it: the last counts."""
        self._n_gathers[step] -= 1
        if self._n_gathers[step]:
            return []
        del self._n_gathers[step]
        if step not in self._drained:
            return []
        exchanges = [exchange for exchange in self._rounds.of(step) if not exchange.is_frozen]
        sends = [self._freeze(exchange) for exchange in exchanges]
        return [*sends, *(action for exchange in exchanges for action in self._sum_complete(exchange))]

    def _freeze(self, exchange: Exchange) -> ev.Post:
        """This peer's contribution is final and its vector is there."""
        round = exchange.round
        is_own_stage = self._rounds.groups[round.stage].stages == (self._stage,)  # losses count in one group only
        items, n_samples = self._ledger.items(round.number), self._ledger.n_samples(round.number)
        tally = self._ledger.tally(round.number) if is_own_stage else NO_LOSSES
        return exchange.freeze(items, n_samples, tally)

    def _sum_complete(self, exchange: Exchange) -> ev.Actions:
        """Add up the slices whose parts are all here, once all groups' shards are on their way: others wait for
        those."""
        return [self._sum(exchange, bounds) for bounds in exchange.addable]

    def _on_shard(self, src: int, shard: ev.Shard) -> ev.Actions:
        exchange, bounds = self._rounds.find(shard.key.round, self._steps), (shard.key.lo, shard.key.hi)
        if exchange is None or bounds not in exchange.parts or src not in exchange.contributor_set:
            return []
        exchange.parts[bounds][src] = shard
        return [self._sum(exchange, bounds)] if exchange.has_all_parts(bounds) else []

    def _sum(self, exchange: Exchange, bounds: Bounds) -> ev.Action:
        added = exchange.add_up(bounds, len(self._rounds.groups[exchange.round.stage].stages))
        return self._suspect(exchange, added) if isinstance(added, str) else added

    def _on_summed(self, key: ev.SliceKey, digest: int, sq_norm: float) -> ev.Actions:
        exchange = self._rounds.find(key.round, self._steps)
        given_out = exchange.give_out(key, digest, sq_norm) if exchange else None
        if exchange is None or given_out is None:
            return []  # of a round that is void by now
        post, body = given_out
        return [post, *self._hold(exchange, body)]

    def _on_reduced(self, src: int, reduced: ev.Reduced) -> ev.Actions:
        exchange, bounds = self._rounds.find(reduced.key.round, self._steps), (reduced.key.lo, reduced.key.hi)
        if exchange is None or bounds in exchange.sums or not exchange.gives(src, bounds):
            return []
        problem = exchange.problem(reduced.cover)
        return [self._suspect(exchange, problem)] if problem else self._hold(exchange, reduced)

    def _suspect(self, exchange: Exchange, problem: str) -> ev.Action:
        """A sum is accepted only with the right contributions (step protocol, Sec. 4.3)."""
        return ev.Send(ev.COORDINATOR, ev.Suspect(self._peer, f"{exchange.round}: {problem}"))

    def _hold(self, exchange: Exchange, sum: ev.Reduced) -> ev.Actions:
        return self._prepared(exchange.round.number) if exchange.hold(sum) else []

    def _prepared_again(self) -> ev.Actions:
        """Say again what counts in one view only: `Prepared` for all steps under way, and held-out losses."""
        held_out = [ev.Send(ev.COORDINATOR, self._held_out)] if self._held_out.losses else []
        return [*held_out, *(send for step in self._delay.open(self._version) for send in self._prepared(step))]

    def _prepared(self, step: int) -> ev.Actions:
        """Say `Prepared` once the results of all groups are here, and again in every view."""
        exchanges = self._rounds.known(step)
        if self._is_joining or exchanges is None or not all(exchange.complete for exchange in exchanges):
            return []
        state = None
        if self._own_state.is_compared(step):
            if step != self._version:
                return []  # with a delay the state of that version is still to come
            state = self._own_state.digest
            if state is None:
                return self._ask_for_digest()
        assert self._view is not None  # there is no exchange before the first view
        admission = self._view.by_peer[self._peer].admission
        results = tuple([exchange.result() for exchange in exchanges])
        return [ev.Send(ev.COORDINATOR, ev.Prepared(step, admission, results, state))]

    def _evaluated(self, evaluated: ev.Evaluated) -> ev.Actions:
        """The coordinator knows which held-out microbatches it has heard of: one that is done again counts once."""
        version = self._delay.version_of(evaluated.step)
        loss = (evaluated.microbatch, evaluated.n_samples, evaluated.loss_sum)
        others = self._held_out.losses if self._held_out.version == version else ()
        self._held_out = ev.HeldOutMeasured(version, (*others, loss))
        return [ev.Send(ev.COORDINATOR, ev.HeldOutMeasured(version, (loss,)))] if self._view else []

    # ------------------------------------------------------------------------------------------------- equal states

    def _ask_for_digest(self) -> ev.Actions:
        assert self._view is not None  # there is no exchange before the first view
        return [*self._own_state.ask(self._version, self._view.generation)]

    def _repair(self, repair: ev.Repair) -> ev.Actions:
        """Replace the state that the coordinator has found to be wrong, unless that is done or under way. Until then
        this peer is prepared for nothing, like one that joins. A donor votes again, with another digest of its state.
        """
        state = self._own_state.digest
        if state is None or (state.version, state.digest) != (repair.version, repair.digest):
            return []
        self._own_state.changed()
        if repair.donor == self._peer:
            return self._prepared(repair.version)
        self._is_joining = True
        return [ev.Repairing(repair.version, repair.donor)]

    # ------------------------------------------------------------------------------------------------------ commit

    def _on_committed(self, record: ev.Record) -> ev.Actions:
        if record.step == self._version + 1:
            self._next_record = record
        if record.step != self._version or self._updating or self._is_joining:
            return []
        exchanges = self._rounds.of(record.step)
        if not self._is_prepared(record):
            problem = f"the record of step {record.step} names a round that it is not prepared for"
            return [ev.Send(ev.COORDINATOR, ev.Suspect(self._peer, problem))]
        self._updating = record
        skips = record.verdict == "skip"
        rounds = () if skips else tuple(exchange.round for exchange in exchanges)
        work = Work(self._stage, UPDATE, None, self._peer, record.step)
        return [ev.Run(work, 0.0 if skips else update_scale(record, self._clip_norm), rounds)]

    def _is_prepared(self, record: ev.Record) -> bool:
        """Whether the results that a record names are here."""
        exchanges = self._rounds.of(record.step)
        return all(exchange.complete and exchange.round in record.rounds for exchange in exchanges)

    def _advance(self, step: int) -> ev.Actions:
        """The update of a step is done."""
        done = self._updating
        assert done is not None  # an update runs from here on only after `_on_committed`
        self._updating = None
        if self._rollback:
            return self._roll_back(self._rollback)
        if self._view and (done.generation, step) != (self._view.generation, self._version):
            # This peer was evicted meanwhile, and joins at a later version. A result that it fetches now may be of a
            # round that it has abandoned, so only the rounds of the step are over; earlier ones go with a later step.
            return [ev.Free(step, tuple([round for round in done.rounds if round.stage in self._rounds.groups]))]
        self._set_version(step + 1)
        self._state = ev.StateName(done.generation, step + 1, done.rounds)
        free = self._free(range(step, step + 1))
        if self._view is None and (not self._next_record or self._is_joining):  # evicted since then
            free = ev.Free(
                self._steps[-1], free.rounds + self._abandoned
            )  # what was under way beside the update is void
            return [free, ev.Updated(self._stage, self._version), ev.Holds(self._state)]
        # With a delay the next step's result may be here, and have waited for the state that is compared with it.
        is_compared = self._view is not None and self._own_state.is_compared(self._version)
        prepared = self._prepared(self._version) if is_compared else []
        return [free, ev.Updated(self._stage, self._version), *prepared]

    def _update_again(self) -> ev.Actions:
        """The record of the next step may be here. Its update runs when the checkpoint of this version, if there is to
        be one, is being written, which begins with the new version."""
        record = self._next_record
        if record is None or record.step != self._version or self._updating:
            return []
        self._next_record = None
        return self._on_committed(record)


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup) -> AllReduce:
    config, plan = setup.config, setup.plan
    groups = tuple(group for group in sync_groups(config, plan) if setup.stage in group.stages)
    rounds = Rounds(setup.peer, groups, plan.n_microbatches, config.sync.slice_bytes)
    check_every_steps = config.sync.check_every_steps
    return AllReduce(setup.peer, setup.stage, rounds, config.optim.clip_norm, config.delay, check_every_steps)


def _build_agreement(config: CoordinatorConfig, run: RunConfig, plan: Plan) -> Agreement:
    return TwoPhaseCommit(config, HeldOutRows(run.train, run.delay))


def _check(config: RunConfig, plan: Plan) -> str:
    if config.optim.second_moment != "own":
        return (
            f"optim.second_moment: got {config.optim.second_moment}, expected own with sync.kind {config.sync.kind}: "
            "its gradient is the mean over all pipelines already"
        )
    return ""


ENTRY = SyncEntry(_build, _build_agreement, _check)
