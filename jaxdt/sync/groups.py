"""Replicas that may differ: each does local steps by its own gradient, and now and then averages in a group.

After its backward Work a replica updates its parameters by itself, a local step. Every few local steps it says that it
wants a group, and waits. The coordinator's part (jaxdt.sync.group_scheduler) answers with a group. Its members lay
their parameters out, add them up as in all-reduce, each an owner of one shard, and go on from the mean. Nothing is
agreed beyond the group: a mean is adopted as soon as it is whole.

The gradient is clipped by the norm over the own pipeline, whose members tell one another theirs. The first stage begins
the pipeline's steps, so it decides how many there are, when the coordinator says that the run has enough of them.
After the last step the whole state, with the optimizer's, is averaged over all replicas of the stage: that is the
result of the run. On the way such means are kept aside for checkpoints, while the replicas go on.
"""

# A machine matches the few events that it reads and answers [] to all others.
# pyright: reportMatchNotExhaustive=false

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdt.membership.agreement import Agreement
from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol.events import (
    COORDINATOR,
    Accumulated,
    Action,
    Continue,
    Drained,
    EndOfSteps,
    Event,
    Finished,
    Forget,
    Free,
    GroupClosed,
    GroupFormed,
    Holds,
    LastStep,
    Message,
    NotFinite,
    Post,
    Ran,
    Ready,
    Received,
    Reduced,
    Restored,
    ResultHeld,
    Round,
    Run,
    Send,
    Shard,
    ShareDone,
    SliceKey,
    StepDone,
    StepNorm,
    Stepped,
    Summed,
    Suspect,
    Tally,
    Updated,
    View,
    ViewChanged,
    WantsGroup,
)
from jaxdt.protocol.ledger import Ledger
from jaxdt.protocol.participants import EachOnce, Participants
from jaxdt.spec.config import RunConfig
from jaxdt.spec.peer_setup import PeerSetup
from jaxdt.spec.plan import Plan
from jaxdt.spec.sizes import group_name, state_name, sync_groups
from jaxdt.spec.work import ADOPT, LAY_OUT, LOCAL_STEP, NORM, Work
from jaxdt.sync.base import SyncEntry
from jaxdt.sync.exchange import FLOAT_BYTES, Bounds, Exchange, RoundSpec
from jaxdt.sync.group_scheduler import GroupScheduler
from jaxdt.sync.local_steps import local_scale
from jaxdt.sync.matching.base import matcher_entry

NO_LOSSES = Tally()


@dataclass(frozen=True)
class ReplicaOptions:
    """One replica's place and rules. `pipeline`: the members of its pipeline, in the order of stages. It does `n_steps`
    local steps if all pipelines are equally fast, and averages every `every_steps` of them (0: never). `n_elements`:
    numbers of its parameters, `slice_elements` of a slice. With `has_outer` a mean means more than its adoption, also
    that of one replica."""

    peer: int
    stage: int
    pipeline: Sequence[int]
    n_steps: int
    every_steps: int
    n_elements: int
    slice_elements: int
    clip_norm: float
    has_outer: bool

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == len(self.pipeline) - 1

    @property
    def others(self) -> list[int]:
        """The other members of the pipeline."""
        return [peer for peer in self.pipeline if peer != self.peer]


