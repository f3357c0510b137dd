"""One replica where replicas may differ: it does local steps by its own gradient, and averages in groups.

After its backward Work a replica updates its parameters by itself, a local step. The sync, a subclass, says after which
of them the replica wants a group (`_after_step`). The coordinator's part (jaxdt.sync.scheduling.book) answers with one.
Its members lay their parameters out, add them up as in all-reduce, each an owner of one shard, and continue from the
mean. Nothing is agreed beyond the group: a mean is adopted as soon as it is whole. With a lag a replica does not wait,
and adopts the mean some local steps later (jaxdt.sync.pending_means).

After the last step all replicas of the stage average their whole states, with the optimizer's: the mean is the result
of the run. Snapshots for checkpoints are such means too; the replicas continue with their own states.

The first stage of a pipeline that gives its states to one that comes back begins no step until that has them
(jaxdt.sync.donor_transfer).

A group that loses a member averages in another attempt, or its members fetch the result of an earlier one from those
that hold it (jaxdt.sync.scheduling.open_groups says why all adopt the same).
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxdt.protocol import events as ev
from jaxdt.protocol.participants import EachOnce, Participants
from jaxdt.protocol.round_id import RoundId, RoundKind, Series
from jaxdt.run.codec import EXACT, CodecSpec
from jaxdt.run.config import STAGE
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import replica_elements, shared_table_elements
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.donor_transfer import donor_pipeline
from jaxdt.sync.engine import RoundEngine, RoundPolicy
from jaxdt.sync.exchange import Exchange, RoundSpec
from jaxdt.sync.held_out import HeldOutWork
from jaxdt.sync.known_groups import KnownGroups
from jaxdt.sync.local_steps import LocalSteps, PipelinePlace
from jaxdt.sync.pending_means import PendingMean

NO_LOSSES = ev.Tally()


@dataclass(frozen=True)
class ReplicaOptions:
    """`n_steps`: rows of the run. `n_elements`: numbers of the replica's parameters, which are exchanged in slices of
    `slice_bytes`; `fragment_elements`: numbers of each fragment that averages by itself, sent by `codec`.
    `weights`: of the stage's replicas in a group's mean, 1 where none is given. `lag_steps`: local steps between the
    freeze of a vector and the adoption of its mean. `has_outer`: a mean means more than its adoption, also that of one
    replica."""

    n_steps: int
    n_elements: int
    slice_bytes: int
    fragment_elements: tuple[int, ...]
    codec: CodecSpec = EXACT
    weights: Mapping[int, int] = field(default_factory=dict[int, int])
    lag_steps: int = 0
    has_outer: bool = False


class IndependentReplica(RoundPolicy):
    """One peer's side."""

    KINDS = frozenset({RoundKind.MEAN, RoundKind.STATE, RoundKind.HELD_OUT})
    READS = (
        LocalSteps.READS
        | HeldOutWork.READS
        | RoundEngine.READS
        | {ev.ViewChanged, ev.Evicted, ev.Ready, ev.Restored, ev.GroupFormed, ev.GroupClosed, ev.AskReplicaState}
        | {ev.Installed, ev.Updated}
    )

    def __init__(self, plan: Plan, place: PipelinePlace, options: ReplicaOptions, held_out: HeldOutWork):
        self._plan = plan
        self._place = place
        self._options = options
        self._held_out = held_out
        self._peer = place.peer
        self._stage = place.stage
        self._steps = LocalSteps(place)
        held_out.table = self._steps.table
        self._view: ev.View | None = None
        self._n_words = 0  # of the whole state
        self._first_version: int | None = None  # of the state that was taken over from another pipeline
        self._has_begun = False
        self._is_out = False  # its pipeline is lost, so this machine does nothing more
        self._engine = RoundEngine(place.peer, options.slice_bytes, self)
        self._closed: dict[Series, RoundId] = {}  # the last round that is over here
        # The vectors that are being laid out: each for a round, or to be kept until its group is known, which it then
        # asks for; and after how many local steps.
        self._laying_out: deque[tuple[RoundId | ev.WantsGroup, int]] = deque()
        self._pending = PendingMean(options.lag_steps)
        self._adopting: dict[RoundId, bool] = {}  # whose mean is being adopted, and whether all members hold it
        # Of these, means of states that wait for another one, and their factors; None for the own state of a replica
        # that is alone at the end.
        self._states: dict[RoundId, float | None] = {}
        self._snapshots: list[ev.GroupFormed] = []  # wait for the end of the step under way, and of its group
        self._known_groups = KnownGroups()
        self._waits_for_group = False
        self._is_finished = False

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        if self._is_out:
            return []
        match event:
            case ev.Evicted():
                self._is_out = True
                return []
            case ev.Installed(version):
                self._first_version = version
                return []
            case ev.Received(header, body):
                return self._on_received(header, body, event) if self._view else []
            case ev.Ran(work) if work.kind == WorkKind.LAY_OUT:
                return self._on_laid_out()
            case ev.Ran(work) if work.kind == WorkKind.ADOPT:
                return self._on_adopted()
            case ev.Ran(work) if work.kind == WorkKind.EVALUATE:
                return self._held_out.handle(event)
            case ev.Ran(work) if work.kind == WorkKind.LOCAL_STEP:
                return [*self._steps.handle(event), *self._on_stepped(self._steps.version)]
            case ev.Summed():
                return self._on_round(event)
            case ev.Ready(n_words=n_words):
                self._n_words = n_words
                return []
            case ev.ViewChanged(view):
                return self._adopt(view)
            case ev.Updated():
                return self._adopt_state()
            case ev.Restored(version):
                is_wanted = version == self._steps.version
                return (
                    [ev.Updated(self._stage, version), *([] if self._view else [ev.Holds(None)])] if is_wanted else []
                )
        return self._steps.handle(event)

    def _on_received(self, header: ev.Header, body: ev.Message, event: ev.Event) -> ev.Actions:
        if type(body) in RoundEngine.MESSAGES:
            return self._on_round(event)
        match body:
            case ev.GroupFormed():
                return self._on_formed(body)
            case ev.GroupClosed(round):
                return self._on_closed(round)
            case ev.AskReplicaState():
                return self._answer(header.coordinator_term)
            case ev.EvaluateMean() | ev.Boundary():
                self._held_out.handle(event)
                return self._held_out.between_steps() if self._is_between_steps else []
        return [*self._steps.handle(event), *self._finish_if_over()]

    def _on_round(self, event: ev.Event) -> ev.Actions:
        """A part or a sum of a round, of a shared table too."""
        actions = self._engine.handle(event)
        if self._steps.table is None:
            return actions
        actions = [*actions, *self._steps.handle(event)]
        return [*actions, *(self._held_out.between_steps() if self._is_between_steps else [])]

    def _adopt(self, view: ev.View) -> ev.Actions:
        """Another view. A pipeline that comes back begins with the view in which all its members have their states."""
        self._view = view
        if self._has_begun:
            self._give_up_without(view)
            return self._give_states()
        if self._peer in view.joining:
            return []
        self._has_begun = True
        if self._first_version is not None:
            self._steps.start(self._first_version, view)
            return self._begin()
        self._steps.start(view.n_committed, view)
        updated = ev.Updated(self._stage, view.n_committed)
        return [updated, *([] if view.n_committed >= self._options.n_steps else self._begin())]

    # ------------------------------------------------------------------------------------------- pipelines that return

    @property
    def _is_donor(self) -> bool:
        """Whether this is the first stage of the pipeline that gives its states to one that comes back."""
        return self._view is not None and self._place.is_first_stage and self._is_of_donor(self._view)

    @property
    def _may_wait_as_donor(self) -> bool:
        """Whether it can give them now: a mean that is pending is adopted first, at all stages."""
        return self._is_donor and self._pending.step is None

    def _is_of_donor(self, view: ev.View) -> bool:
        return donor_pipeline(self._plan, view) == self._place.number

    def _give_states(self) -> ev.Actions:
        """Begin or end the wait as a donor: in another view this peer may have to wait, or need not any more."""
        was_held, is_donor = self._steps.is_held, self._is_donor
        if self._may_wait_as_donor and self._is_between_steps:
            return self._wait_as_donor()
        if was_held and not is_donor:
            self._steps.is_held = False
            return self._steps.begin()
        return []

    def _wait_as_donor(self) -> ev.Actions:
        """Begin no step, and say so to the peers that join."""
        assert self._view is not None  # in which this peer is a donor
        self._steps.is_held = True
        body = ev.DonorWaits(self._steps.version)
        return [ev.Send(peer, body) for peer in self._view.joining]

    # ----------------------------------------------------------------------------------------------------- local steps

    def _begin(self) -> ev.Actions:
        """The next local step begins, unless that was the last one."""
        snapshots = [*self._take_part_in_snapshots(), *self._held_out.between_steps(), ev.Settled(self._steps.version)]
        waits = self._wait_as_donor() if self._may_wait_as_donor else []
        return [*snapshots, *waits, *self._steps.begin(), *self._finish_if_over()]

    @property
    def _is_between_steps(self) -> bool:
        return not self._steps.is_stepping and not self._waits_for_group

    def _on_stepped(self, version: int) -> ev.Actions:
        if self._pending.is_due(version):
            self._waits_for_group = True
            return self._adopt_pending()
        return self._after_step(version)

    def _after_step(self, version: int) -> ev.Actions:
        """Go on, or ask for a group."""
        return self._begin()

    def _ask_for_group(self, version: int, fragment: int = 0) -> ev.Actions:
        """Average a fragment. The next local step waits for the mean, or with a lag a later one does."""
        wanted = ev.WantsGroup(version, fragment)
        if self._options.lag_steps:
            self._pending.freeze(version)
            return [self._lay_out(wanted), *self._begin()]
        self._waits_for_group = True
        return [self._known_groups.wants(wanted)]

    def _finish_if_over(self) -> ev.Actions:
        """A mean that is not due yet is never adopted, but the other members need this one until it is whole."""
        if self._is_finished or not self._steps.is_over or self._waits_for_group or self._pending.is_awaited:
            return []
        self._is_finished = True
        snapshots = [*self._drop_pending(), *self._take_part_in_snapshots(), *self._held_out.between_steps()]
        waits = self._wait_as_donor() if self._is_donor and not self._steps.is_held else []
        return [*snapshots, *waits, ev.Send(ev.COORDINATOR, ev.Finished(self._steps.version))]

    def _take_part_in_snapshots(self) -> ev.Actions:
        """Take part in the snapshots that came while this peer was in the middle of a step."""
        snapshots, self._snapshots = self._snapshots, []
        return [action for formed in snapshots for action in self._on_formed(formed)]

    # ------------------------------------------------------------------------------------------------------- a group

    def _on_formed(self, formed: ev.GroupFormed) -> ev.Actions:
        round, members = formed.round, formed.members
        if self._peer not in members:
            return []
        self._known_groups.on_formed(formed, round.kind == RoundKind.MEAN)
        if round in self._engine and not formed.holders:
            return []
        other = self._engine.at(round)
        if other and other.complete:
            return [ev.Send(ev.COORDINATOR, self._holds(other))]
        if other and other.id != round:
            self._engine.give_up(other)
        self._snapshots = [waiting for waiting in self._snapshots if waiting.round.place != round.place]
        if formed.holders:
            return self._fetch(formed)
        if round.kind != RoundKind.MEAN and not self._is_between_steps:
            self._snapshots.append(formed)
            return []
        is_alone = len(members) == 1
        if is_alone and round.kind == RoundKind.STATE and not self._is_snapshot(round):
            self._adopting[round], self._states[round] = False, None
            return [*self._alone(round, members), *self._adopt_state()]
        if is_alone and round.kind == RoundKind.MEAN and not self._options.has_outer:
            return [*self._alone(round, members), *self._on_averaged(round)]
        self._engine.open(self._spec(round, members))
        step = self._pending.step
        if step is not None and round.kind == RoundKind.MEAN:
            return [ev.Offer(round, step), *self._contribute(round, step)]
        return [self._lay_out(round)]

    def _alone(self, round: RoundId, members: tuple[int, ...]) -> ev.Actions:
        """A group of this peer alone changes nothing. The coordinator waits for it where there were others, and where
        it is the result of the run."""
        if not round.attempt and round.kind != RoundKind.STATE:
            self._known_groups.on_over(round)
            return []
        held = ev.ResultHeld(round, 0, (self._steps.version,))
        return [ev.Send(ev.COORDINATOR, self._known_groups.on_held(held, members))]

    def _lay_out(self, purpose: RoundId | ev.WantsGroup) -> ev.Action:
        """The present parameters or state become a vector, for a round, or to be kept until that is known."""
        version = self._steps.version
        self._laying_out.append((purpose, version))
        rounds = (purpose,) if isinstance(purpose, RoundId) else ()
        return ev.Run(Work(self._stage, WorkKind.LAY_OUT, None, self._peer, version), rounds=rounds)

    def _n_elements(self, round: RoundId) -> int:
        if round.kind == RoundKind.STATE:
            return self._n_words
        if round.kind == RoundKind.HELD_OUT:
            return self._options.n_elements
        return self._options.fragment_elements[round.fragment]

    def _is_snapshot(self, round: RoundId) -> bool:
        """Whether the mean is for a checkpoint or a held-out loss, and this peer continues with its own state."""
        return round.kind == RoundKind.HELD_OUT or (
            round.kind == RoundKind.STATE and round.number < self._options.n_steps
        )

    def _on_laid_out(self) -> ev.Actions:
        """The vector is there: it goes to the owners, or waits for its round. Work of one kind is done in the order in
        which it was asked for."""
        round, version = self._laying_out.popleft()
        if isinstance(round, ev.WantsGroup):
            return [self._known_groups.wants(round)]
        if round not in self._engine:  # the attempt was given up meanwhile, or is over
            return [] if self._engine.was_given_up(round) else [ev.Forget(round)]
        return self._contribute(round, version)

    def _contribute(self, round: RoundId, version: int) -> ev.Actions:
        """The vector of so many local steps is this peer's contribution."""
        return self._engine.contribute((round, ((self._peer, version),), 1, NO_LOSSES))

    # ---------------------------------------------------------------------------------------------- as a round policy

    def is_over(self, id: RoundId) -> bool:
        """Its parts come a second time: the rounds of a series begin in order."""
        closed = self._closed.get(id.series)
        return closed is not None and id.number <= closed.number

    def _spec(self, round: RoundId, members: tuple[int, ...]) -> RoundSpec:
        codec = self._options.codec if round.kind == RoundKind.MEAN else EXACT
        everybody = Participants(members, members, members)
        return RoundSpec(round, self._n_elements(round), everybody, EachOnce(members), codec=codec)

    def whole(self, exchange: Exchange) -> ev.Actions:
        """The mean is adopted, or waits until it is due. That for a held-out loss is kept until then."""
        round = exchange.id
        held = ev.Send(ev.COORDINATOR, self._known_groups.on_held(self._holds(exchange), exchange.contributors))
        if round.kind == RoundKind.HELD_OUT:
            return [held]
        scale = self._factor(exchange)
        if self._pending.is_awaited and round.kind == RoundKind.MEAN:
            self._pending.on_arrived(round, scale)
            return [held, *(self._adopt_pending() if self._waits_for_group else self._finish_if_over())]
        if round.kind != RoundKind.STATE:
            return [held, self._adopt_mean(round, scale, is_closed=False)]
        self._adopting[round], self._states[round] = False, scale
        return [held, *self._adopt_state()]

    def _factor(self, exchange: Exchange) -> float:
        """The factor that makes the sum of a round its mean; the mean of a group is weighted."""
        if exchange.id.kind != RoundKind.MEAN:
            return 1.0 / len(exchange.contributors)
        return 1.0 / sum(self._options.weights.get(member, 1) for member in exchange.contributors)

    def _holds(self, exchange: Exchange) -> ev.ResultHeld:
        """The whole result is here. Every slice names the same contributions."""
        _, items = next(iter(exchange.sums.values())).cover
        steps = tuple(step for ((_, step),) in items)
        return ev.ResultHeld(exchange.id, exchange.result().digest, steps)

    def _adopt_mean(self, round: RoundId, scale: float, is_closed: bool) -> ev.Action:
        self._adopting[round] = is_closed
        return ev.Run(Work(self._stage, WorkKind.ADOPT, None, self._peer, self._steps.version), scale, (round,))

    def _adopt_state(self) -> ev.Actions:
        """The next mean of states, unless one is on the way. It takes the place of the one before, whose checkpoint is
        being written when that has brought a new version. So they are adopted in the order of their versions, the
        result of the run last."""
        under_way = [round for round in self._adopting if round.kind == RoundKind.STATE and round not in self._states]
        if under_way or not self._states:
            return []
        round = min(self._states, key=lambda waiting: waiting.number)
        if any(e.id.kind == RoundKind.STATE and e.id.number < round.number and not e.complete for e in self._engine):
            return []
        scale, is_closed = self._states.pop(round), self._adopting.pop(round)
        self._adopting[round] = is_closed  # the last one, since Work ends in the order in which it was asked for
        if scale is None:
            return self._adopted(round)
        return [ev.Run(Work(self._stage, WorkKind.ADOPT, None, self._peer, round.number), scale, (round,))]

    def _adopt_pending(self) -> ev.Actions:
        """The mean that is due, if it is here."""
        if self._pending.whole is None:
            return []
        adopt = self._adopt_mean(*self._pending.whole, self._pending.is_closed)
        self._pending.end()
        return [adopt]

    def _drop_pending(self) -> ev.Actions:
        """The mean that is pending, if there is one, is never adopted."""
        dropped, is_closed = self._pending.whole, self._pending.is_closed
        self._pending.end()
        return self._on_closed(dropped[0]) if dropped and is_closed else []

    def _on_adopted(self) -> ev.Actions:
        return self._adopted(next(round for round in self._adopting if round not in self._states))

    def _adopted(self, round: RoundId) -> ev.Actions:
        """The mean is adopted. If its round is over, its slices can go."""
        is_closed = self._adopting.pop(round)
        return [*(self._on_closed(round) if is_closed else []), *self._on_averaged(round)]

    def _on_averaged(self, round: RoundId) -> ev.Actions:
        """The mean of the round is this peer's; if it is that of the whole state, the run is over here."""
        if round.kind == RoundKind.STATE:
            return [ev.MeanKept(round.number), ev.Updated(self._stage, round.number)]
        self._pending.end()
        if not self._waits_for_group:
            return self._finish_if_over()
        self._waits_for_group = False
        return self._begin()

    def _on_closed(self, round: RoundId) -> ev.Actions:
        if round in self._adopting:
            self._adopting[round] = True
            return []
        if self._pending.on_closed(round):
            return []
        self._known_groups.on_over(round)
        attempts = self._engine.close(round)
        if attempts:
            self._closed[round.series] = round
        in_use = {other for other, _ in self._laying_out}
        table = self._steps.table.close_mean(round) if self._steps.table else []
        return [*(ev.Forget(other) for other in attempts if other not in in_use), *table]

    def _answer(self, coordinator_term: int) -> ev.Actions:
        said = [*self._steps.say_again(), *self._held_out.say_again()]
        said += [ev.Send(ev.COORDINATOR, ev.Finished(self._steps.version))] if self._is_finished else []
        return self._known_groups.answer(coordinator_term, self._steps.n_steps, said)

    # ------------------------------------------------------------------------------------- groups that lose a member

    def _give_up_without(self, view: ev.View) -> None:
        """Give up the attempts that wait for the part of a member that is not in the view. The coordinator says how
        their groups continue. A result that others hold needs no more parts."""
        for exchange in self._engine:
            waits = not exchange.complete and not exchange.holders
            if waits and not _are_there(exchange.contributors, exchange.id, view):
                self._engine.give_up(exchange)
        self._snapshots = [formed for formed in self._snapshots if _are_there(formed.members, formed.round, view)]

    def _fetch(self, formed: ev.GroupFormed) -> ev.Actions:
        """Others hold the result of an attempt to which this peer has contributed."""
        round = formed.round
        if round not in self._engine and not self._engine.was_given_up(round):
            problem = f"{round}: is whole without this peer's part"
            return [ev.Send(ev.COORDINATOR, ev.Suspect(self._peer, problem))]
        return self._engine.fetch(self._spec(round, formed.members), formed.holders)


