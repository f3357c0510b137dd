"""A run whose replicas may differ again, in one process, from what it has reported: the states that its replicas hold.

Everything in such a run is a pure function of its config and its log: who averaged with whom after how many local
steps, and in which order each server added pushes and answered pulls. Timing decides the log alone. So a replay comes
to the numbers of the run, in any arithmetic: the jitted functions of the stages (jaxdt.model.stage_arithmetic), bit for
bit where both compute with one build on the CPU, or residues (jaxdt.testing.independent.residues), exactly.

Nothing of the machines is used, but who adds up which numbers of a vector (jaxdt.sync.exchange.sharding).

- A replica does its next local step once all that the log has for it before is done, and the step's gradient is there.
- A group averages as soon as all its members have laid out what they had after the steps that the log names.
- A server does what is next in its log as soon as it can.

The outcome does not depend on the order in which these are done, so any order does. A pipeline that was lost and came
back is another one here: a pipeline's number is that of an incarnation (jaxdt.protocol.incarnations).
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxdt.protocol.incarnations import Incarnations
from jaxdt.protocol.reports import (
    GroupReport,
    HeldOutMeanReport,
    KeptReport,
    PullReport,
    PushReport,
    SnapshotReport,
    StateMeanReport,
)
from jaxdt.run.config import STAGE, RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan
from jaxdt.run.sizes import exchanged_elements
from jaxdt.sync.exchange import sharding

# Only the arithmetic looks into these.
State = Any
Params = Any
Gradient = Any
Vector = Any

Place = tuple[int, int]  # a stage and a pipeline
Moment = tuple[int, int, int]  # a stage, a pipeline, and local steps that its replica has done
SnapshotName = tuple[int, bool]  # a version, and whether it is that of a checkpoint
StateReport = StateMeanReport | HeldOutMeanReport | KeptReport
ServerReport = PushReport | PullReport | SnapshotReport

SERVER = -1  # in place of a pipeline
STEPPED, ADOPTED, PUSHED, TAKEN_OVER = "step", "adopt", "push", "take over"  # what a trail has


class Arithmetic(Protocol):
    """What a run computes with. A local step may use up the state that it is given, but not the parameters."""

    @property
    def n_samples(self) -> int:
        """The samples of a microbatch."""
        ...

    def fresh_state(self, stage: int) -> State: ...

    def params(self, state: State) -> Params: ...

    def kept(self, state: State) -> State:
        """A copy that no local step uses up."""
        ...

    def placed(self, stage: int, kept: State) -> State:
        """A state of its own from a copy."""
        ...

    def gradient(
        self, pipeline: int, step: int, params_of: Sequence[Params]
    ) -> tuple[Sequence[Gradient], Sequence[float], float]:
        """(the sum over all microbatches that a pipeline of the plan has in a step, at each stage; their squared norms;
        the mean loss), with these parameters of the stages."""
        ...

    def local_step(self, stage: int, state: State, gradient: Gradient, scale: float) -> State: ...

    def laid_out(
        self, stage: int, state: State, fragment: int, weight: int, owed: Vector | None
    ) -> tuple[Vector, Vector | None]:
        """(the contribution of a replica to a group, times its weight, and what is owed, as it goes over a link; what
        is lost of that, None if it is not made up for)."""
        ...

    def mean(self, contributions: Sequence[Vector], weight: int) -> tuple[Vector, Vector | None]:
        """(the sum of contributions, as it goes over a link, divided by their weight; what is lost of the sum)."""
        ...

    def owes(self, lost: Vector, of_sum: Vector, shard: tuple[int, int]) -> Vector:
        """What a member owes then: what it has lost, and the numbers lo..hi-1 of what is lost of the sum, which it has
        added up."""
        ...

    def averaged(self, stage: int, state: State, fragment: int, mean: Vector) -> State: ...

    def mean_state(self, states: Sequence[State]) -> State: ...

    def vector(self, state: State) -> Vector:
        """The parameters."""
        ...

    def change(self, vector: Vector, base: Vector, owed: Vector | None) -> tuple[Vector, Vector | None]:
        """(the difference of parameters and what is owed, as it goes over a link; what is owed then)."""
        ...

    def added(self, vector: Vector, change: Vector) -> Vector: ...

    def with_vector(self, stage: int, state: State, vector: Vector) -> State:
        """The state with these parameters."""
        ...


@dataclass(frozen=True)
class TrailEntry:
    """`what` has happened to a replica after `step` local steps of its own, or, for a push that a server adds, of the
    worker; and its state since."""

    what: str
    step: int
    state: State


@dataclass(eq=False)
class LoggedGroup:
    """A group, and the moments after which its members lay out; `adopting`: those of members that adopt its mean;
    `owed`: what each member owes then, by its place."""

    report: GroupReport
    moments: Sequence[Moment]
    adopting: Sequence[Moment]
    mean: Vector | None = None
    owed: Mapping[Place, Vector] = field(default_factory=dict[Place, Vector])


@dataclass
class Snapshot:
    """A server's parameters with the pushes up to the local step in `cut` of each pipeline. Those up to `steps` are
    added already."""

    cut: Sequence[int]
    vector: Vector
    steps: list[int]


def gradient_scales(config: RunConfig, n_samples: int, sq_norms: Sequence[float]) -> list[float]:
    """The factor on a summed gradient at each stage: the mean over samples, clipped by the norm over the pipeline or
    over the stage (sync.groups.clip). 0 for a norm that is not finite."""
    clip_norm = config.optim.clip_norm
    is_by_stage = not clip_norm or config.sync.groups.clip == STAGE
    clips_by = sq_norms if is_by_stage else [math.fsum(sq_norms)] * len(sq_norms)
    scales: list[float] = []
    for sq_norm in clips_by:
        norm = math.sqrt(sq_norm) / n_samples if math.isfinite(sq_norm) else math.inf
        clip = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
        scales.append(clip / n_samples if norm < math.inf else 0.0)
    return scales


class Replay:
    """The replicas and servers of a plan. `states[stage, pipeline]`, `n_steps` likewise: local steps done;
    `servers[stage]`: its state, of which the parameters count; `losses[pipeline]`: the mean loss of each local step;
    `kept`: states of the moments that `run` is asked for; `snapshots[name][stage]`. `trails`: what has happened to each
    replica and server (`SERVER` for a pipeline), if they are wanted."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        arithmetic: Arithmetic,
        incarnations: Incarnations | None = None,
        has_trails: bool = False,
    ):
        self.n_rows = config.train.steps
        self._config = config
        self._plan = plan
        self._arithmetic = arithmetic
        self._incarnations = incarnations or Incarnations(plan.n_pipelines)
        self._groups = config.sync.groups
        all_incarnations = self._incarnations.all
        self._planned = [one.pipeline for one in all_incarnations]
        self._first_steps = [one.first_step for one in all_incarnations]
        self._to_come = [number for number, one in enumerate(all_incarnations) if one.donor is not None]
        self._taken_over: dict[Place, State] = {}
        self.trails: dict[Place, list[TrailEntry]] | None = defaultdict(list) if has_trails else None
        begun = [number for number, one in enumerate(all_incarnations) if one.donor is None]
        stages = range(plan.n_stages)
        self.states = {(stage, number): arithmetic.fresh_state(stage) for stage in stages for number in begun}
        self.servers = [arithmetic.fresh_state(stage) for stage in stages] if plan.roles.servers else []
        self.n_steps = dict.fromkeys(self.states, 0)
        self.losses: list[list[float]] = [[] for _ in all_incarnations]
        self.kept: dict[Moment, State] = {}
        self.snapshots: dict[SnapshotName, dict[int, Snapshot]] = defaultdict(dict)
        self._n_wanted: Mapping[int, int] = {}
        self._todo: list[LoggedGroup] = []
        self._logs: list[deque[ServerReport]] = []
        self._to_keep: set[Moment] = set()
        self._params: dict[Moment, Params] = {}  # with which the forwards of a step compute
        self._gradients: dict[tuple[int, int], list[tuple[Gradient, float]]] = {}  # by pipeline and step
        self._to_lay_out: dict[Moment, int] = {}  # for a group of this fragment
        self._laid_out: dict[Moment, tuple[Vector, Vector | None]] = {}  # and what a codec has lost of it
        self._owed_to_groups: dict[tuple[Place, int], Vector | None] = {}  # by fragment
        self._n_readers: Counter[Moment] = Counter()  # groups that are going to read it
        self._due: dict[Moment, LoggedGroup] = {}
        self._bases: dict[Place, Vector] = {}  # the parameters as the server has them of a worker
        self._owed: dict[Place, Vector | None] = {}  # what a codec has lost of a worker's pushes
        self._pulled: dict[Place, int] = {}  # after which local step, last
        self._pushes: dict[Moment, Vector] = {}  # not added yet
        self._n_pushed = [[0] * plan.n_pipelines for _ in stages]

    def begin(self, version: int, states: Sequence[State]) -> None:
        """The run begins with these states, one of each stage, after `version` steps."""
        for stage, number in self.states:
            self.states[stage, number] = self._arithmetic.placed(stage, states[stage])
            self.n_steps[stage, number] = self._first_steps[number] = version
        self.servers = [self._arithmetic.placed(stage, states[stage]) for stage, _ in enumerate(self.servers)]

    def run(
        self,
        n_steps: Mapping[int, int],
        groups: Sequence[GroupReport] = (),
        logs: Sequence[Sequence[ServerReport]] = (),
        keep: Collection[StateReport] = (),
    ) -> None:
        """Do n_steps[pipeline] local steps, and average, push and pull as the log says: `groups` in its order,
        `logs[stage]` of its server. `keep`: reports of means and of checkpoints, whose states are kept. A lost pipeline
        may have done more steps than are known, as far as the log names them. A mean of states after the last row is
        the run's result, which its members adopt. BadInput for a log that does not fit."""
        self._plan_groups(groups)
        self._logs = [deque(log) for log in logs]
        self._to_keep = {moment for report in keep for moment in self._moments(report)}
        named = Counter[int]()
        acts = [one for log in logs for one in log if not isinstance(one, SnapshotReport)]
        done = [(report.stage, self._plan.seat(report.worker)[1], report.step) for report in acts]
        for _, pipeline, step in (*self._n_readers, *self._to_keep, *done):
            named[pipeline] = max(step, named[pipeline])
        self._n_wanted = {pipeline: max(n, named[pipeline]) for pipeline, n in n_steps.items()}
        while any(
            [
                *[self._average(group) for group in list(self._todo)],
                *[self._serve(stage) for stage in range(len(self._logs))],
                *[self._visit(place) for place in list(self.states)],
            ]
        ):
            pass
        left = [*(group.report for group in self._todo), *(log[0] for log in self._logs if log), *self._to_come]
        if left or any(self.n_steps[place] < self._n_wanted[place[1]] for place in self.states):
            raise BadInput(
                f"log: after {self.n_steps} local steps of {self._n_wanted} {len(left)} entries are left, first "
                f"{left[:1]}"
            )
        means = [report for report in keep if isinstance(report, StateMeanReport) and report.version == self.n_rows]
        for stage, report in {report.stage: report for report in means}.items():
            if len(report.members) > 1:
                mean = self.mean_state(report)
                for _, pipeline, _ in self._moments(report):
                    self._change((stage, pipeline), ADOPTED, self._arithmetic.placed(stage, mean))

    def states_of(self, report: StateReport) -> list[State]:
        """The states that a report names, which `run` was asked to keep."""
        moments = self._moments(report)
        if missing := [moment for moment in moments if moment not in self.kept]:
            raise BadInput(f"log: {report} names {missing}, after which no replica was between two steps")
        return [self.kept[moment] for moment in moments]

    def mean_state(self, report: StateMeanReport | HeldOutMeanReport) -> State:
        """The mean of the states that a report names."""
        return self._arithmetic.mean_state(self.states_of(report))

    def served_state(self, stage: int, state: State, vector: Vector | None = None) -> State:
        """A worker's state with parameters of its server: those at the end, or those of a snapshot."""
        vector = self._arithmetic.vector(self.servers[stage]) if vector is None else vector
        return self._arithmetic.with_vector(stage, state, vector)

    def _moments(self, report: GroupReport | StateReport) -> list[Moment]:
        if isinstance(report, KeptReport):
            return [(report.stage, self._plan.seat(report.worker)[1], report.step)]
        of = self._incarnations.of
        named = zip(report.members, report.steps, strict=True)
        return [(report.stage, of(self._plan.seat(peer)[1], report.view), step) for peer, step in named]

    def _change(self, place: Place, what: str, state: State, step: int | None = None) -> None:
        stage, pipeline = place
        if pipeline == SERVER:
            self.servers[stage] = state
        else:
            self.states[place] = state
        if self.trails is not None:
            self.trails[place].append(TrailEntry(what, self.n_steps[place] if step is None else step, state))

    # ---------------------------------------------------------------------------------------------------- local steps

    def _visit(self, place: Place) -> bool:
        """Let a replica do what it can now: lay its vector out, adopt a mean that is due, give its state to a pipeline
        that comes back, do its next step. Returns whether it did any of that."""
        (stage, pipeline), moment = place, (*place, self.n_steps[place])
        has_changed = moment in self._to_lay_out
        if has_changed:
            fragment, weight = self._to_lay_out.pop(moment), self._weight(pipeline)
            owed = self._owed_to_groups.get((place, fragment))
            self._laid_out[moment] = self._arithmetic.laid_out(stage, self.states[place], fragment, weight, owed)
        group = self._due.get(moment)
        if group:
            if group.mean is None:
                return has_changed
            del self._due[moment]
            fragment = group.report.fragment
            self._change(place, ADOPTED, self._arithmetic.averaged(stage, self.states[place], fragment, group.mean))
            self._owed_to_groups[place, fragment] = group.owed.get(place)
        if moment in self._to_keep:
            self._to_keep.discard(moment)
            self.kept[moment] = self._arithmetic.kept(self.states[place])
        has_begun = self._hand_over(moment)
        return self._step(moment) or has_begun or has_changed or group is not None

    def _hand_over(self, moment: Moment) -> bool:
        """A replica is between two steps: pipelines that come back with its state take it over, all stages at once.
        Whether one does."""
        (stage, pipeline, step), n_left = moment, len(self._to_come)
        for number in list(self._to_come):
            one = self._incarnations.all[number]
            if (one.donor, one.first_step) != (pipeline, step):
                continue
            self._taken_over.setdefault((stage, number), self._arithmetic.kept(self.states[stage, pipeline]))
            places = [(s, number) for s in range(self._plan.n_stages)]
            if all(place in self._taken_over for place in places):
                self._to_come.remove(number)
                for place in places:
                    self.n_steps[place] = step
                    self._change(place, TAKEN_OVER, self._arithmetic.placed(place[0], self._taken_over.pop(place)))
        return len(self._to_come) < n_left

    def _step(self, moment: Moment) -> bool:
        """The next local step of a replica, and its push; False if it is not due or its gradient is not there yet."""
        stage, pipeline, step = moment
        place = stage, pipeline
        if step >= self._n_wanted[pipeline] or not self._has_pulled(place):
            return False
        self._params.setdefault(moment, self._arithmetic.params(self.states[place]))
        gradients = self._gradients.get((pipeline, step)) or self._gradient(pipeline, step)
        if not gradients:
            return False
        gradient, scale = gradients[stage]
        self.n_steps[place] = step + 1
        state = self.states[place]
        self._change(place, STEPPED, self._arithmetic.local_step(stage, state, gradient, scale) if scale else state)
        if all(self.n_steps[s, pipeline] > step for s in range(self._plan.n_stages)):
            del self._gradients[pipeline, step]
        if self.servers:
            vector = self._arithmetic.vector(self.states[place])
            change = self._arithmetic.change(vector, self._bases[place], self._owed.get(place))
            self._pushes[*place, step + 1], self._owed[place] = change
            self._bases[place] = vector
        return True

    def _has_pulled(self, place: Place) -> bool:
        """Whether a replica has what its server gives it before its next step: after each wave, and at first."""
        step = self.n_steps[place]
        is_due = bool(self.servers) and (step % self._config.sync.server.wave == 0 or place not in self._pulled)
        return not is_due or self._pulled.get(place) == step

    def _gradient(self, pipeline: int, step: int) -> list[tuple[Gradient, float]]:
        """The gradient of a local step at each stage, and the factor on it; [] while a stage does not have the
        parameters with which its forwards compute."""
        moments = self._forwards_at(pipeline, step)
        if any(moment not in self._params for moment in moments):
            return []
        planned = self._planned[pipeline]
        params_of = [self._params[moment] for moment in moments]
        gradients, sq_norms, loss = self._arithmetic.gradient(planned, step, params_of)
        self.losses[pipeline].append(loss)
        for moment in set(moments).difference(self._forwards_at(pipeline, step + 1)):
            del self._params[moment]
        scales = gradient_scales(self._config, self._plan.shares[planned] * self._arithmetic.n_samples, sq_norms)
        found = self._gradients[pipeline, step] = list(zip(gradients, scales, strict=True))
        return found

    def _forwards_at(self, pipeline: int, step: int) -> list[Moment]:
        """The moments at which the stages do their forwards of a local step: some before they have done the steps
        between (Plan.n_ahead)."""
        plan, first = self._plan, self._first_steps[pipeline]
        return [(stage, pipeline, max(first, step - plan.n_ahead(stage))) for stage in range(plan.n_stages)]

    # --------------------------------------------------------------------------------------------------------- groups

    def _plan_groups(self, groups: Sequence[GroupReport]) -> None:
        """Find out who adopts which mean. When members are lost the others are told to average again. So a replica
        adopts the mean of the last group of its stage that names it after as many steps; it may have contributed to
        earlier ones, and one that is lost may have adopted the mean of one before anybody heard of that. The mean of
        one replica means nothing without an outer optimizer."""
        named = [(report, self._moments(report)) for report in groups]
        last = {moment: number for number, (_, moments) in enumerate(named) for moment in moments}
        for number, (report, moments) in enumerate(named):
            adopting = [moment for moment in moments if last[moment] == number]
            if not adopting or (len(moments) == 1 and self._groups.outer == "none"):
                continue
            group = LoggedGroup(report, moments, adopting)
            self._todo.append(group)
            self._n_readers.update(moments)
            self._to_lay_out |= dict.fromkeys(moments, report.fragment)
            for stage, pipeline, step in adopting:
                self._due[stage, pipeline, step + self._groups.lag_steps] = group

    def _average(self, group: LoggedGroup) -> bool:
        """The mean of a group, once all its members have laid out; whether they had."""
        if any(moment not in self._laid_out for moment in group.moments):
            return False
        self._todo.remove(group)
        weight = sum(self._weight(pipeline) for _, pipeline, _ in group.moments)
        laid_out = [self._laid_out[moment] for moment in group.moments]
        group.mean, of_sum = self._arithmetic.mean([sent for sent, _ in laid_out], weight)
        shards = self._shards(group.report)
        group.owed = {
            moment[:2]: self._arithmetic.owes(lost, of_sum, shard)
            for moment, (_, lost), shard in zip(group.moments, laid_out, shards, strict=True)
            if lost is not None and of_sum is not None
        }
        self._n_readers.subtract(group.moments)
        for moment in group.moments:
            if not self._n_readers[moment]:
                del self._laid_out[moment]
        return True

    def _shards(self, report: GroupReport) -> list[tuple[int, int]]:
        """The numbers lo..hi-1 that each member of a group adds up."""
        config, members = self._config, tuple(report.members)
        n_elements = exchanged_elements(config, *self._plan.stages[report.stage], report.fragment)
        slices = sharding(n_elements, members, n_elements, config.sync.codec_spec.block).slices
        return [(own[0][0], own[-1][1]) if (own := slices[member]) else (0, 0) for member in members]

    def _weight(self, pipeline: int) -> int:
        return self._groups.weight(self._plan.shares[self._planned[pipeline]])

    # -------------------------------------------------------------------------------------------------------- servers

    def _serve(self, stage: int) -> bool:
        """What is next in the log of a server, if it can be done; whether it could."""
        if not self._logs[stage]:
            return False
        report, server = self._logs[stage][0], self.servers[stage]
        if isinstance(report, SnapshotReport):
            name = report.version, report.is_checkpoint
            steps = list(self._n_pushed[stage])
            self.snapshots[name][stage] = Snapshot(report.cut, self._arithmetic.vector(server), steps)
        else:
            pipeline = self._plan.seat(report.worker)[1]
            place, moment = (stage, pipeline), (stage, pipeline, report.step)
            if isinstance(report, PushReport):
                if moment not in self._pushes:
                    return False
                self._add(moment, self._pushes.pop(moment))
            elif self.n_steps[place] != report.step:
                return False
            else:
                self._pulled[place] = report.step
                self._bases[place] = self._arithmetic.vector(server)
                self._change(
                    place, ADOPTED, self._arithmetic.with_vector(stage, self.states[place], self._bases[place])
                )
        self._logs[stage].popleft()
        return True

    def _add(self, moment: Moment, change: Vector) -> None:
        """A server adds a push, also to the snapshots whose cuts are not before it."""
        (stage, pipeline, step), server = moment, self.servers[moment[0]]
        vector = self._arithmetic.added(self._arithmetic.vector(server), change)
        self._change((stage, SERVER), PUSHED, self._arithmetic.with_vector(stage, server, vector), step)
        self._n_pushed[stage][pipeline] = step
        for snapshot in [of_stages[stage] for of_stages in self.snapshots.values() if stage in of_stages]:
            if step <= snapshot.cut[pipeline]:
                snapshot.vector = self._arithmetic.added(snapshot.vector, change)
                snapshot.steps[pipeline] = step
