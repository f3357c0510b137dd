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
from dataclasses import replace

from jaxdt.membership.agreement import Agreement
from jaxdt.membership.commit import TwoPhaseCommit
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.membership.held_out_rows import HeldOutRows
from jaxdt.protocol import events as ev
from jaxdt.protocol.ledger import NO_LOSSES, Ledger
from jaxdt.protocol.participants import ExactCover, Participants
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig
from jaxdt.run.delay import NO_DELAY, Delay
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import Group, sync_groups
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.base import SyncEntry
from jaxdt.sync.engine import RoundEngine, RoundPolicy
from jaxdt.sync.exchange import Exchange, RoundSpec, update_scale
from jaxdt.sync.own_state import OwnState


def round_in_view(group: Group, view: ev.View, step: int, n_microbatches: int) -> RoundSpec:
    """The round that a view makes of a group's exchange, another one whenever the group's members change. The members
    that compute the step contribute, and each owns a shard. Members that join add nothing, and get the result."""
    contributors = tuple(sorted({member for stage in group.stages for member in view.working(stage, step)}))
    members = {member for stage in group.stages for member in view.stage_peers(stage)}
    joining = tuple(sorted(members - set(contributors)))
    last_change = max(view.stage_views[stage] for stage in group.stages)
    return RoundSpec(
        id=RoundId(RoundKind.GRADIENT, group.stage, step, view=last_change),
        n_elements=group.n_elements,
        participants=Participants(contributors, contributors, contributors + joining),
        cover_rule=ExactCover(group.stages, n_microbatches),
        n_stages=len(group.stages),
        codec=group.codec,
    )