class Groups:
    """One peer's side."""

    READS = frozenset(
        {ViewChanged, Ready, Restored, Accumulated, Drained, Ran, Summed, StepNorm, GroupFormed, Shard, Reduced}
        | {GroupClosed, Continue, EndOfSteps, LastStep}
    )

    def __init__(self, options: ReplicaOptions):
        self._options = options
        self._peer = options.peer
        self._ledger = Ledger()
        self._view: View | None = None
        self._version = 0  # local steps done
        self._n_begun = 0  # local steps begun
        self._n_words = 0  # of the whole state
        self._sq_norms: dict[int, dict[int, float]] = {}  # local step -> member of the pipeline -> its part
        self._exchanges: dict[Round, Exchange] = {}
        self._early: dict[Round, list[tuple[int, Shard]]] = {}  # came before GroupFormed
        self._laying_out: deque[tuple[Round, int]] = deque()  # and the local steps of what is laid out
        self._contributed: dict[Round, int] = {}  # after how many local steps, until the result is here
        self._adopting: dict[Round, bool] = {}  # whose mean is being adopted, and whether all members hold it
        self._snapshots: list[GroupFormed] = []  # wait for the end of the step under way, and of its group
        self._is_stepping = False
        self._waits_for_group = False
        self._waits_to_begin = False
        self._may_do = options.n_steps  # the first stage begins no step beyond
        self._n_steps: int | None = None  # local steps in all, once that is known
        self._is_finished = False

    def handle(self, now_s: float, event: Event) -> list[Action | Event]:
        match event:
            case Received():
                return self._received(event.header.src, event.body) if self._view else []
            case Accumulated():
                self._ledger.add(event.step, (event.stage, event.microbatch), event.n_samples)
                if event.loss_sum is not None:
                    self._ledger.measured(event.step, Tally(event.loss_sum, event.n_samples))
            case Drained(step):
                return [Run(Work(self._options.stage, NORM, None, self._peer, step))]
            case Ran(work):
                return self._ran(work, event.values)
            case Summed(key, digest, sq_norm):
                return self._on_summed(key, digest, sq_norm)
            case Ready(n_words=n_words):
                self._n_words = n_words
            case ViewChanged(view):
                return self._adopt(view)
            case Restored(version) if version == self._version:
                return [Updated(self._options.stage, version), *([] if self._view else [Holds(None)])]
        return []

    def _received(self, src: int, body: Message) -> list[Action | Event]:
        match body:
            case StepNorm(step, sq_norm) if src in self._options.pipeline:
                self._sq_norms.setdefault(step, {})[src] = sq_norm
                return self._step_if_clipped(step)
            case Shard():
                return self._on_shard(src, body)
            case Reduced():
                return self._on_reduced(src, body)
            case GroupFormed():
                return self._on_formed(body)
            case GroupClosed(round):
                return self._on_closed(round)
            case Continue(until):
                self._may_do = max(self._may_do, until)
                return self._begin() if self._waits_to_begin else []
            case EndOfSteps() if self._n_steps is None:
                return self._end_of_steps()
            case LastStep(n_steps) if src == self._options.pipeline[0]:
                self._n_steps = n_steps
                return self._finish_if_done()
        return []

    def _adopt(self, view: View) -> list[Action | Event]:
        is_first_view = self._view is None
        self._view = view
        if not is_first_view:
            return []
        self._version = self._n_begun = view.n_committed
        updated = Updated(self._options.stage, self._version)
        return [updated, *([] if self._version >= self._options.n_steps else self._begin())]

    # ----------------------------------------------------------------------------------------------------- local steps

    def _begin(self) -> list[Action | Event]:
        """The next local step begins, unless there is none, or the coordinator has to be asked first."""
        self._waits_to_begin = self._is_stepping = False
        snapshots, self._snapshots = self._snapshots, []
        actions = [action for formed in snapshots for action in self._on_formed(formed)]
        if self._version == self._n_steps:
            return actions + self._finish_if_done()
        if self._options.is_first_stage and self._version >= self._may_do:
            self._waits_to_begin = True
            return [*actions, Send(COORDINATOR, ShareDone(self._version))]
        self._n_begun = self._version + 1
        self._is_stepping = True
        return [*actions, Stepped(self._options.stage, self._version)]

    def _ran(self, work: Work, values: dict[str, float]) -> list[Action | Event]:
        step = work.step
        assert step is not None  # as in all Work of a run
        if work.kind == NORM:
            return self._normed(step, values.get("sq_norm", 0.0))
        if work.kind == LOCAL_STEP:
            return self._stepped(step)
        if work.kind == LAY_OUT:
            return self._laid_out()
        return self._adopted() if work.kind == ADOPT else []

    def _normed(self, step: int, sq_norm: float) -> list[Action | Event]:
        """The norm of the own gradient is known. Where the gradient is clipped the other stages have to know it."""
        self._sq_norms.setdefault(step, {})[self._peer] = sq_norm
        others = self._options.others if self._options.clip_norm else []
        body = StepNorm(step, sq_norm)
        told = [Post(tuple([(peer, body, 0) for peer in others]))] if others else []
        return [*told, *self._step_if_clipped(step)]

    def _step_if_clipped(self, step: int) -> list[Action | Event]:
        """The local step, once the norms that clip its gradient are here. A gradient that is not finite changes
        nothing: the factor on it is 0."""
        sq_norms = self._sq_norms.get(step, {})
        if self._peer not in sq_norms or (self._options.clip_norm and len(sq_norms) < len(self._options.pipeline)):
            return []
        sq_norm = self._pipeline_sq_norm(step)
        scale = local_scale(sq_norm, self._ledger.n_samples(step), self._options.clip_norm)
        told = [] if math.isfinite(sq_norm) else [Send(COORDINATOR, NotFinite(step))]
        return [*told, Run(Work(self._options.stage, LOCAL_STEP, None, self._peer, step), scale)]

    def _pipeline_sq_norm(self, step: int) -> float:
        """Of all stages if the gradient is clipped, else of this one."""
        sq_norms = self._sq_norms[step]
        return math.fsum(sq_norms[peer] for peer in self._options.pipeline if peer in sq_norms)

    def _stepped(self, step: int) -> list[Action | Event]:
        self._version = step + 1
        actions: list[Action | Event] = [Free(step)]
        if self._options.is_last_stage:
            is_known = len(self._sq_norms[step]) == len(self._options.pipeline)
            sq_norm = self._pipeline_sq_norm(step) if is_known else None
            done = StepDone(step, self._ledger.n_samples(step), self._ledger.tally(step), sq_norm)
            actions.append(Send(COORDINATOR, done))
        self._ledger.free((step,))
        del self._sq_norms[step]
        if self._options.every_steps and self._version % self._options.every_steps == 0:
            self._waits_for_group = True
            return [*actions, Send(COORDINATOR, WantsGroup(self._version))]
        return actions + self._begin()

    # -------------------------------------------------------------------------------------------------- the last step

    def _end_of_steps(self) -> list[Action | Event]:
        """The step that is under way is the pipeline's last one."""
        self._n_steps = max(self._version, self._n_begun)
        body = LastStep(self._n_steps)
        letters = tuple([(peer, body, 0) for peer in self._options.others])
        return [*([Post(letters)] if letters else []), *self._finish_if_done()]

    def _finish_if_done(self) -> list[Action | Event]:
        if self._is_finished or self._version != self._n_steps or self._waits_for_group:
            return []
        self._is_finished = True
        self._is_stepping = False
        return [Send(COORDINATOR, Finished(self._version))]

    # ------------------------------------------------------------------------------------------------------- a group

    def _on_formed(self, formed: GroupFormed) -> list[Action | Event]:
        round, members = formed.round, formed.members
        if round in self._exchanges or self._peer not in members:
            return []
        if self._is_state(round) and self._is_stepping:
            self._snapshots.append(formed)
            return []
        is_alone = len(members) == 1
        if is_alone and not self._is_snapshot(round) and (self._is_state(round) or not self._options.has_outer):
            return self._averaged(round)
        n_elements = self._n_words if self._is_state(round) else self._options.n_elements
        spec = RoundSpec(round, n_elements, Participants(members, members, members), EachOnce(members))
        exchange = Exchange(self._peer, spec, self._options.slice_elements)
        self._exchanges[round] = exchange
        for src, shard in self._early.pop(round, []):
            self._keep(exchange, src, shard)
        self._laying_out.append((round, self._version))
        work = Work(self._options.stage, LAY_OUT, None, self._peer, self._version)
        return [Run(work, rounds=(round,))]

    def _is_state(self, round: Round) -> bool:
        """Whether a round averages the whole state."""
        return round.group == state_name(self._options.stage)

    def _is_snapshot(self, round: Round) -> bool:
        """Whether the mean is kept aside for a checkpoint, and this peer goes on with its own state."""
        return self._is_state(round) and round.step < self._options.n_steps

    def _laid_out(self) -> list[Action | Event]:
        """The vector is there: it goes to the owners. Work of one kind is done in the order in which it was asked
        for."""
        round, version = self._laying_out.popleft()
        exchange = self._exchanges[round]
        self._contributed[round] = version
        frozen = exchange.freeze(((self._peer, version),), 1, NO_LOSSES)
        return [frozen, *(self._sum(exchange, bounds) for bounds in exchange.addable)]

    def _keep(self, exchange: Exchange, src: int, shard: Shard) -> Bounds | None:
        """A part of a slice that this peer adds up; its bounds if all parts are here."""
        bounds = (shard.key.lo, shard.key.hi)
        if bounds not in exchange.parts or src not in exchange.contributor_set:
            return None
        exchange.parts[bounds][src] = shard
        return bounds if exchange.has_all_parts(bounds) else None

    def _on_shard(self, src: int, shard: Shard) -> list[Action | Event]:
        exchange = self._exchanges.get(shard.key.round)
        if exchange is None:
            self._early.setdefault(shard.key.round, []).append((src, shard))
            return []
        bounds = self._keep(exchange, src, shard)
        return [self._sum(exchange, bounds)] if bounds else []

    def _sum(self, exchange: Exchange, bounds: Bounds) -> Action:
        added = exchange.add_up(bounds)
        return self._suspect(exchange, added) if isinstance(added, str) else added

    def _on_summed(self, key: SliceKey, digest: int, sq_norm: float) -> list[Action | Event]:
        exchange = self._exchanges.get(key.round)
        given_out = exchange.give_out(key, digest, sq_norm) if exchange else None
        if exchange is None or given_out is None:
            return []
        post, body = given_out
        return [post, *self._hold(exchange, body)]

    def _on_reduced(self, src: int, reduced: Reduced) -> list[Action | Event]:
        exchange, bounds = self._exchanges.get(reduced.key.round), (reduced.key.lo, reduced.key.hi)
        if exchange is None or bounds in exchange.sums or not exchange.gives(src, bounds):
            return []
        problem = exchange.problem(reduced.cover)
        return [self._suspect(exchange, problem)] if problem else self._hold(exchange, reduced)

    def _suspect(self, exchange: Exchange, problem: str) -> Action:
        return Send(COORDINATOR, Suspect(self._peer, f"{exchange.round}: {problem}"))

    def _hold(self, exchange: Exchange, sum: Reduced) -> list[Action | Event]:
        """Once the whole sum is here, the mean is adopted."""
        if not exchange.hold(sum):
            return []
        round = exchange.round
        held = Send(COORDINATOR, ResultHeld(round, exchange.result().digest, self._contributed.pop(round)))
        step = round.step if self._is_state(round) else self._version
        work = Work(self._options.stage, ADOPT, None, self._peer, step)
        self._adopting[round] = False
        return [held, Run(work, 1.0 / len(exchange.contributors), (round,))]

    def _adopted(self) -> list[Action | Event]:
        """The mean is here, and nobody may ask for it any more: then its slices can go."""
        round = next(iter(self._adopting))
        is_closed = self._adopting.pop(round)
        return [*(self._on_closed(round) if is_closed else []), *self._averaged(round)]

    def _averaged(self, round: Round) -> list[Action | Event]:
        """The mean of the round is this peer's; if it is that of the whole state, the run is over here."""
        if self._is_state(round):
            return [Updated(self._options.stage, round.step)]
        self._waits_for_group = False
        return self._begin()

    def _on_closed(self, round: Round) -> list[Action | Event]:
        if round in self._adopting:
            self._adopting[round] = True
            return []
        return [Forget(round)] if self._exchanges.pop(round, None) else []


