"""Servers that hold the parameters of replicas that may differ (HetPipe, Park et al. 2020, Sec. 5).

Each stage has a server, which computes no microbatch. After a local step a replica, the worker, pushes what the step
has changed, and the server adds it to its parameters. After every `wave` pushes the worker's clock grows by 1, and it
waits to pull: the server answers when that clock is at most `staleness` ahead of the slowest worker's, and the worker
continues from the server's parameters. The slowest is never held, so the run never stands still.

Pushes and pulls are rounds of averaging with one contributor. The server counts the clocks itself, from the pushes that
it has added: so a pull contains all that its clock promises, and the coordinator is not asked. The order in which the
server adds and answers is reported: from it one process can do the run again.

A worker whose pipeline is lost is no longer awaited, and its pushes that are added stay.

Held-out losses and checkpoints during the run use snapshots that the servers take, with the same pushes at all stages
(jaxdt.sync.server_snapshots).

A worker begins with a pull. After its last step it pulls once more, when the pushes of all workers are added: the
server's parameters are the result of the run, and the stage's least worker writes them, with its own optimizer state.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

from collections import deque

from jaxdt.membership.agreement import Agreement
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import KeptReport, PullReport, PushReport
from jaxdt.protocol.round_id import RoundId, RoundKind, Series
from jaxdt.run.codec import FLOAT32_BYTES, NONE
from jaxdt.run.config import RunConfig
from jaxdt.run.memory import ReplicaCopies
from jaxdt.run.peer_setup import PeerSetup
from jaxdt.run.plan import STASH, Plan
from jaxdt.run.sizes import moving_table_bytes, replica_elements, replica_moments
from jaxdt.run.work import Work, WorkKind
from jaxdt.sync.base import Period, Sync, SyncEntry
from jaxdt.sync.engine import RoundEngine, RoundPolicy
from jaxdt.sync.exchange import Exchange, RoundSpec
from jaxdt.sync.held_out import HeldOutWork, held_out_place
from jaxdt.sync.known_groups import KnownGroups
from jaxdt.sync.local_steps import OF_OWN_STEPS, LocalSteps, PipelinePlace
from jaxdt.sync.replica import replica_place
from jaxdt.sync.server_agreement import ServerAgreement
from jaxdt.sync.server_snapshots import ServedStage, ServerSnapshots

NO_LOSSES = ev.Tally()
KINDS = frozenset({RoundKind.PUSH, RoundKind.PULL, RoundKind.HELD_OUT, RoundKind.CHECKPOINT})


class Replica(RoundPolicy):
    """A replica's side. Rounds of pushes are numbered by local steps, those of pulls as they come."""

    KINDS = KINDS
    READS = (
        LocalSteps.READS
        | HeldOutWork.READS
        | {ev.ViewChanged, ev.Evicted, ev.AskReplicaState, ev.GroupFormed, ev.GroupClosed, ev.Updated}
    )

    def __init__(self, stage: ServedStage, place: PipelinePlace, held_out: HeldOutWork):
        self._served = stage
        self._peer = place.peer
        self._steps = LocalSteps(place)
        self._view: ev.View | None = None
        self._n_pulls = 0
        self._engine = RoundEngine(place.peer, stage.slice_bytes, self)
        self._pull: RoundId | None = None  # for which this replica waits
        self._is_last_pull = False
        self._push: RoundId | None = None  # that is being laid out
        self._held_out = held_out
        held_out.table = self._steps.table
        self._last_fetched: dict[Series, int] = {}  # the last version that was asked for
        self._to_evaluate: ev.Event | None = None  # what the coordinator has asked for last, with a snapshot
        self._to_keep: deque[RoundId] = deque()  # whole, and for a checkpoint
        self._is_keeping = False
        self._has_result = False
        self._adopting: deque[RoundId] = deque()  # in the order of their Work
        self._is_out = False  # its pipeline is lost, so this peer does nothing more
        self._known_groups = KnownGroups()  # none: servers make the snapshots

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        if self._is_out:
            return []
        match event:
            case ev.Evicted():
                self._is_out = True
                return [ev.Holds(None)]
            case ev.ViewChanged(view):
                return self._adopt(view)
            case ev.Received(_, ev.Shard() | ev.Reduced()) | ev.Summed():
                begun = [*self._engine.handle(event), *self._steps.handle(event)]
                return [*begun, *(self._between_steps() if self._steps.table else [])]
            case ev.Received(header, ev.AskReplicaState()):
                return self._answer(header.coordinator_term)
            case ev.Received(_, ev.EvaluateMean(round)):
                self._to_evaluate = event
                return [*self._fetch(round), *self._evaluate_if_whole(round)]
            case ev.Received(_, ev.GroupFormed(round)):
                return self._fetch(round)
            case ev.Received(_, ev.GroupClosed(round)):
                table = self._steps.table.close_mean(round) if self._steps.table else []
                return [*(self._engine.forget(round) if round in self._engine else []), *table]
            case ev.Received(_, ev.Boundary()):
                self._held_out.handle(event)
                return self._between_steps()
            case ev.Ran(work) if work.kind == WorkKind.EVALUATE:
                return self._held_out.handle(event)
            case ev.Ran(work) if work.kind == WorkKind.LAY_OUT:
                return self._on_push_laid_out()
            case ev.Ran(work) if work.kind == WorkKind.ADOPT:
                return self._on_adopted()
            case ev.Ran(work) if work.kind == WorkKind.LOCAL_STEP:
                return [*self._steps.handle(event), *self._lay_out_push()]
            case ev.Updated():  # the checkpoint of a snapshot is being written
                return self._between_steps()
        if self._view is None:
            return []
        return [*self._steps.handle(event), *self._finish_if_over()]

    def _adopt(self, view: ev.View) -> ev.Actions:
        is_first_view = self._view is None
        self._view = view
        if not is_first_view:
            return []
        self._steps.start(view.n_committed, view)
        updated = ev.Updated(self._served.stage, view.n_committed)
        return [updated, *([] if view.n_committed >= self._served.n_steps else self._wait_to_pull())]

    def _round(self, kind: RoundKind, number: int) -> RoundId:
        assert self._view is not None  # a worker computes in a view
        admission = self._view.by_peer[self._peer].admission
        return RoundId(kind, self._served.stage, number, peer=self._peer, view=admission)

    def _lay_out_push(self) -> ev.Actions:
        """A local step is done: what it has changed goes to the server."""
        step = self._steps.version
        round = self._round(RoundKind.PUSH, step)
        self._push = self._engine.open(self._served.spec(round)).id
        return [ev.Run(Work(self._served.stage, WorkKind.LAY_OUT, None, self._peer, step), rounds=(round,))]

    def _on_push_laid_out(self) -> ev.Actions:
        """The change is laid out, and sent once."""
        push, self._push = self._push, None
        assert push is not None  # one is laid out at a time
        step = self._steps.version
        sent = self._engine.contribute((push, ((self._peer, step),), 1, NO_LOSSES))
        actions = [*sent, *self._engine.forget(push)]
        if self._steps.is_over:
            return [*actions, *self._finish_if_over()]
        actions += self._between_steps()
        return [*actions, *(self._wait_to_pull() if step % self._served.wave == 0 else self._steps.begin())]

    def _wait_to_pull(self, is_last: bool = False) -> ev.Actions:
        round = self._round(RoundKind.PULL, self._n_pulls)
        self._n_pulls += 1
        self._pull = self._engine.open(self._served.spec(round)).id
        self._is_last_pull = is_last
        return [ev.Send(self._served.server, ev.WantsParameters(round, self._steps.version, is_last))]

    # ---------------------------------------------------------------------------------------------- as a round policy

    def wrong(self, exchange: Exchange, problem: str) -> ev.Actions:
        """All sums that a replica reads are its server's."""
        return [ev.Send(ev.COORDINATOR, ev.Suspect(self._served.server, f"{exchange.id}: {problem}"))]

    def whole(self, exchange: Exchange) -> ev.Actions:
        round = exchange.id
        if round.kind == RoundKind.PULL:
            self._has_result = self._is_last_pull
            version = self._served.n_steps if self._is_last_pull else self._steps.version
            self._adopting.append(round)
            return [ev.Run(Work(self._served.stage, WorkKind.ADOPT, None, self._peer, version), 1.0, (round,))]
        if round.kind == RoundKind.CHECKPOINT:
            self._to_keep.append(round)
        return [*self._evaluate_if_whole(round), *self._between_steps()]

    # ------------------------------------------------------------------------------------------------------- snapshots

    def _fetch(self, round: RoundId) -> ev.Actions:
        """Get a snapshot from the server, unless it was asked for before. An older one for a held-out loss is not
        needed any more."""
        if round.number <= self._last_fetched.get(round.series, -1):
            return []
        self._last_fetched[round.series] = round.number
        older = [one.id for one in self._engine if one.id.kind == round.kind == RoundKind.HELD_OUT]
        self._engine.open(self._served.spec(round))
        forgets = [action for other in older for action in self._engine.forget(other)]
        return [*forgets, ev.Send(self._served.server, ev.FetchResult(round))]

    def _evaluate_if_whole(self, round: RoundId) -> ev.Actions:
        """A held-out loss is to be measured with this snapshot, once it is here."""
        match self._to_evaluate:
            case ev.Received(_, ev.EvaluateMean(wanted)) as event if wanted == round and self._is_whole(round):
                self._held_out.handle(event)
                return self._between_steps()
        return []

    def _between_steps(self) -> ev.Actions:
        """The actions on snapshots that are possible now, none while a local step is under way."""
        if self._steps.is_stepping:
            return []
        return [*self._keep(), *self._held_out.between_steps()]

    def _is_whole(self, round: RoundId) -> bool:
        exchange = self._engine.at(round)
        return exchange is not None and exchange.complete

    def _keep(self) -> ev.Actions:
        """Keep a snapshot that is for a checkpoint. The next one may replace it only once its checkpoint is being
        written, which begins with the new version. Once the result of the run is here, it is not needed any more."""
        if self._has_result:
            late, self._to_keep = self._to_keep, deque()
            return [action for round in late for action in self._engine.forget(round)]
        if self._is_keeping or not self._to_keep:
            return []
        self._is_keeping = True
        round = self._to_keep.popleft()
        self._adopting.append(round)
        return [ev.Run(Work(self._served.stage, WorkKind.ADOPT, None, self._peer, round.number), 1.0, (round,))]

    def _on_kept(self, round: RoundId) -> ev.Actions:
        """A snapshot is kept, beside the optimizer's state after so many local steps: it can be written."""
        self._is_keeping = False
        stage, version = self._served.stage, round.number
        report = KeptReport(stage, version, self._peer, self._steps.version)
        return [*self._engine.forget(round), report, ev.MeanKept(version), ev.Updated(stage, version)]

    def _on_adopted(self) -> ev.Actions:
        """The server's parameters are this replica's, or a snapshot of them is kept."""
        round = self._adopting.popleft()
        return self._on_kept(round) if round.kind == RoundKind.CHECKPOINT else self._on_pulled()

    # ------------------------------------------------------------------------------------------------------------ pulls

    def _on_pulled(self) -> ev.Actions:
        """The server's parameters are this worker's; after the last pull they are the result."""
        pull, self._pull = self._pull, None
        assert pull is not None  # one is adopted at a time
        if self._is_last_pull:
            return [*self._engine.forget(pull), ev.Updated(self._served.stage, self._served.n_steps)]
        if self._steps.is_over:
            return [*self._engine.forget(pull), *self._finish_if_over()]
        return [*self._engine.forget(pull), *self._steps.begin()]

    def _finish_if_over(self) -> ev.Actions:
        """After the last local step and its push this worker waits for those of the others."""
        if not self._steps.is_over or self._push or self._pull or self._is_last_pull:
            return []
        finished = ev.Send(ev.COORDINATOR, ev.Finished(self._steps.version))
        return [*self._between_steps(), finished, *self._wait_to_pull(is_last=True)]

    def _answer(self, coordinator_term: int) -> ev.Actions:
        said = [*self._steps.say_again(), *self._held_out.say_again()]
        said += [ev.Send(ev.COORDINATOR, ev.Finished(self._steps.version))] if self._is_last_pull else []
        return self._known_groups.answer(coordinator_term, self._steps.n_steps, said)


