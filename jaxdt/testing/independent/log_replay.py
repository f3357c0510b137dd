"""A run of independent pipelines again, from what it has reported: the numbers that its replicas should hold.

Nothing of the machines is used. A replica does its next local step once all that the log has for it before is done,
and the gradient of that step is there; a group averages as soon as all its members have laid out what they had after
the steps that the log names. The outcome does not depend on the order, so any order does.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from jaxdt.protocol.reports import (
    GroupReport,
    HeldOutMeanReport,
    KeptReport,
    PipelineJoinReport,
    PullReport,
    PushReport,
    SnapshotReport,
    StateMeanReport,
)
from jaxdt.run.config import STAGE, RunConfig
from jaxdt.run.plan import Plan
from jaxdt.testing.independent import residues
from jaxdt.testing.independent.residues import State, Vector
from jaxdt.testing.independent.tensors import ADOPTED, PUSHED, STEPPED, TAKEN_OVER, TrailEntry

Place = tuple[int, int]  # a stage and a pipeline; one that has come back is another one, behind those of the plan
Moment = tuple[int, int, int]  # a stage, a pipeline, and local steps that its replica has done


class LogProblem(Exception):
    """The log cannot be that of a run: why."""


@dataclass(frozen=True)
class RunShape:
    """The facts that a replay needs beside the log. `nonfinite`: the stage, pipeline and local step whose gradient is
    not finite, if there is one."""

    config: RunConfig
    plan: Plan
    nonfinite: tuple[int, int, int] | None = None

    @property
    def clips_alone(self) -> bool:
        """Whether each stage is clipped by its own norm."""
        return self.config.sync.groups.clip == STAGE

    def scales(self, pipeline: int, step: int, norms: Sequence[float]) -> list[float]:
        """The factor on the summed gradient of a local step at each stage, if `norms` are the squared norms of all
        stages: the mean over samples, clipped by the norm over the pipeline or the stage. 0 for a norm that is not
        finite."""
        clip_norm = self.config.optim.clip_norm
        clips_by = norms if self.clips_alone or not clip_norm else [sum(norms)] * len(norms)
        return [self._scale(pipeline, sq_norm) for sq_norm in clips_by]

    def _scale(self, pipeline: int, sq_norm: float) -> float:
        n_samples, clip_norm = self.plan.shares[pipeline], self.config.optim.clip_norm
        norm = math.sqrt(sq_norm) / n_samples
        if not math.isfinite(norm):
            return 0.0
        return min(1.0, clip_norm / norm) / n_samples if clip_norm and norm else 1 / n_samples

    def is_nonfinite(self, stage: int, pipeline: int, step: int) -> bool:
        return (stage, pipeline, step) == self.nonfinite


@dataclass(frozen=True)
class Return:
    """Pipeline `planned` of the plan comes back with the states that pipeline `donor` of a replay has after `step`
    local steps; its peers were admitted with view `admission`."""

    planned: int
    donor: int
    step: int
    admission: int


def returns_of(plan: Plan, reports: Sequence[PipelineJoinReport]) -> list[Return]:
    """Each return once, in the order of the log."""
    found: dict[tuple[int, int], Return] = {}
    for report in reports:
        donors = [n for n, one in enumerate(found.values(), plan.n_pipelines) if one.planned == report.donor]
        donor = donors[-1] if donors else report.donor
        new = Return(report.pipeline, donor, report.n_steps, report.admission)
        found.setdefault((report.pipeline, report.admission), new)
    return list(found.values())


class Replicas:
    """The replicas of a plan. `states[stage, pipeline]`; `trails`: what has happened to each; `n_steps`: local steps
    that each has done. `planned`: of each pipeline, that of the plan."""

    def __init__(self, shape: RunShape, returns: Sequence[Return] = ()):
        plan, groups = shape.plan, shape.config.sync.groups
        self.shape = shape
        self.planned = [*range(plan.n_pipelines), *(one.planned for one in returns)]
        self.places = [(stage, pipeline) for stage in range(plan.n_stages) for pipeline in range(plan.n_pipelines)]
        self.states: dict[Place, State] = {place: residues.fresh_state(place[0], groups) for place in self.places}
        self.trails: dict[Place, list[TrailEntry]] = {place: [] for place in self.places}
        self.n_steps = dict.fromkeys(self.places, 0)
        self._params: dict[Moment, Vector] = {}  # with which the forwards of a step compute
        self._gradients: dict[tuple[int, int], list[tuple[int, float]]] = {}  # pipeline, step -> of each stage

    def take_over(self, place: Place, state: State, step: int) -> None:
        """A replica of a pipeline that comes back begins."""
        self.states[place], self.n_steps[place] = state, step
        self.trails[place] = []
        self.note(place, TAKEN_OVER)
        self.places.append(place)

    def step(self, place: Place) -> bool:
        """The next local step of a replica for which nothing is left to be done before; False if the gradient is not
        there yet."""
        (stage, pipeline), step = place, self.n_steps[place]
        self._params.setdefault((*place, step), self.states[place].params)
        gradient = self._gradients.get((pipeline, step)) or self._gradient(pipeline, step)
        if not gradient:
            return False
        self._gradients[pipeline, step] = gradient
        accumulated, scale = gradient[stage]
        if scale:
            self.states[place] = residues.local_step(self.states[place], accumulated)
        self.n_steps[place] = step + 1
        self.note(place, STEPPED)
        return True

    def _gradient(self, pipeline: int, step: int) -> list[tuple[int, float]]:
        """The gradient of a local step: at each stage the sum over all microbatches, and the factor on it. [] if a
        stage does not have the parameters yet with which its forwards compute."""
        plan, planned = self.shape.plan, self.planned[pipeline]
        moments = [(stage, pipeline, max(0, step - plan.n_ahead(stage))) for stage in range(plan.n_stages)]
        if any(moment not in self._params for moment in moments):
            return []
        params = [self._params[moment] for moment in moments]
        accumulated = [0] * plan.n_stages
        for microbatch in plan.microbatches(planned):
            kept: list[int] = []
            x = residues.tokens(step, microbatch)
            for of_stage in params[:-1]:
                x = residues.forward(of_stage, x)
                kept.append(x)
            g, contribution = residues.backward(params[-1], x, 0)
            accumulated[-1] += contribution
            for stage in reversed(range(plan.n_stages - 1)):
                g, contribution = residues.backward(params[stage], kept[stage], g)
                accumulated[stage] += contribution
        sums = [number % residues.PRIME for number in accumulated]
        is_nan = [self.shape.is_nonfinite(stage, planned, step) for stage in range(plan.n_stages)]
        norms = [math.nan if nan else residues.sq_norm(a) for nan, a in zip(is_nan, sums, strict=True)]
        return list(zip(sums, self.shape.scales(planned, step, norms), strict=True))

    def set_state(self, place: Place, state: State) -> None:
        """The state of a replica after a group, or after a pull."""
        self.states[place] = state
        self.note(place, ADOPTED)

    def note(self, place: Place, what: str) -> None:
        self.trails[place].append(TrailEntry(what, self.n_steps[place], self.states[place]))

    def held_out_loss(self, params: Sequence[Vector]) -> float:
        """The mean over all held-out microbatches, with these parameters of the stages."""
        n = self.shape.config.train.eval_microbatches
        losses: list[float] = []
        for microbatch in range(n):
            x = residues.held_out_tokens(microbatch)
            for of_stage in params[:-1]:
                x = residues.forward(of_stage, x)
            losses.append(residues.held_out_loss(params[-1], x))
        return sum(losses) / n


@dataclass(frozen=True, eq=False)
class Averaged:
    """A report of a group, and which of its members adopt the mean."""

    report: GroupReport
    adopting: frozenset[int]


def counted(groups: Sequence[GroupReport], pipeline_of: Callable[[int, int], int]) -> list[Averaged]:
    """The reports that count, in their order. A member adopts the mean of the last one of its stage that names it after
    as many local steps: if others are lost, the rest are told to average again. An earlier one counts for members that
    no later one names: they are lost, and may have adopted it before anybody has heard of that. `pipeline_of(peer,
    view)`: a peer that has come back is in another one."""
    found: list[Averaged] = []
    named: set[Moment] = set()
    for group in reversed(groups):
        named_steps = zip(group.members, group.steps, strict=True)
        members = {peer: (group.stage, pipeline_of(peer, group.view), step) for peer, step in named_steps}
        adopting = frozenset(peer for peer, place in members.items() if place not in named)
        found += [Averaged(group, adopting)] if adopting else []
        named |= set(members.values())
    return found[::-1]


class GroupReplay:
    """Averaging groups. `means[version, stage]`: the means of states; `held_out[version, stage]`: those of parameters,
    for held-out losses."""

    def __init__(
        self,
        shape: RunShape,
        groups: Sequence[GroupReport],
        means: Sequence[StateMeanReport],
        held_out: Sequence[HeldOutMeanReport],
        returns: Sequence[Return] = (),
    ):
        self.replicas = Replicas(shape, returns)
        self._returns = list(returns)
        self._taken: dict[tuple[int, Return], State] = {}  # of each stage, what a pipeline takes over
        self.means: dict[tuple[int, int], State] = {}
        self.held_out: dict[tuple[int, int], Vector] = {}
        self._settings = shape.config.sync.groups
        self._codec = shape.config.sync.codec
        self._plan = shape.plan
        self._n_rows = shape.config.train.steps
        self._to_begin = list(returns)
        groups_that_count = counted(groups, self.pipeline_of)
        self._todo = [group for group in groups_that_count if len(group.report.members) > 1 or self._has_outer]
        self._laid_out: dict[Moment, Vector] = {}
        self._due: dict[Moment, Averaged | tuple[int, Vector]] = {}  # a group, and later its fragment and the mean
        for group in self._todo:
            adopting = [peer in group.adopting for peer in group.report.members]
            for (stage, pipeline, step), adopts in zip(self._moments(group.report), adopting, strict=True):
                if adopts:
                    self._due[stage, pipeline, step + self._settings.lag_steps] = group
        self._fragments = {
            moment: group.report.fragment for group in self._todo for moment in self._moments(group.report)
        }
        self._state_means = {(mean.stage, mean.version): mean for mean in means}
        self._held_out_means = {(mean.stage, mean.version): mean for mean in held_out}
        self._states: dict[Moment, State | None] = {
            moment: None
            for mean in (*self._state_means.values(), *self._held_out_means.values())
            for moment in self._moments(mean)
        }

    def run(self, n_steps: Mapping[int, int]) -> None:
        """Do n_steps[pipeline] local steps. LogProblem for a log that cannot be done."""
        is_changed = True
        while is_changed:
            is_changed = any([self._average(group) for group in list(self._todo)])
            for place in list(self.replicas.places):
                is_changed |= self._visit(place, n_steps[place[1]])
        left = [*(group.report for group in self._todo), *self._to_begin]
        if left or any(self.replicas.n_steps[place] < n_steps[place[1]] for place in self.replicas.places):
            raise LogProblem(f"after {self.replicas.n_steps} local steps of {dict(n_steps)} {left[:1]} is left")
        self._average_states()

    @property
    def _has_outer(self) -> bool:
        return residues.has_outer(self._settings)

    def pipeline_of(self, peer: int, view: int) -> int:
        """The number of a peer's pipeline in a view."""
        _, planned = self._plan.seat(peer)
        came = [n for n, one in enumerate(self._returns) if one.planned == planned and one.admission <= view]
        return self._plan.n_pipelines + came[-1] if came else planned

    def _give_states(self, place: Place) -> bool:
        """A replica is between two steps: pipelines that come back with its state take it over, all stages at once.
        Whether one does."""
        (stage, pipeline), n_left = place, len(self._to_begin)
        for one in [one for one in self._to_begin if (one.donor, one.step) == (pipeline, self.replicas.n_steps[place])]:
            self._taken[stage, one] = self.replicas.states[place]
            states = [self._taken.get((s, one)) for s in range(self._plan.n_stages)]
            if None not in states:
                self._to_begin.remove(one)
                number = self._plan.n_pipelines + self._returns.index(one)
                for s, state in enumerate(states):
                    assert state is not None  # all are there
                    self.replicas.take_over((s, number), state, one.step)
        return len(self._to_begin) < n_left

    def _moments(self, report: GroupReport | StateMeanReport | HeldOutMeanReport) -> list[Moment]:
        named = zip(report.members, report.steps, strict=True)
        return [(report.stage, self.pipeline_of(peer, report.view), step) for peer, step in named]

    def _visit(self, place: Place, n_steps: int) -> bool:
        """Let a replica do all that it can now: lay out its vector, adopt a mean that is due, do its next step. Returns
        whether it did any of that."""
        moment = (*place, self.replicas.n_steps[place])
        state = self.replicas.states[place]
        is_new = moment in self._fragments and moment not in self._laid_out
        if is_new:
            weight = self._weight(place[1])
            vector = residues.exchanged(self._settings, state, self._fragments[moment], weight)
            self._laid_out[moment] = residues.as_sent(self._codec, vector)
        due = self._due.get(moment)
        if isinstance(due, Averaged):
            return is_new
        if due:
            fragment, mean = due
            del self._due[moment]
            self.replicas.set_state(place, residues.averaged(self._settings, state, fragment, mean))
        if moment in self._states:
            self._states[moment] = self.replicas.states[place]
        begins = self._give_states(place)
        return begins or (moment[2] < n_steps and self.replicas.step(place)) or is_new or bool(due)

    def _average(self, averaged: Averaged) -> bool:
        """The mean of a group, once all its members have laid out; whether they had."""
        group = averaged.report
        moments = self._moments(group)
        if any(moment not in self._laid_out for moment in moments):
            return False
        self._todo.remove(averaged)
        weight = sum(self._weight(pipeline) for _, pipeline, _ in moments)
        sum_of_parts = residues.as_sent(self._codec, residues.total([self._laid_out[moment] for moment in moments]))
        mean = residues.scaled(sum_of_parts, 1 / weight)
        for stage, pipeline, step in moments:
            due = (stage, pipeline, step + self._settings.lag_steps)
            if self._due.get(due) is averaged:
                self._due[due] = (group.fragment, mean)
        return True

    def _weight(self, pipeline: int) -> int:
        return self._settings.weight(self._plan.shares[self.replicas.planned[pipeline]])

    def _average_states(self) -> None:
        for (stage, version), report in self._state_means.items():
            states = self._states_of(report)
            flat = residues.scaled(residues.total([state.flat() for state in states]), 1 / len(states))
            self.means[version, stage] = states[0].unflat(flat)
            if version == self._n_rows and len(states) > 1:
                for peer in report.members:
                    place = (stage, self.pipeline_of(peer, report.view))
                    self.replicas.set_state(place, self.means[version, stage])
        for (stage, version), report in self._held_out_means.items():
            params = [state.params for state in self._states_of(report)]
            self.held_out[version, stage] = residues.scaled(residues.total(params), 1 / len(params))

    def _states_of(self, report: StateMeanReport | HeldOutMeanReport) -> list[State]:
        states = [self._states[moment] for moment in self._moments(report)]
        found = [state for state in states if state]
        if len(found) < len(states):
            raise LogProblem(f"{report} names steps after which no replica was between two steps")
        return found

    def held_out_losses(self) -> dict[int, float]:
        """Version -> held-out loss, for versions of which all stages have a mean."""
        stages = range(self._plan.n_stages)
        versions = {version for version, _ in self.held_out}
        whole = [version for version in versions if all((version, stage) in self.held_out for stage in stages)]
        return {v: self.replicas.held_out_loss([self.held_out[v, stage] for stage in stages]) for v in whole}