def _are_there(members: Iterable[int], round: RoundId, view: ev.View) -> bool:
    """Whether all members of a round are in the view, as they were when the round began."""
    known = view.by_peer
    return all(member in known and known[member].admission <= round.view for member in members)


def replica_place(setup: PeerSetup) -> PipelinePlace:
    config, plan = setup.config, setup.plan
    _, pipeline = plan.seat(setup.peer)
    return PipelinePlace(
        peer=setup.peer,
        stage=setup.stage,
        pipeline=[row[pipeline] for row in plan.placement],
        n_steps=config.train.steps,
        clip_norm=config.optim.clip_norm,
        clips_alone=config.sync.groups.clip == STAGE,
        n_ahead=plan.n_ahead(setup.stage),
        number=pipeline,
        table_elements=shared_table_elements(config, plan),
        slice_bytes=config.sync.slice_bytes,
        n_ahead_first=plan.n_ahead(0),
    )


def replica_options(setup: PeerSetup) -> ReplicaOptions:
    """The options of a replica that averages all that is trained, each replica as much, and waits for the mean."""
    config, (lo, hi) = setup.config, setup.plan.stages[setup.stage]
    n_elements = replica_elements(config, lo, hi)
    return ReplicaOptions(config.train.steps, n_elements, config.sync.slice_bytes, fragment_elements=(n_elements,))