class AllReduce(RoundPolicy):
    """One peer's side: its rounds, `Prepared`, and the update once the record is committed."""

    KINDS = frozenset({RoundKind.GRADIENT})
    READS = RoundEngine.READS | frozenset(
        {ev.ViewChanged, ev.Evicted, ev.Restored, ev.Accumulated, ev.Evaluated, ev.Drained, ev.Ran}
        | {ev.Committed, ev.Joined, ev.LinkChanged, ev.Digested, ev.Repair, ev.WorkOverdue, ev.Updated}
    )

    def __init__(
        self,
        peer: int,
        stage: int,
        groups: tuple[Group, ...],
        n_microbatches: int,
        slice_bytes: int,
        *,
        clip_norm: float = 0.0,
        delay: Delay = NO_DELAY,
        check_every_steps: int = 0,
    ):
        self._peer = peer
        self._groups = {group.stage: group for group in groups}
        self._n_microbatches = n_microbatches
        self._engine = RoundEngine(peer, slice_bytes, self)
        self._own_state = OwnState(stage, check_every_steps)
        self._stage = stage
        self._clip_norm = clip_norm
        self._delay = delay
        self._ledger = Ledger()
        self._view: ev.View | None = None
        self._set_version(0)
        self._generation = 0
        self._state: ev.StateName | None = None  # None before the first update, and while it is fetched or restored
        self._is_joining = False
        self._updating: ev.Record | None = None
        self._next_record: ev.Record | None = None  # with a delay it may come before this peer is ready for it
        self._void_update: tuple[RoundId, ...] = ()  # which an update of an earlier generation reads while it runs
        self._abandoned: tuple[RoundId, ...] = ()  # which were under way beside an update when this peer was evicted
        self._drained: set[int] = set()
        self._n_gathers: Counter[int] = Counter()
        # Held-out losses that were measured here, by version: a coordinator that was started again may wait for those
        # of each version with which an open step computes.
        self._held_out: dict[int, ev.HeldOutMeasured] = {}

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:  # the frequent ones first
            case ev.Received():
                return self._on_received(event) if self._view else []
            case ev.Accumulated():
                self._ledger.add(event.step, (event.stage, event.microbatch), event.n_samples)
                if event.loss_sum is not None:
                    self._ledger.measured(event.step, ev.Tally(event.loss_sum, event.n_samples))
            case ev.Ran():
                return self._on_ran(event.work)
            case ev.Updated():
                return self._update_again()
            case ev.Summed():
                return self._engine.handle(event)
            case ev.Evaluated():
                return self._on_evaluated(event)
            case ev.Drained(step):
                return self._gather(step)
            case ev.ViewChanged(view):
                return self._adopt(view)
            case ev.Evicted(view):
                return self._leave(view)
            case ev.Joined():
                self._is_joining = False
                self._state = self._entered_state()
                return [*self._say_prepared_again(), ev.Holds(self._state)]
            case ev.LinkChanged(peer, up) if peer == ev.COORDINATOR and up and self._view:
                return self._say_prepared_again()
            case ev.Restored(version) if version == self._version:  # else another rollback is on its way
                self._state = self._state or ev.StateName(self._generation, version)
                return [ev.Updated(self._stage, version), *([] if self._view else [ev.Holds(self._state)])]
            case ev.WorkOverdue() if self._n_gathers or self._own_state.is_awaited:
                return [ev.StepBlocked()]  # others wait for this peer's part of the gradient, or for its vote
            case ev.Digested():
                self._own_state.on_arrived(event)
                return self._say_prepared(self._version) if self._view else []
        return []

    def _on_received(self, event: ev.Received) -> ev.Actions:
        match event.body:
            case ev.Committed(record):
                return self._on_committed(record)
            case ev.Repair() as repair:
                return self._repair(repair)
        return self._engine.handle(event)

    def _on_ran(self, work: Work) -> ev.Actions:
        step = work.step
        assert step is not None  # as in all Work of a run
        if work.kind == WorkKind.GATHER:
            return self._on_gathered(step)
        return self._advance(step) if work.kind == WorkKind.UPDATE else []

    # --------------------------------------------------------------------------------------------------------- views

    def _adopt(self, view: ev.View) -> ev.Actions:
        if view.rolled_back:
            return self._roll_back(view)
        if self._view is None:
            return self._enter(view)
        # Committed steps are applied before anything is given up because of the view (step protocol, Sec. 5.3).
        actions = [action for record in view.records for action in self._on_committed(record)]
        self._view = view
        self._drained.clear()
        return actions + self._renew(view) + self._say_prepared_again()

    def _entered_state(self) -> ev.StateName:
        """The name of the state that the view's members hold, this peer included."""
        assert self._view is not None  # a peer joins only inside a view
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
        return [*self._fetch_held(view), *begins]

    def _forget_next_record(self) -> None:
        """The step after the one that is being applied will not be applied here."""
        if self._next_record:
            steps = range(self._next_record.step, self._next_record.step + 1)
            self._ledger.free(steps)
            self._drop(steps)
            self._next_record = None

    def _leave(self, view: ev.View) -> ev.Actions:
        """The run continues without this peer: apply what is committed, give up the rest."""
        actions: ev.Actions = []
        if self._view:
            actions += [action for record in view.records for action in self._on_committed(record)]
        if self._next_record and not (self._updating and self._is_prepared(self._next_record)):
            self._next_record = None
        n_applied = bool(self._updating) + bool(self._next_record)
        self._view = None
        self._drained.clear()
        free = self._free(self._steps[n_applied:])
        if self._updating:  # the rest is freed with its step
            self._abandoned = free.rounds
            return actions
        return [*actions, *self._void(free), ev.Holds(self._state)]

    def _set_version(self, version: int) -> None:
        """This peer may hold data of as many steps as may be under way at once, and of as many again, since other peers
        may have applied the updates of all those steps already."""
        self._version = version
        self._own_state.on_changed()
        self._steps = range(version, version + 2 * (1 + self._delay.steps))

    def _free(self, steps: range) -> ev.Free:
        """Forget all that is here of these steps and of older ones."""
        self._ledger.free(steps)
        self._drained.difference_update(steps)
        return ev.Free(steps[-1], self._drop(steps))

    def _roll_back(self, view: ev.View) -> ev.Actions:
        """A new generation voids everything that is under way, and begins with the checkpoint's state. Members that are
        there already send parts of its rounds, so nothing here may wait for the update that runs: only the rounds that
        it reads stay until it is done, and its result is replaced by the state that is restored after it."""
        if self._updating:
            self._void_update, self._updating = self._own_rounds(self._updating), None
        free = self._free(self._steps)
        void = self._void(ev.Free(free.step, free.rounds + self._abandoned))
        self._abandoned = ()
        self._view = view
        self._generation = view.generation
        self._state = self._next_record = None
        self._held_out.clear()
        self._set_version(view.n_committed)
        self._drained.clear()
        self._is_joining = False
        return [*void, ev.GoBack(view)]

    def _void(self, free: ev.Free) -> ev.Actions:
        """The same without what a void update reads. A Free would take all earlier rounds too, and that update's.
        Without such an update it is a Free: a round that is forgotten takes nothing any more, and a joining member that
        is evicted may be admitted again to the same rounds."""
        if not self._void_update:
            return [free]
        return [ev.Free(free.step), *[ev.Forget(round) for round in free.rounds if round not in self._void_update]]

    # ---------------------------------------------------------------------------------------------------- exchange

    def _gather(self, step: int) -> ev.Actions:
        """Nothing more will be added: lay the gradient out for the exchange, unless it was sent already."""
        if step < self._version:
            return []  # a message about a step that is over here
        self._drained.add(step)
        rounds = tuple([exchange.id for exchange in self._exchanges(step) if not exchange.is_frozen])
        if not rounds:
            return []
        self._n_gathers[step] += 1
        digest = self._ask_for_digest() if step == self._version else []
        return [ev.Run(Work(self._stage, WorkKind.GATHER, None, self._peer, step), rounds=rounds), *digest]

    def _on_gathered(self, step: int) -> ev.Actions:
        """A view in between may have asked for another gathering, with what was done again in it: the last counts."""
        self._n_gathers[step] -= 1
        if self._n_gathers[step]:
            return []
        del self._n_gathers[step]
        if step not in self._drained:
            return []
        items, n_samples, tally = self._ledger.items(step), self._ledger.n_samples(step), self._ledger.tally(step)
        ids = [exchange.id for exchange in self._exchanges(step) if not exchange.is_frozen]
        own = [(id, items, n_samples, tally if id.stage == self._stage else NO_LOSSES) for id in ids]
        return self._engine.contribute(*own)  # losses count in one group only

    # ---------------------------------------------------------------------------------------------- as a round policy

    def spec(self, id: RoundId) -> RoundSpec | None:
        is_ours = id.stage in self._groups and id.number in self._steps
        spec = self._in_view(id.number, id.stage) if is_ours else None
        return spec if spec and spec.id == id else None

    def is_over(self, id: RoundId) -> bool:
        return id.number < self._steps.stop

    def whole(self, exchange: Exchange) -> ev.Actions:
        return self._say_prepared(exchange.id.number)

    def _in_view(self, step: int, stage: int) -> RoundSpec:
        assert self._view is not None  # there is no exchange before the first view
        return round_in_view(self._groups[stage], self._view, step, self._n_microbatches)

    def _open(self, step: int) -> list[Exchange | None]:
        """The exchanges of all groups; None for those that have not begun."""
        return [self._engine.at(RoundId(RoundKind.GRADIENT, stage, step)) for stage in self._groups]

    def _exchanges(self, step: int) -> list[Exchange]:
        """The exchanges of all groups, begun where there was none."""
        found = zip(self._groups, self._open(step), strict=True)
        return [exchange or self._engine.open(self._in_view(step, stage)) for stage, exchange in found]

    def _renew(self, view: ev.View) -> ev.Actions:
        """Give up the rounds that are void in this view, the present one; the next look-up makes new ones. Members that
        join get what was summed before their view was here."""
        held = {id.place: id for id, _ in view.results}
        actions: ev.Actions = []
        for exchange in [exchange for exchange in self._engine if exchange.id.number >= view.n_committed]:
            id = exchange.id
            spec = self._in_view(id.number, id.stage)
            if id == held.get(id.place, spec.id):
                joining = set(spec.participants.receivers).difference(spec.participants.contributors)
                actions += self._engine.admit(exchange, tuple(sorted(joining)))
            else:
                actions += self._engine.forget(id)
        return actions + self._fetch_held(view)

    def _fetch_held(self, view: ev.View) -> ev.Actions:
        """Ask for the results that others hold, and this peer lacks."""
        actions: ev.Actions = []
        for id, holders in view.results:
            exchange = self._engine.at(id)
            if id.stage in self._groups and not (exchange and exchange.complete):
                actions += self._engine.fetch(replace(self._in_view(id.number, id.stage), id=id), holders)
        return actions

    def _drop(self, steps: range) -> tuple[RoundId, ...]:
        ids = [exchange.id for exchange in self._engine if exchange.id.number in steps]
        return tuple([attempt for id in sorted(ids) for attempt in self._engine.close(id)])

    # --------------------------------------------------------------------------------------------------- agreement

    def _say_prepared_again(self) -> ev.Actions:
        """Say again what counts in one view only: `Prepared` for all steps under way, and held-out losses."""
        held_out = [ev.Send(ev.COORDINATOR, measured) for measured in self._held_out.values()]
        return [*held_out, *(send for step in self._delay.open(self._version) for send in self._say_prepared(step))]

    def _say_prepared(self, step: int) -> ev.Actions:
        """Say `Prepared` once the results of all groups are here, and again in every view."""
        exchanges = [exchange for exchange in self._open(step) if exchange and exchange.complete]
        if self._is_joining or len(exchanges) < len(self._groups):
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

    def _on_evaluated(self, evaluated: ev.Evaluated) -> ev.Actions:
        """The coordinator knows which held-out microbatches it has heard of: one that is done again counts once."""
        version = self._delay.version_of(evaluated.step)
        loss = (evaluated.microbatch, evaluated.n_samples, evaluated.loss_sum)
        others = self._held_out[version].losses if version in self._held_out else ()
        self._held_out[version] = ev.HeldOutMeasured(version, (*others, loss))
        for over in [other for other in self._held_out if other < version - self._delay.steps]:
            del self._held_out[over]
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
        self._own_state.on_changed()
        if repair.donor == self._peer:
            return self._say_prepared(repair.version)
        self._is_joining = True
        return [ev.Repairing(repair.version, repair.donor)]

    # ------------------------------------------------------------------------------------------------------ commit

    def _on_committed(self, record: ev.Record) -> ev.Actions:
        if record.step == self._version + 1:
            self._next_record = record
        if record.step != self._version or self._updating or self._is_joining:
            return []
        exchanges = self._exchanges(record.step)
        if not self._is_prepared(record):
            problem = f"the record of step {record.step} names a round that it is not prepared for"
            return [ev.Send(ev.COORDINATOR, ev.Suspect(self._peer, problem))]
        self._updating = record
        rounds = () if record.verdict == "skip" else tuple(exchange.id for exchange in exchanges)
        work = Work(self._stage, WorkKind.UPDATE, None, self._peer, record.step)
        return [ev.Run(work, update_scale(record.sq_norm, record.n_samples, self._clip_norm), rounds)]

    def _own_rounds(self, record: ev.Record) -> tuple[RoundId, ...]:
        return tuple([round for round in record.rounds if round.stage in self._groups])

    def _is_prepared(self, record: ev.Record) -> bool:
        """Whether the results that a record names are here."""
        exchanges = self._exchanges(record.step)
        return all(exchange.complete and exchange.id in record.rounds for exchange in exchanges)

    def _advance(self, step: int) -> ev.Actions:
        done, self._updating = self._updating, None
        if done is None:  # its generation was given up meanwhile
            void, self._void_update = self._void_update, ()
            return [ev.Forget(round) for round in void]
        if self._view and (done.generation, step) != (self._view.generation, self._version):
            # This peer was evicted meanwhile, and joins at a later version. A result that it fetches now may be of a
            # round that it has abandoned, so only the rounds of the step are over; earlier ones go with a later step.
            return [ev.Free(step, self._own_rounds(done))]
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
        prepared = self._say_prepared(self._version) if is_compared else []
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
    return AllReduce(
        setup.peer,
        setup.stage,
        groups,
        plan.n_microbatches,
        config.sync.slice_bytes,
        clip_norm=config.optim.clip_norm,
        delay=config.delay,
        check_every_steps=config.sync.check_every_steps,
    )


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