ServerLog = Sequence[PushReport | PullReport | SnapshotReport]


@dataclass
class ReplayedSnapshot:
    """The parameters that a server keeps aside as `report` says, with the pushes of `steps` of each pipeline."""

    report: SnapshotReport
    params: Vector
    steps: list[int]


class ServerReplay:
    """Pushes and pulls. `logs[stage]`: what its server has reported, in its order; `kept`: what workers have kept for
    checkpoints. `servers[stage]`: its state, of which the parameters count; `server_trails` likewise; `snapshots`: in
    the order of the logs; `moments[stage, pipeline, step]`: of the workers that `kept` names."""

    def __init__(self, shape: RunShape, logs: Sequence[ServerLog], kept: Sequence[KeptReport] = ()):
        self.replicas = Replicas(shape)
        self.snapshots: list[ReplayedSnapshot] = []
        self.moments = {(one.stage, shape.plan.seat(one.worker)[1], one.step): Vector() for one in kept}
        self._n_pushes = [[0] * shape.plan.n_pipelines for _ in logs]
        groups = shape.config.sync.groups
        self.servers = [residues.fresh_state(stage, groups) for stage in range(shape.plan.n_stages)]
        self.server_trails: list[list[TrailEntry]] = [[] for _ in logs]
        self._plan = shape.plan
        self._wave = shape.config.sync.server.wave
        self._codec = shape.config.sync.codec
        self._logs = [deque(log) for log in logs]
        self._bases: dict[Place, Vector] = {}
        self._pushes: dict[Moment, Vector] = {}  # not added yet
        self._pulled: dict[Place, int] = {}  # after which local step

    def run(self, n_steps: Mapping[int, int]) -> None:
        """Do n_steps[pipeline] local steps. LogProblem for logs that cannot be done."""
        is_changed = True
        while is_changed:
            is_changed = any([self._act(stage) for stage in range(len(self._logs))])
            for place in self.replicas.places:
                is_changed |= self._step(place, n_steps[place[1]])
        left = [log[0] for log in self._logs if log]
        if left or any(self.replicas.n_steps[place] < n_steps[place[1]] for place in self.replicas.places):
            raise LogProblem(f"after {self.replicas.n_steps} local steps of {dict(n_steps)} {left[:1]} is left")

    def _step(self, place: Place, n_steps_max: int) -> bool:
        """The next local step of a replica, and what it pushes; whether it could be done."""
        n_steps = self.replicas.n_steps[place]
        if (*place, n_steps) in self.moments:
            self.moments[*place, n_steps] = self.replicas.states[place].moments
        is_settled = n_steps % self._wave > 0 or self._pulled.get(place) == n_steps
        if n_steps == n_steps_max or not is_settled or not self.replicas.step(place):
            return False
        params = self.replicas.states[place].params
        change = residues.difference(params, self._bases[place])
        self._pushes[*place, n_steps + 1] = residues.as_sent(self._codec, change)
        self._bases[place] = params
        return True

    def _act(self, stage: int) -> bool:
        """The next push or pull of a server, if it can be done; whether it could."""
        if not self._logs[stage]:
            return False
        report = self._logs[stage][0]
        if isinstance(report, SnapshotReport):
            steps = list(self._n_pushes[stage])
            self.snapshots.append(ReplayedSnapshot(report, self.servers[stage].params, steps))
            self._logs[stage].popleft()
            return True
        place = (stage, self._plan.seat(report.worker)[1])
        moment = (*place, report.step)
        server = self.servers[stage]
        if isinstance(report, PushReport):
            if moment not in self._pushes:
                return False
            change = self._pushes.pop(moment)
            self._note_push(place, report.step, change)
            params = residues.total((server.params, change))
            self.servers[stage] = server._replace(params=params)
            self.server_trails[stage].append(TrailEntry(PUSHED, report.step, self.servers[stage]))
        else:
            if self.replicas.n_steps[place] != report.step:
                return False
            self._pulled[place] = report.step
            self._bases[place] = server.params
            self.replicas.set_state(place, self.replicas.states[place]._replace(params=server.params))
        self._logs[stage].popleft()
        return True

    def _note_push(self, place: Place, step: int, change: Vector) -> None:
        """A push goes into the snapshots that its server has begun, if it is not beyond their cut."""
        stage, pipeline = place
        self._n_pushes[stage][pipeline] = step
        for one in self.snapshots:
            if one.report.stage == stage and step <= one.report.cut[pipeline]:
                one.params = residues.total((one.params, change))
                one.steps[pipeline] = step