class ParameterServer(RoundPolicy):
    """The server's side. It does one thing at a time, in the order in which it is asked for."""

    KINDS = KINDS
    READS = frozenset(
        {ev.ViewChanged, ev.Ran, ev.Summed, ev.Shard, ev.WantsParameters, ev.GroupFormed, ev.SnapshotCut}
        | {ev.CutTaken, ev.FetchResult, ev.GroupClosed, ev.AskReplicaState}
    )

    def __init__(self, stage: ServedStage):
        self._served = stage
        self._peer = stage.server
        self._view: ev.View | None = None
        self._engine = RoundEngine(stage.server, stage.slice_bytes, self)
        self._whole: dict[int, dict[int, RoundId]] = {}  # worker -> local step -> its push, all of it here
        self._n_added: dict[int, int] = {}  # worker -> local steps whose pushes are added, or about to be
        self._waiting_pulls: dict[int, ev.WantsParameters] = {}  # worker -> for which it waits
        self._finished: set[int] = set()  # workers whose last push is added
        self._allowed: dict[int, int] = {}  # worker -> the last local step that it may do before it pulls again
        self._snapshots = ServerSnapshots(stage, self._engine)
        self._works: deque[tuple[WorkKind, tuple[RoundId, ...]]] = deque()  # the first one runs
        self._last_pulls: set[int] = set()  # workers whose last pull is answered, or about to be
        self._is_over = False

    def handle(self, now_s: float, event: ev.Event) -> ev.Actions:
        match event:
            case ev.ViewChanged(view):
                return self._adopt(view)
            case ev.Received(_, ev.Shard() | ev.FetchResult()) | ev.Summed():
                return self._engine.handle(event)
            case ev.Received(header, ev.WantsParameters(round) as body) if self._knows(
                header.src, round, RoundKind.PULL
            ):
                self._waiting_pulls[header.src] = body
                return self._answer()
            case ev.Received(header, body) if self._view:
                return self._on_received(header, body)
            case ev.Ran(work):
                return self._on_ran(work)
        return []

    def _adopt(self, view: ev.View) -> ev.Actions:
        is_first_view = self._view is None
        self._view = view
        if not is_first_view:
            lost = sorted(self._n_added.keys() - view.by_peer.keys())
            dropped = [action for worker in lost for action in self._lose(worker)]
            return [*dropped, *self._answer(), *self._end_if_over()]
        self._n_added = dict.fromkeys(self._served.workers, view.n_committed)
        self._allowed = dict(self._n_added)
        self._snapshots.begin(view.n_committed)
        return [ev.Updated(self._served.stage, view.n_committed)]

    def _lose(self, worker: int) -> ev.Actions:
        """This worker is lost. Its pushes that are here are added or about to be; one of which only a
        part has come, and an answer to it, are given up."""
        del self._n_added[worker], self._allowed[worker]
        self._waiting_pulls.pop(worker, None)
        self._whole.pop(worker, None)
        queued = {round for _, rounds in self._works for round in rounds}
        unused = [one.id for one in self._engine if one.id.peer == worker and one.id not in queued]
        return [action for round in unused for action in self._engine.forget(round)]

    def _knows(self, src: int, round: RoundId, kind: RoundKind) -> bool:
        """Whether a round is of this kind, and one of a worker of this stage as it was admitted last."""
        member = self._view.by_peer.get(src) if self._view else None
        is_own = src in self._n_added and (round.kind, round.stage, round.peer) == (kind, self._served.stage, src)
        return is_own and member is not None and member.admission == round.view

    # ----------------------------------------------------------------------------------------------------------- pushes

    def _is_new(self, round: RoundId) -> bool:
        """Whether a round is a push that is not here yet: each is added once."""
        worker, step = round.peer, round.number
        is_known = self._knows(worker, round, RoundKind.PUSH)
        return is_known and step > self._n_added[worker] and step not in self._whole.get(worker, {})

    def spec(self, id: RoundId) -> RoundSpec | None:
        return self._served.spec(id) if self._is_new(id) else None

    def whole(self, exchange: Exchange) -> ev.Actions:
        round = exchange.id
        if round.kind == RoundKind.PULL:  # all of it is sent
            return self._engine.forget(round)
        if round.kind != RoundKind.PUSH:
            return self._snapshots.whole(exchange)
        self._whole.setdefault(round.peer, {})[round.number] = round
        return [*self._add(round.peer), *self._answer()]

    def _add(self, worker: int) -> ev.Actions:
        """Add the pushes of a worker that are here, in their order."""
        actions: ev.Actions = []
        whole = self._whole[worker]
        while round := whole.pop(self._n_added[worker] + 1, None):
            self._n_added[worker] = round.number
            snapshots = self._snapshots.push(worker, round.number)
            actions += [
                PushReport(self._served.stage, worker, round.number),
                *self._queue(WorkKind.ADOPT, round, *snapshots),
            ]
        return actions

    # ------------------------------------------------------------------------------------------------------------ pulls

    def _clock(self, worker: int) -> int:
        return self._n_added[worker] // self._served.wave

    def _answer(self) -> ev.Actions:
        """Answer the workers that wait, least peer first, if they are not too far ahead. A worker that has finished
        holds no other back, and gets the parameters when all have finished."""
        added = {w for w, wanted in self._waiting_pulls.items() if self._n_added[w] >= wanted.step}
        self._finished |= {worker for worker in added if self._waiting_pulls[worker].is_last}
        settled = self._snapshots.settle(self._n_added, self._finished)
        if self._snapshots.holds_pulls:
            return settled
        slowest = min([self._clock(worker) for worker in self._n_added if worker not in self._finished], default=None)
        actions: ev.Actions = settled
        for worker in sorted(added):
            is_held = slowest is not None and (
                worker in self._finished or self._clock(worker) - slowest > self._served.staleness
            )
            if not is_held:
                actions += self._pull(worker, self._waiting_pulls.pop(worker), slowest)
        return actions

    def _pull(self, worker: int, wanted: ev.WantsParameters, slowest: int | None) -> ev.Actions:
        round, clock = wanted.round, self._clock(worker)
        self._engine.open(self._served.spec(round))
        self._last_pulls |= {worker} if wanted.is_last else set()
        wave = self._served.wave
        self._allowed[worker] = wanted.step if wanted.is_last else (wanted.step // wave + 1) * wave
        behind = clock if slowest is None else slowest
        return [
            PullReport(self._served.stage, worker, wanted.step, clock, behind),
            *self._queue(WorkKind.LAY_OUT, round),
        ]

    # ------------------------------------------------------------------------------------------------------- snapshots

    def _on_received(self, header: ev.Header, body: ev.Message) -> ev.Actions:
        match body:
            case ev.GroupFormed(round):
                return self._lay_out(round, self._snapshots.choose(round, self._allowed))
            case ev.SnapshotCut(round, steps) if header.src == self._served.servers[0]:
                told = self._snapshots.answer_cut(header.src, body)
                return [*told, *self._lay_out(round, self._snapshots.take(round, steps))]
            case ev.CutTaken(round):
                self._snapshots.on_cut_taken(header.src, round)
                return self._answer()
            case ev.GroupClosed(round):
                return self._snapshots.close(round)
            case ev.AskReplicaState():
                return self._snapshots.answer(header.coordinator_term)
        return []

    def _lay_out(self, round: RoundId, begun: ev.Actions) -> ev.Actions:
        """A snapshot has begun, if there are reports of it: the parameters are copied before anything else changes
        them."""
        return [*begun, *self._queue(WorkKind.LAY_OUT, round), *self._answer()] if begun else []

    # ------------------------------------------------------------------------------------------------- one at a time

    def _queue(self, kind: WorkKind, *rounds: RoundId) -> ev.Actions:
        """Work for a round. A push is added to the snapshots among the rounds too."""
        self._works.append((kind, rounds))
        return [self._run()] if len(self._works) == 1 else []

    def _run(self) -> ev.Action:
        kind, rounds = self._works[0]
        return ev.Run(Work(self._served.stage, kind, None, self._peer, rounds[0].number), 1.0, rounds)

    def _on_ran(self, work: Work) -> ev.Actions:
        kind, rounds = self._works.popleft()
        actions: ev.Actions = [self._run()] if self._works else []
        actions += self._snapshots.on_ran(rounds)
        round = rounds[0]
        if kind == WorkKind.ADOPT:
            actions += self._engine.forget(round)
        elif round in self._engine and any(self._knows(w, round, RoundKind.PULL) for w in self._n_added):
            actions += self._engine.contribute((round, ((self._peer, round.number),), 1, NO_LOSSES))
        elif round.kind == RoundKind.PULL:  # it was answered, or its worker is lost
            actions += self._engine.forget(round)
        return [*actions, *self._end_if_over()]

    def _end_if_over(self) -> ev.Actions:
        """These parameters are the result, once the last pulls of all workers that are left are answered."""
        if self._is_over or self._works or not self._last_pulls >= self._n_added.keys():
            return []
        self._is_over = True
        return [ev.Updated(self._served.stage, self._served.n_steps)]


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup) -> Sync:
    config, plan, stage = setup.config, setup.plan, setup.stage
    servers = [server for (server,) in plan.roles.servers]
    served = ServedStage(
        stage=stage,
        servers=servers,
        workers=plan.placement[stage],
        n_steps=config.train.steps,
        n_elements=replica_elements(config, *plan.stages[stage]),
        slice_bytes=config.sync.slice_bytes,
        staleness=config.sync.server.staleness,
        wave=config.sync.server.wave,
        push_codec=config.sync.codec_spec,
    )
    if setup.peer == served.server:
        return ParameterServer(served)
    return Replica(served, replica_place(setup), HeldOutWork(held_out_place(setup)))


