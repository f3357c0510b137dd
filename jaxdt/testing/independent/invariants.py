"""The invariants of a run of independent pipelines, at every event and at its end.

Checked from outside: on messages, reports and the numbers that tensors hold (tensors.py). A number in brackets is that
of a promise (promises.py).
"""

import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxdt.membership.peer import Peer
from jaxdt.membership.run_state import ROWS, VIEW
from jaxdt.protocol import events as ev
from jaxdt.protocol.incarnations import Incarnations
from jaxdt.protocol.reports import (
    GroupReport,
    HeldOutMeanReport,
    KeptReport,
    PipelineEndReport,
    PipelineJoinReport,
    PullReport,
    PushReport,
    RestartedReport,
    SnapshotReport,
    StateMeanReport,
    StepReport,
    ViewReport,
)
from jaxdt.protocol.round_id import Place, RoundId, RoundKind
from jaxdt.run import codec as codecs
from jaxdt.run.config import STAGE
from jaxdt.run.errors import BadInput
from jaxdt.run.exit_codes import ExitCode
from jaxdt.run.work import WorkKind
from jaxdt.sim.faults import ENDS, LEAVE, Fault
from jaxdt.sim.sim_peer import CRASHED, Outcome
from jaxdt.testing.independent.group_rules import GroupRules, RuleBroken
from jaxdt.testing.independent.residues import Residues, Vector
from jaxdt.testing.independent.tensors import ROUNDED, ResidueTensors, Watcher
from jaxdt.testing.invariants import InvariantBroken
from jaxdt.testing.promises import ANSWERED, BUDGET, HELD, ONE_CUT, ONE_MEAN, PROGRESS, REPLAYED, STALENESS, Promise
from jaxdt.testing.replay import PUSHED, SERVER, Replay, TrailEntry, gradient_scales


@dataclass
class ServerClocks:
    """The clocks of one server's workers. `added`: worker -> the number of its pushes that the server has added;
    `finished`: workers that have said that they push no more; `wanted`: worker -> the local steps after which it waits
    for parameters; `lost`: workers that have left."""

    added: dict[int, int]
    finished: dict[int, int]
    wanted: dict[int, int]
    lost: set[int]