# ------------------------------------------------------------------------------------------------------ table entry


def _build(setup: PeerSetup) -> Groups:
    config, plan, stage = setup.config, setup.plan, setup.stage
    _, pipeline = plan.seat(setup.peer)
    averages = matcher_entry(config.sync.groups.match).averages
    sizes = {group.name: group.n_elements for group in sync_groups(config, plan)}
    options = ReplicaOptions(
        peer=setup.peer,
        stage=stage,
        pipeline=[row[pipeline] for row in plan.placement],
        n_steps=config.train.steps,
        every_steps=config.sync.groups.every_steps if averages else 0,
        n_elements=sizes[group_name(stage)],
        slice_elements=max(1, config.sync.slice_bytes // FLOAT_BYTES),
        clip_norm=config.optim.clip_norm,
        has_outer=config.sync.groups.outer != "none",
    )
    return Groups(options)


def _build_agreement(config: CoordinatorConfig, run: RunConfig, plan: Plan) -> Agreement:
    return GroupScheduler(config, run, plan)


def _check(config: RunConfig, plan: Plan) -> str:
    groups = config.sync.groups
    if config.sync.delay:
        return f"sync.delay: got {config.sync.delay}, expected 0 with sync.kind {config.sync.kind}"
    if config.model.tied_head and plan.n_stages > 1:
        return (
            "model.tied_head: got true, expected false with sync.kind groups and several stages, whose two copies of "
            "the table would be averaged in different groups"
        )
    if config.train.on_nonfinite == "rollback":
        return "train.on_nonfinite: got rollback, expected stop or skip with sync.kind groups"
    if config.train.eval_every_steps:
        return f"train.eval_every_steps: got {config.train.eval_every_steps}, expected 0 with sync.kind groups"
    if groups.outer != "none" and groups.match != "all":
        return (
            f"sync.groups.outer: got {groups.outer}, expected none with sync.groups.match {groups.match}: the outer "
            "optimizer's state would differ between replicas"
        )
    if plan.n_pipelines == 1:
        return ""
    return matcher_entry(groups.match).check(config, plan)


ENTRY = SyncEntry(
    _build,
    _build_agreement,
    _check,
    replicas_may_differ=True,
    outlives_views=frozenset({StepNorm, LastStep}),
)