def _build_agreement(config: CoordinatorConfig, run: RunConfig, plan: Plan) -> Agreement:
    return ServerAgreement(config, run, plan)


def _copies(config: RunConfig, lo: int, hi: int) -> ReplicaCopies:
    """A worker keeps its parameters as of its last push, and what a codec has lost of its pushes. A pull takes the
    slices, the joined vector and the new parameters. A checkpoint takes as much, and a copy of the moments. A shared
    table may be on its way besides."""
    vector_bytes, table = FLOAT32_BYTES * replica_elements(config, lo, hi), moving_table_bytes(config, lo, hi)
    owed_bytes = vector_bytes if config.sync.codec != NONE else 0
    exchanging_bytes = 3 * vector_bytes + FLOAT32_BYTES * replica_moments(config, lo, hi)
    return ReplicaCopies(vector_bytes + owed_bytes + table, exchanging_bytes, exchanging_bytes + owed_bytes + table)


def _server_vectors(plan: Plan) -> int:
    """A push of each replica that waits to be added, and two snapshots: for a held-out loss, and for a checkpoint."""
    return plan.n_pipelines + 2


def _check(config: RunConfig, plan: Plan) -> str:
    if config.sync.delay:
        return f"sync.delay: got {config.sync.delay}, expected 0 with sync.kind {config.sync.kind}"
    if plan.schedule == STASH:
        return (
            f"plan.schedule: got {STASH}, expected 1f1b or gpipe with sync.kind server, where a replica continues from "
            "the server's parameters when a whole wave of its steps is done"
        )
    if config.train.on_nonfinite == "rollback":
        return "train.on_nonfinite: got rollback, expected stop or skip with sync.kind server"
    if config.optim.second_moment != "own":
        return (
            f"optim.second_moment: got {config.optim.second_moment}, expected own with sync.kind server, where nothing "
            "is averaged"
        )
    rows = plan.roles.servers
    if [len(row) for row in rows] != [1] * plan.n_stages:
        return (
            f"plan.roles.servers: got {[len(row) for row in rows]} peers for the stages, expected one for each of "
            f"{plan.n_stages} with sync.kind server"
        )
    for (server,), replicas in zip(rows, plan.placement, strict=True):
        if server <= max(replicas) or any(server in row for row in plan.placement):
            return (
                f"plan.roles.servers: got peer {server}, expected a peer that is no replica and has a greater number "
                "than the replicas of its stage, of which the least one writes the checkpoint"
            )
    return ""


def _period(config: RunConfig, plan: Plan) -> Period:
    """A wave. Replicas wait for one another from the first clock on that may be too far ahead."""
    wave, staleness = config.sync.server.wave, config.sync.server.staleness
    return Period(wave, 1 + wave * (staleness + 1))


ENTRY = SyncEntry(
    _build,
    _build_agreement,
    _check,
    replicas_may_differ=True,
    outlives_views=OF_OWN_STEPS | {ev.WantsParameters, ev.SnapshotCut, ev.CutTaken},
    plan_roles=frozenset({"servers"}),
    settings="server",
    server_vectors=_server_vectors,
    copies=_copies,
    period=_period,
)