class IndependentInvariants:
    """The observer of one simulation."""

    def __init__(self, arithmetic: Residues, faults: Sequence[Fault] = ()):
        plan = arithmetic.plan
        self.tensors: dict[int, ResidueTensors] = {}
        self.now_s = 0.0
        self._arithmetic, self._config, self._plan = arithmetic, arithmetic.config, arithmetic.plan
        groups = arithmetic.config.sync.groups
        self._rules = [GroupRules(groups, plan.placement) for _ in range(groups.fragments)]  # of each fragment
        self._faults = any(fault.may_lose for fault in faults)
        self._loses = {peer for fault in faults for peer in fault.may_lose}
        self._means: dict[Place, dict[int, Vector]] = defaultdict(dict)  # by peer
        self._members: dict[Place, set[int]] = {}
        self._wanted_groups: dict[int, dict[int, int]] = defaultdict(dict)  # replica -> local steps -> fragment
        self._n_ahead = plan.n_ahead(0)
        self._closed: set[tuple[int, RoundId]] = set()  # (peer, round): it has heard that the round is over
        self._adopting: dict[int, deque[tuple[RoundId, ...]]] = defaultdict(deque)  # Work asked for, not done
        self._has_view = False
        self._waits_for_ever = False  # a peer was lost before the first view, which needs all
        self._has_ended = False  # the first coordinator
        self._has_stopped = False  # the last coordinator, since the run is over
        self._terms: dict[int, int] = defaultdict(int)  # peer -> the highest term of which it has heard
        self._lost: set[int] = set()  # pipelines that have lost a peer, and not come back
        self._has_lost = False  # any
        self._replicas_of: list[tuple[ResidueTensors, ...]] = []  # of the returns of pipelines so far, in their order
        self._incarnations = Incarnations(plan.n_pipelines)
        self._first_tensors: dict[int, ResidueTensors] = {}
        self._admissions: dict[int, int] = {}  # of peers that have come back
        self._knows_snapshot: dict[tuple[int, int], set[int]] = defaultdict(set)  # of a version and stage: who was told
        self._left_out: set[tuple[int, int]] = set()  # of these: may be missing
        self._lost_before: set[int] = set()  # those that were lost when the last coordinator died
        self._view_pending = False  # a view is being made durable
        self._begun: dict[int, int] = {}  # peer of the first stage -> local steps that it has begun
        self._enough: dict[int, int] = {}  # the same, when it has heard that it shall begin no more
        self._heard_steps: set[tuple[int, int]] = set()  # steps of pipelines of which the coordinator has heard
        self._n_nonfinite = 0
        servers = [row[0] for row in plan.roles.servers]
        self._clocks = {
            server: ServerClocks(dict.fromkeys(workers, 0), {}, {}, set())
            for server, workers in zip(servers, plan.placement, strict=bool(servers))
        }
        self.lead = 0  # the most clocks that a worker was ahead of the slowest when it got parameters

    @property
    def watcher(self) -> Watcher:
        """The calls by which tensors tell these invariants what they do."""
        return Watcher(
            broken=lambda peer, problem: self.broken(HELD, peer, problem),
            scale=self._scale,
            adopts=self._adopts,
            serves=self._serves,
            is_nonfinite=self._is_nonfinite,
        )

    def make_tensors(self, peer: int, stage: int) -> ResidueTensors:
        """The tensors of a peer at the start of the run."""
        tensors = self.tensors[peer] = ResidueTensors(peer, self._arithmetic, self.watcher)
        return tensors

    def begin_process(self, peer: int, machine: Peer, stage: int, version: int) -> ResidueTensors:
        """A peer continues with another machine, which has nothing of what the one before had."""
        norms = self.tensors[peer].norms
        tensors = self.make_tensors(peer, stage)
        tensors.norms |= norms  # others may still use those that they have heard
        self._begun.pop(peer, None)
        self._enough.pop(peer, None)
        self._adopting[peer].clear()
        for known in self._means.values():
            known.pop(peer, None)
        return tensors

    def restart_coordinator(self, disk: Mapping[str, Any]) -> None:
        """Another coordinator continues. Checkpoints that are due after rows which are durable it makes if a member
        knows of them, and else only the last one: an older one would hold the same as that."""
        n_rows = disk[ROWS]["n_rows"] if ROWS in disk else 0
        every = self._config.train.checkpoint_every_steps or self._config.train.steps
        for version in range(every, n_rows // every * every, every):
            for stage in range(self._plan.n_stages):
                if self._knows_snapshot[version, stage] <= self._loses:
                    self._left_out.add((version, stage))

    def broken(self, promise: Promise, peer: int, problem: str) -> NoReturn:
        name = "coordinator" if peer == ev.COORDINATOR else f"peer {peer}"
        raise InvariantBroken(f"{self.now_s:.3f} s: ({promise}) {name}: {problem}")

    def __call__(self, now_s: float, peer: int, event: ev.Event | Fault, actions: list[ev.Action]) -> None:
        self.now_s = now_s
        if isinstance(event, Fault):
            self._waits_for_ever |= peer != ev.COORDINATOR and event.kind in (*ENDS, LEAVE) and not self._has_view
            has_begun = self._has_view or self._view_pending
            if peer == ev.COORDINATOR and event.kind in ENDS and has_begun:
                self._has_ended = True
                self._lost_before = set(self._lost)
            return
        if peer == ev.COORDINATOR:
            try:
                self._on_coordinator_event(event, actions)
            except RuleBroken as rule:
                self.broken(rule.promise, ev.COORDINATOR, str(rule))
            return
        if isinstance(event, ev.Received):
            self._on_heard(peer, event)
        if isinstance(event, ev.Ran) and event.work.kind == WorkKind.ADOPT:
            self._adopting[peer].popleft()
        self._on_begun(peer, actions)

    # ---------------------------------------------------------------------------------------------------- coordinator

    def _on_coordinator_event(self, event: ev.Event, actions: list[ev.Action]) -> None:
        """Follow the groups only as long as the first coordinator runs: its successor begins with an empty history of
        groups, from the answers of its members. The replay of the log, the means and the budget are checked all the
        same."""
        self._has_stopped |= any(isinstance(action, ev.Stop) for action in actions)
        if isinstance(event, ev.Paused):
            for rules in self._rules:
                rules.paused(self.now_s)
        if not self._has_ended:
            for rules in self._rules:
                rules.advance(self.now_s, not self._view_pending)
        if isinstance(event, ev.Received):
            self._on_told(event)
        for action in actions:
            if isinstance(action, ViewReport | RestartedReport):
                self._on_view(action.members)
            if isinstance(action, PipelineJoinReport):
                self._on_return(action)
            if isinstance(action, PipelineEndReport):
                self._incarnations.hear(action)
            if isinstance(action, ev.Persist) and action.name == VIEW:
                self._view_pending = True
        if event == ev.Persisted(VIEW):
            self._view_pending = False
        told: dict[Place, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for action in actions:
            if isinstance(action, ev.Send) and isinstance(action.body, ev.GroupFormed):
                round, members = action.body.round, action.body.members
                told[round.place][action.dst] = members
                self._members.setdefault(round.place, set()).update(members)
        for action in actions:
            if isinstance(action, GroupReport) and not self._has_ended:
                self._rules[action.fragment].formed(self.now_s, action)
                expected = dict.fromkeys(action.members, tuple(action.members))
                found = told[RoundId(RoundKind.MEAN, action.stage, action.k, action.fragment).place]
                if found != expected and not self._lost:
                    self.broken(ANSWERED, ev.COORDINATOR, f"{action} has formed, told were {found}")

    def _on_view(self, members: Collection[int]) -> None:
        """A view is durable. A pipeline without one of its peers is lost, and leaves at all stages."""
        self._has_view = True
        placement = self._plan.placement
        self._first_tensors = self._first_tensors or dict(self.tensors)
        for row in placement:
            for pipeline, peer in enumerate(row):
                if peer not in members and pipeline not in self._lost:
                    self._lost.add(pipeline)
                    self._has_lost = True
                    for replicas in placement if not self._has_ended else ():
                        self._left(replicas[pipeline])

    def _on_return(self, report: PipelineJoinReport) -> None:
        """A pipeline is whole again, from now on."""
        if not self._incarnations.hear(report):
            return
        rows = self._plan.placement
        self._replicas_of.append(tuple(self.tensors[row[report.pipeline]] for row in rows))
        self._lost.discard(report.pipeline)
        for stage, row in enumerate(rows):
            peer = row[report.pipeline]
            self._admissions[peer] = report.admission
            self._wanted_groups[peer].clear()
            for rules in self._rules if not self._has_ended else ():
                rules.joined(stage, peer, row[report.donor])

    def _left(self, peer: int) -> None:
        for rules in self._rules:
            rules.left(peer)

    def _on_told(self, event: ev.Received) -> None:
        """The coordinator hears a message. Messages that a peer sent before it came back do not count."""
        if event.header.view < self._admissions.get(event.header.src, 0):
            return
        match event.body:
            case ev.WantsGroup(step, fragment):
                self._wanted_groups[event.header.src][step] = fragment
            case _:
                pass
        match event.body:
            case ev.WantsGroup(step, fragment) if not self._has_ended:
                self._rules[fragment].wants(self.now_s, event.header.src, step)
            case ev.Finished() if not self._has_ended:
                self._left(event.header.src)
            case ev.StepDone(step):
                self._heard_steps.add((event.header.src, step))

    # ----------------------------------------------------------------------------------------------------------- peers

    def _on_heard(self, peer: int, event: ev.Received) -> None:
        """A peer hears a message. Messages of a coordinator that has a successor by now do not count."""
        term = event.header.coordinator_term
        self._terms[peer] = max(term, self._terms[peer])
        if event.header.src == ev.COORDINATOR and term < self._terms[peer]:
            return
        match event.body:
            case ev.GroupFormed(round) if round.kind == RoundKind.STATE:
                self._knows_snapshot[round.number, round.stage].add(peer)
            case ev.GroupClosed(round):
                self._closed.add((peer, round))
            case ev.Ended() if not self._has_stopped:
                # A person has ended a coordinator that has a successor, before this peer has heard of that one.
                self._faults = True
                self._loses.add(peer)
            case ev.EndOfSteps():
                self._enough.setdefault(peer, self._begun.get(peer, 0))
            case ev.View() as view if peer in self._clocks:
                self._clocks[peer].lost |= self._clocks[peer].added.keys() - view.by_peer.keys()
            case ev.WantsParameters(_, step, is_last) if peer in self._clocks:
                clocks = self._clocks[peer]
                clocks.wanted[event.header.src] = step
                if is_last:
                    clocks.finished[event.header.src] = step

    def _on_begun(self, peer: int, actions: list[ev.Action]) -> None:
        """The first stage begins the steps of its pipeline; with "stash" some forwards of further steps belong to the
        one under way. Means are adopted in the order of their Runs."""
        for action in actions:
            self._check_bytes(peer, action)
            if isinstance(action, ev.Run) and action.work.kind == WorkKind.ADOPT:
                self._adopting[peer].append(action.rounds)
            if isinstance(action, ev.Run) and action.work.kind == WorkKind.FORWARD and action.work.stage == 0:
                step = action.work.step or 0
                if step >= self._enough.get(peer, math.inf) + self._n_ahead:
                    self.broken(BUDGET, peer, f"begins local step {step} after it has heard that there are enough")
                self._begun[peer] = max(step + 1, self._begun.get(peer, 0))

    def _check_bytes(self, peer: int, action: ev.Action) -> None:
        """Slices go as their codec says: those of averaging groups and pushes may be rounded."""
        sent = (
            action.letters
            if isinstance(action, ev.Post)
            else [(0, action.body, action.n_bytes)]
            if isinstance(action, ev.Send)
            else []
        )
        for _, body, n_bytes in sent:
            if isinstance(body, ev.Shard | ev.Reduced):
                key = body.key
                spec = self._config.sync.codec_spec if key.round.kind in ROUNDED else codecs.EXACT
                expected = codecs.exchanged_bytes(spec, key.hi - key.lo)
                if n_bytes != expected:
                    self.broken(HELD, peer, f"sends {key} as {n_bytes} bytes, expected {expected}")

    def _is_nonfinite(self, peer: int, step: int) -> bool:
        found = self._arithmetic.is_nonfinite(*self._plan.seat(peer), step)
        self._n_nonfinite += found
        return found

    def _scale(self, peer: int, step: int) -> float:
        """The factor that a gradient should have. All norms that it depends on have to be known by now."""
        stage, pipeline = self._plan.seat(peer)
        norms = [self.tensors[row[pipeline]].norms.get(step) for row in self._plan.placement]
        config, plan = self._config, self._plan
        if config.optim.clip_norm and config.sync.groups.clip != STAGE and None in norms:
            self.broken(HELD, peer, f"clips step {step} before the norms of its pipeline are known: {norms}")
        return gradient_scales(config, plan.shares[pipeline], [norm or 0.0 for norm in norms])[stage]

    def _adopts(self, peer: int, round: RoundId, vector: Vector) -> None:
        if round.kind == RoundKind.PUSH:
            self._added(peer, round)
            return
        if round.kind in (RoundKind.PULL, RoundKind.CHECKPOINT):
            return
        known = self._means[round.place]
        if peer in known:
            self.broken(ONE_MEAN, peer, f"adopts the mean of {round} again")
        if peer not in self._members.get(round.place, ()):
            self.broken(ONE_MEAN, peer, f"adopts the mean of {round} and is no member of it")
        known[peer] = vector
        staying = {member: mean for member, mean in known.items() if self._stays(member)}
        if len(set(staying.values())) > 1 and not self._faults:
            self.broken(ONE_MEAN, peer, f"adopts another mean of {round} than others: {staying}")

    def _averages(self, peer: int) -> bool:
        """Whether a replica stays, and is not the only one of its stage that does."""
        return self._stays(peer) and self._plan.n_pipelines - len(self._lost) > 1

    def _stays(self, peer: int) -> bool:
        """Whether a peer is a server, or of a pipeline that is not lost."""
        return peer in self._clocks or self._plan.seat(peer)[1] not in self._lost

    def _added(self, server: int, round: RoundId) -> None:
        """A server adds the push of a worker."""
        worker = round.peer
        added = self._clocks[server].added
        if round.number != added[worker] + 1:
            self.broken(ONE_MEAN, server, f"adds {round} after {added[worker]} pushes of peer {worker}")
        added[worker] = round.number

    def _serves(self, server: int, round: RoundId) -> None:
        """A server lays its parameters out for a worker: they hold all pushes that the bound promises."""
        settings, clocks = self._config.sync.server, self._clocks[server]
        worker = round.peer
        if clocks.added[worker] != clocks.wanted.get(worker):
            self.broken(STALENESS, server, f"answers peer {worker} without its own pushes: {clocks}")
        waited_for = [w for w, n in clocks.added.items() if clocks.finished.get(w) != n and w not in clocks.lost]
        if worker in clocks.finished:
            if waited_for:
                self.broken(STALENESS, server, f"gives peer {worker} the result before the pushes of {waited_for}")
            return
        slowest = min(clocks.added[w] // settings.wave for w in waited_for)
        lead = clocks.added[worker] // settings.wave - slowest
        if lead > settings.staleness:
            self.broken(STALENESS, server, f"peer {worker} goes on {lead} clocks ahead, the most are {settings}")
        self.lead = max(self.lead, lead)

    # --------------------------------------------------------------------------------------------------------- the end

    def ended(self, outcome: Outcome) -> None:
        """Check the invariants that hold when the simulation is over, or its time."""
        stop = outcome.stopped.get(ev.COORDINATOR)
        if stop is None and self._waits_for_ever and not self._has_view:
            return
        if stop is None:
            steps = {peer: tensors.n_steps for peer, tensors in self.tensors.items()}
            waiting = [rules.waiting() for rules in self._rules]
            self.broken(PROGRESS, ev.COORDINATOR, f"the run is not over, steps {steps}, waiting {waiting}")
        if stop.code == CRASHED and self._loses.issuperset(self._plan.peers):
            return  # a restarted coordinator would find no peer
        if stop.code:
            self._check_reason(stop)
            return
        self._check_means()
        n_steps = self._check_budget(outcome)
        self._check_rows(outcome, n_steps)
        self._check_wanted(n_steps)
        try:
            self._check_replay(outcome, n_steps)
        except BadInput as problem:
            self.broken(REPLAYED, ev.COORDINATOR, f"cannot be replayed: {problem}")
        for peer, round in sorted(self._closed):
            is_adopting = any(round in rounds for rounds in self._adopting[peer])  # the run may end in the middle of it
            if self._stays(peer) and round in self.tensors[peer].rounds and not is_adopting:
                self.broken(HELD, peer, f"still holds tensors of {round}, which is closed")

    def _check_rows(self, outcome: Outcome, n_steps: Mapping[int, int]) -> None:
        """All rows, in order. A coordinator that was started again tells the last ones again. The last rows are
        lost with a pipeline. If a coordinator dies, the steps that were in no durable row are forgotten of a pipeline
        that is lost already, or whose last stage is lost too; the others may have ended by then, so rows may be missing
        as far as they need these steps."""
        rows = [report.step for report in dict.fromkeys(outcome.of(StepReport))]
        n_rows = self._config.train.steps
        n_fewest = n_rows - self._n_rows_short
        if self._has_lost and self._has_ended:
            last_stage = self._plan.placement[-1]
            unknown = {p for p, peer in enumerate(last_stage) if peer in self._loses} | self._lost_before
            known = [(number, one) for number, one in enumerate(self._incarnations.all) if one.pipeline not in unknown]
            n_left = sum(n_steps[number] - one.first_step for number, one in known)
            n_fewest = min(n_fewest, n_left // self._plan.n_pipelines)
        if rows != [*range(len(rows))] or not n_fewest <= len(rows) <= n_rows:
            self.broken(BUDGET, ev.COORDINATOR, f"the run is over with rows {rows}, expected {n_fewest} to {n_rows}")

    def _check_means(self) -> None:
        """(17) among the members that have stayed. A lost one may have adopted a mean unknown to the others."""
        for place, known in self._means.items():
            staying = {peer: mean for peer, mean in known.items() if self._stays(peer)}
            if len(set(staying.values())) > 1:
                self.broken(ONE_MEAN, ev.COORDINATOR, f"members of {place} have adopted {staying}")

    def _check_reason(self, stop: ev.Stop) -> None:
        """A run may end without its result for these reasons only."""
        if stop.code == ExitCode.DIVERGED and self._n_nonfinite and self._config.train.on_nonfinite == "stop":
            return
        if not self._loses:
            self.broken(PROGRESS, ev.COORDINATOR, f"the run ends with code {stop.code}: {stop.reason}")
        # Without one of its peers a run does not begin.
        if stop.code not in {ExitCode.LOST, ExitCode.LOST if self._has_view else ExitCode.BAD_INPUT}:
            self.broken(PROGRESS, ev.COORDINATOR, f"ends with code {stop.code}: {stop.reason}")
        if self._has_view and self._goes_on_without(self._loses):
            self.broken(PROGRESS, ev.COORDINATOR, f"ends though a pipeline is whole: {stop.reason}")

    def _goes_on_without(self, peers: Collection[int]) -> bool:
        """Whether a run has its servers and a whole pipeline left when it has lost these peers."""
        rows = self._plan.placement
        return self._clocks.keys().isdisjoint(peers) and any(
            all(row[pipeline] not in peers for row in rows) for pipeline in range(self._plan.n_pipelines)
        )

    @property
    def _n_rows_short(self) -> int:
        """The number of rows that a lost pipeline may cost: as many as it had steps under way, with stash one a stage.
        The others may have ended by then, counting on these steps: they have told their stages the last step, and begin
        no other."""
        return 1 + self._plan.n_ahead(0) if self._has_lost else 0

    def _check_budget(self, outcome: Outcome) -> dict[int, int]:
        """Check (22). Returns the local steps of each pipeline; for a lost one the most that a replica of it has
        done."""
        plan, n_rows = self._plan, self._config.train.steps
        n_steps, incarnations = dict(self._incarnations.n_steps), self._incarnations.all
        if set(n_steps) != set(range(len(incarnations))):
            self.broken(BUDGET, ev.COORDINATOR, f"the run is over with the ends of pipelines {n_steps}")
        for number, peer, tensors in self._all_replicas():
            if not self._is_there(number):
                n_steps[number] = max(tensors.n_steps, n_steps[number])
            elif tensors.n_steps != n_steps[number]:
                self.broken(BUDGET, peer, f"has done {tensors.n_steps} steps, its pipeline {n_steps[number]}")
        n_wanted = plan.n_pipelines * n_rows
        n_done = sum(n_steps.values()) - sum(one.first_step for one in incarnations)
        n_short, n_heard = plan.n_pipelines * self._n_rows_short, len(self._heard_steps)
        if n_done < n_wanted - n_short or (n_heard != n_done and not self._faults and not self._has_ended):
            problem = f"the pipelines have done {n_steps}, {n_heard} were heard of, the run has {n_wanted}"
            self.broken(BUDGET, ev.COORDINATOR, problem)
        return n_steps

    def _all_replicas(self) -> list[tuple[int, int, ResidueTensors]]:
        """(pipeline, peer, its tensors) for each pipeline of the plan, and for each one that has come back."""
        rows, plan = self._plan.placement, self._plan
        found = [(p, peer, self._first_tensors[peer]) for row in rows for p, peer in enumerate(row)]
        for number, replicas in enumerate(self._replicas_of, plan.n_pipelines):
            pipeline = self._incarnations.all[number].pipeline
            found += [(number, row[pipeline], tensors) for row, tensors in zip(rows, replicas, strict=True)]
        return found

    def _is_there(self, number: int) -> bool:
        """Whether a pipeline is whole at the end."""
        planned = self._incarnations.all[number].pipeline
        return planned not in self._lost and self._incarnations.last_of(planned) == number

    def _check_wanted(self, n_steps: Mapping[int, int]) -> None:
        """Every replica that stays has wanted a group whenever one was due: fragment f after every_steps * (i + f / F)
        local steps, for all i, rounded down."""
        groups, plan = self._config.sync.groups, self._plan
        offsets = {math.floor(groups.every_steps * f / groups.fragments): f for f in range(groups.fragments)}
        averages = not self._clocks and groups.match != "none"
        for row in plan.placement if averages else ():
            for pipeline, peer in enumerate(row):
                number = self._incarnations.last_of(pipeline)
                steps = range(self._incarnations.all[number].first_step + 1, n_steps[number] + 1)
                places = {step: step % groups.every_steps for step in steps}
                due = {step: offsets[place] for step, place in places.items() if place in offsets}
                if self._stays(peer) and self._wanted_groups[peer] != due:
                    self.broken(ANSWERED, peer, f"has wanted groups {self._wanted_groups[peer]}, due were {due}")

    def _check_replay(self, outcome: Outcome, n_steps: Mapping[int, int]) -> None:
        plan, has_servers = self._plan, bool(self._clocks)
        logs: dict[int, list[PushReport | PullReport | SnapshotReport]] = {server: [] for server in self._clocks}
        for _, peer, report in outcome.reports:
            if isinstance(report, PushReport | PullReport | SnapshotReport):
                logs[peer].append(report)
        means = {(one.version, one.stage): one for one in outcome.of(StateMeanReport)}
        held_out = {(one.version, one.stage): one for one in outcome.of(HeldOutMeanReport)}
        keep = outcome.of(KeptReport) if has_servers else [*means.values(), *held_out.values()]
        replay = Replay(self._config, plan, self._arithmetic, self._incarnations, has_trails=True)
        replay.run(n_steps, outcome.of(GroupReport), list(logs.values()), keep)
        assert replay.trails is not None
        for number, peer, tensors in self._all_replicas():
            stage, _ = plan.seat(peer)
            self._check_trail(peer, tensors.trail, replay.trails[stage, number], self._is_there(number))
        if has_servers:
            params = self._check_servers(outcome, replay)
        else:
            self._check_state_means(replay, means)
            params = {key: replay.mean_state(report).params for key, report in held_out.items()}
        stages = range(plan.n_stages)
        whole = [v for v in {version for version, _ in params} if all((v, stage) in params for stage in stages)]
        losses = {v: self._arithmetic.held_out_loss([params[v, stage] for stage in stages]) for v in whole}
        self._check_held_out(outcome.of(StepReport), losses)

    def _check_state_means(self, replay: Replay, means: Mapping[tuple[int, int], StateMeanReport]) -> None:
        """The means of states for checkpoints, of all members that stay."""
        for (version, _), report in means.items():
            mean = replay.mean_state(report)
            there = [peer for peer in report.members if self._admissions.get(peer, 0) <= report.view]
            for peer in filter(self._averages, there):
                if (found := self.tensors[peer].means.get(version)) != mean:
                    self.broken(REPLAYED, peer, f"has {found} for version {version}, the replay {mean}")
        self._check_checkpoints(set(means))

    def _check_servers(self, outcome: Outcome, replay: Replay) -> dict[tuple[int, int], Vector]:
        """Servers hold what the replay of their logs does, and snapshots the same pushes at all stages. Returns the
        parameters for held-out losses."""
        assert replay.trails is not None
        for stage, server in enumerate(self._clocks):
            trail = [entry for entry in self.tensors[server].trail if entry.what == PUSHED]
            self._check_trail(server, trail, replay.trails[stage, SERVER])
        self._check_cuts(outcome, replay)
        kept = outcome.of(KeptReport)
        for one in kept:
            state, snapshot = self.tensors[one.worker].means.get(one.version), replay.snapshots[one.version, True]
            moments = replay.states_of(one)[0].moments
            expected = (snapshot[one.stage].vector, moments)
            if self._stays(one.worker) and (state is None or (state.params, state.moments) != expected):
                self.broken(REPLAYED, one.worker, f"has kept {state} for version {one.version}, the replay {expected}")
        self._check_kept({one.version for one in kept}, {one.version for one in outcome.of(StateMeanReport)})
        held_out = [(version, of) for (version, is_checkpoint), of in replay.snapshots.items() if not is_checkpoint]
        return {(version, stage): one.vector for version, of in held_out for stage, one in of.items()}

    def _check_kept(self, kept: set[int], whole: set[int]) -> None:
        """Checkpoints are those that the config asks for, and where nothing is lost the first of them is not forgotten.
        One that is late, since it waits for a held-out loss or its writer is slow, is left out when a later one is
        complete."""
        train = self._config.train
        every = train.checkpoint_every_steps or train.steps
        due = set(range(every, train.steps, every))
        may_miss = not due or train.eval_every_steps or self._faults or self._has_ended
        first = set[int]() if may_miss else {min(due)}
        if not kept <= whole <= due or not first <= whole:
            self.broken(REPLAYED, ev.COORDINATOR, f"servers kept {whole} and workers {kept}, due were {due}")

    def _check_cuts(self, outcome: Outcome, replay: Replay) -> None:
        """A snapshot that is whole holds as many pushes of each pipeline at every stage, but for those that are lost,
        and as many as was said."""
        told = {(one.version, False, one.stage): one.steps for one in outcome.of(HeldOutMeanReport)}
        told |= {(one.version, True, one.stage): one.steps for one in outcome.of(StateMeanReport)}
        left = [p for p in range(self._plan.n_pipelines) if p not in self._lost]
        for (version, is_checkpoint, stage), steps in told.items():
            of_stages = replay.snapshots[version, is_checkpoint]
            if of_stages[stage].steps != steps:
                problem = f"holds {steps} local steps, the replay {of_stages[stage].steps}"
                self.broken(REPLAYED, ev.COORDINATOR, f"stage {stage}, snapshot of {version}: {problem}")
            others = {other: tuple(of_stages[other].steps[p] for p in left) for other in of_stages}
            if all((version, is_checkpoint, other) in told for other in others) and len(set(others.values())) > 1:
                self.broken(ONE_CUT, ev.COORDINATOR, f"the snapshot of {version} holds the local steps {others}")

    def _check_held_out(self, rows: Sequence[StepReport], losses: Mapping[int, float]) -> None:
        """A row has the held-out loss that belongs to it, or none. Without a lost peer, the last row has one, and so
        does the first that should."""
        train = self._config.train
        every, n_rows = train.eval_every_steps, train.steps
        due = {version for version in range(1, n_rows + 1) if every and (version % every == 0 or version == n_rows)}
        found = {row.step + 1: row.eval_loss for row in rows if row.eval_loss is not None}
        for version, loss in found.items():
            if version not in due or loss != losses.get(version):
                expected = losses.get(version) if version in due else None
                self.broken(
                    REPLAYED, ev.COORDINATOR, f"row {version - 1} has held-out loss {loss}, expected {expected}"
                )
        expected = {min(due), n_rows} if due and not self._faults else set[int]()
        if not expected <= found.keys():
            self.broken(REPLAYED, ev.COORDINATOR, f"rows have held-out losses {found}, expected {sorted(expected)}")

    def _check_checkpoints(self, found: set[tuple[int, int]]) -> None:
        """Every checkpoint that the config asks for has a mean of states at each stage, unless it is left out after a
        coordinator's restart. The run may end while that before the last one is under way."""
        plan, train = self._plan, self._config.train
        every = train.checkpoint_every_steps or train.steps
        versions = {*range(every, train.steps, every), train.steps}
        expected = {(version, stage) for version in versions for stage in range(plan.n_stages)}
        newest = max((version for version in versions if version < train.steps), default=None)
        may_miss = {newest, train.steps} if plan.n_pipelines == 1 else {newest}  # the result is that of the only one
        if not {key for key in expected - self._left_out if key[0] not in may_miss} <= found <= expected:
            self.broken(REPLAYED, ev.COORDINATOR, f"means of states are {sorted(found)}, expected {sorted(expected)}")

    def _check_trail(
        self, peer: int, found: Sequence[TrailEntry], expected: Sequence[TrailEntry], stays: bool = True
    ) -> None:
        """Compare a replica's changes with the replay. The last change of a lost replica is left out, since it may be a
        mean unknown to the others."""
        for got, wanted in zip(found if stays else found[:-1], expected, strict=False):
            if got != wanted:
                self.broken(REPLAYED, peer, f"has {got}, the replay of the log {wanted}")
        if stays and len(found) != len(expected):
            self.broken(REPLAYED, peer, f"has {len(found)} changes of its parameters, the replay {len(expected)}")
