"""A run of independent pipelines again, from what it has reported: the numbers that its replicas should hold.

Nothing of the machines is used. A pipeline does a local step as soon as nothing that the log has for its replicas is
left to be done before; a group averages as soon as all its members have done the steps that the log names. The outcome
does not depend on the order, so any order does.
"""

import functools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxdt.protocol.reports import GroupReport, PullReport, PushReport, StateMeanReport
from jaxdt.sim.fuzz.independent import residues
from jaxdt.sim.fuzz.independent.residues import Vector
from jaxdt.sim.fuzz.independent.tensors import ADOPTED, PUSHED, STEPPED, TrailEntry
from jaxdt.spec.config import RunConfig
from jaxdt.spec.plan import Plan

Place = tuple[int, int]  # a stage and a pipeline


class LogProblem(Exception):
    """The log cannot be that of a run: why."""


@dataclass(frozen=True)
class RunShape:
    """What a replay knows beside the log. `nonfinite`: the stage, pipeline and local step whose gradient is not finite,
    if there is one."""

    config: RunConfig
    plan: Plan
    nonfinite: tuple[int, int, int] | None = None

    def scales(self, pipeline: int, step: int, norms: Sequence[float]) -> list[float]:
        """The factor on the summed gradient of a local step at each stage, if `norms` are the squared norms of all
        stages: the mean over samples, clipped by the norm over the pipeline. 0 for one that is not finite."""
        n_samples, clip_norm = self.plan.shares[pipeline], self.config.optim.clip_norm
        if not clip_norm:
            return [1 / n_samples if math.isfinite(norm) else 0.0 for norm in norms]
        norm = math.sqrt(sum(norms)) / n_samples
        if not math.isfinite(norm):
            return [0.0] * len(norms)
        return [min(1.0, clip_norm / norm) / n_samples if norm else 1 / n_samples] * len(norms)

    def is_nonfinite(self, stage: int, pipeline: int, step: int) -> bool:
        return (stage, pipeline, step) == self.nonfinite


class Replicas:
    """The replicas of a plan. `states[stage, pipeline]`; `trails`: what has happened to each; `n_steps[pipeline]`."""

    def __init__(self, shape: RunShape):
        plan, has_outer = shape.plan, residues.has_outer(shape.config.sync.groups)
        self.shape = shape
        places = [(stage, pipeline) for stage in range(plan.n_stages) for pipeline in range(plan.n_pipelines)]
        self.states: dict[Place, Vector] = {place: residues.fresh_state(place[0], has_outer) for place in places}
        self.trails: dict[Place, list[TrailEntry]] = {place: [] for place in places}
        self.n_steps = [0] * plan.n_pipelines

    def step(self, pipeline: int) -> None:
        """One local step of a whole pipeline: all its microbatches forth and back, with unchanged parameters."""
        step, stages = self.n_steps[pipeline], range(self.shape.plan.n_stages)
        accumulated = [0] * len(stages)
        for microbatch in self.shape.plan.microbatches(pipeline):
            kept: list[int] = []
            x = residues.tokens(step, microbatch)
            for stage in stages[:-1]:
                x = residues.forward(self.states[stage, pipeline][0], x)
                kept.append(x)
            g, contribution = residues.backward(self.states[stages[-1], pipeline][0], x, 0)
            accumulated[-1] += contribution
            for stage in reversed(stages[:-1]):
                g, contribution = residues.backward(self.states[stage, pipeline][0], kept[stage], g)
                accumulated[stage] += contribution
        sums = [number % residues.PRIME for number in accumulated]
        is_nan = [self.shape.is_nonfinite(stage, pipeline, step) for stage in stages]
        norms = [math.nan if nan else residues.sq_norm(a) for nan, a in zip(is_nan, sums, strict=True)]
        for stage, scale in enumerate(self.shape.scales(pipeline, step, norms)):
            if scale:
                self.states[stage, pipeline] = residues.local_step(self.states[stage, pipeline], sums[stage])
            self._note((stage, pipeline), STEPPED, step + 1)
        self.n_steps[pipeline] = step + 1

    def set_state(self, place: Place, state: Vector) -> None:
        """The state of a replica after a group, or after a pull."""
        self.states[place] = state
        self._note(place, ADOPTED, self.n_steps[place[1]])

    def _note(self, place: Place, what: str, step: int) -> None:
        self.trails[place].append(TrailEntry(what, step, self.states[place][0]))


@dataclass(frozen=True, eq=False)
class Averaged:
    """A report of a group, and which of its members adopt the mean."""

    report: GroupReport
    adopting: frozenset[int]


def counted(groups: Sequence[GroupReport]) -> list[Averaged]:
    """The reports that count, in their order. A member adopts the mean of the last one of its stage that names it after
    as many local steps: if others are lost, the rest are told to average again. An earlier one counts for members that
    no later one names: they are lost, and may have adopted it before anybody has heard of that."""
    found: list[Averaged] = []
    named: set[tuple[int, int, int]] = set()
    for group in reversed(groups):
        members = {peer: (group.stage, peer, step) for peer, step in zip(group.members, group.steps, strict=True)}
        adopting = frozenset(peer for peer, place in members.items() if place not in named)
        found += [Averaged(group, adopting)] if adopting else []
        named |= set(members.values())
    return found[::-1]


class GroupReplay:
    """Averaging groups. `means[version, stage]`: the means of states."""

    def __init__(self, shape: RunShape, groups: Sequence[GroupReport], state_means: Sequence[StateMeanReport]):
        self.replicas = Replicas(shape)
        self.means: dict[tuple[int, int], Vector] = {}
        self._outer = shape.config.sync.groups.outer
        self._pipeline_of = {peer: shape.plan.seat(peer)[1] for peer in shape.plan.peers}
        self._todo: dict[Place, deque[Averaged]] = defaultdict(deque)  # of a replica, in the order of its steps
        for group in counted(groups):
            for place in self._places(group.report):
                self._todo[place].append(group)
        for (stage, pipeline), queue in list(self._todo.items()):
            in_order = sorted(queue, key=functools.partial(self._step_of, pipeline))
            self._todo[stage, pipeline] = deque(in_order)
        self._state_means: dict[Place, list[StateMeanReport]] = defaultdict(list)
        self._laid_out: dict[tuple[int, int], dict[int, Vector]] = defaultdict(dict)  # version, stage -> by peer
        last = {(mean.stage, mean.version): mean for mean in state_means}
        for mean in last.values():
            for peer in mean.members:
                self._state_means[mean.stage, self._pipeline_of[peer]].append(mean)
        self._last_version = shape.config.train.steps

    def run(self, n_steps: Mapping[int, int]) -> None:
        """Do n_steps[pipeline] local steps. LogProblem for a log that cannot be done."""
        is_changed = True
        while is_changed:
            is_changed = any([self._average(queue[0]) for queue in self._todo.values() if queue])
            for pipeline, wanted in n_steps.items():
                self._lay_states_out(pipeline)
                if self.replicas.n_steps[pipeline] < wanted and not self._waits(pipeline):
                    self.replicas.step(pipeline)
                    is_changed = True
        left = [queue[0].report for queue in self._todo.values() if queue]
        if left or any(self.replicas.n_steps[pipeline] < n for pipeline, n in n_steps.items()):
            raise LogProblem(f"after {self.replicas.n_steps} local steps of {dict(n_steps)} {left[:1]} is left")
        self._average_states()

    def _places(self, group: GroupReport) -> list[Place]:
        return [(group.stage, self._pipeline_of[peer]) for peer in group.members]

    def _waits(self, pipeline: int) -> bool:
        """Whether a replica of the pipeline has to average before the next step."""
        step = self.replicas.n_steps[pipeline]
        firsts = [queue[0] for (_, p), queue in self._todo.items() if p == pipeline and queue]
        return any(self._step_of(pipeline, group) <= step for group in firsts)

    def _step_of(self, pipeline: int, group: Averaged) -> int:
        named = zip(group.report.members, group.report.steps, strict=True)
        return next(step for member, step in named if self._pipeline_of[member] == pipeline)

    def _average(self, averaged: Averaged) -> bool:
        """The mean of a group, if all its members are ready for it; whether they were."""
        group, replicas = averaged.report, self.replicas
        places = self._places(group)
        at_step = [replicas.n_steps[p] == step for (_, p), step in zip(places, group.steps, strict=True)]
        if not all(at_step) or any(self._todo[place][0] is not averaged for place in places):
            return False
        for place in places:
            self._todo[place].popleft()
        if len(places) == 1 and not self._has_outer:
            return True  # nothing changes
        laid_out = [residues.exchanged(replicas.states[place]) for place in places]
        mean = residues.scaled(residues.total(laid_out), 1 / len(places))
        for peer, place in zip(group.members, places, strict=True):
            if peer in averaged.adopting:
                replicas.set_state(place, residues.averaged(replicas.states[place], mean, self._outer))
        return True

    @property
    def _has_outer(self) -> bool:
        return residues.has_outer(self.replicas.shape.config.sync.groups)

    def _lay_states_out(self, pipeline: int) -> None:
        """What the replicas of a pipeline contribute to means of states, if they are now where the log says."""
        if self._waits(pipeline):
            return
        for stage in range(self.replicas.shape.plan.n_stages):
            for mean in self._state_means[stage, pipeline]:
                for peer, step in zip(mean.members, mean.steps, strict=True):
                    if self._pipeline_of[peer] == pipeline and step == self.replicas.n_steps[pipeline]:
                        self._laid_out[mean.version, stage][peer] = self.replicas.states[stage, pipeline]

    def _average_states(self) -> None:
        for mean in {id(mean): mean for means in self._state_means.values() for mean in means}.values():
            laid_out = self._laid_out[mean.version, mean.stage]
            if set(laid_out) != set(mean.members):
                raise LogProblem(f"{mean} names steps after which no replica was between two steps")
            vectors = [laid_out[peer] for peer in mean.members]
            self.means[mean.version, mean.stage] = residues.scaled(residues.total(vectors), 1 / len(vectors))
        for (version, stage), state in self.means.items():
            if version == self._last_version and len(self._laid_out[version, stage]) > 1:
                for peer in self._laid_out[version, stage]:
                    self.replicas.set_state((stage, self._pipeline_of[peer]), state)


class ServerReplay:
    """Pushes and pulls. `logs[stage]`: what its server has reported, in its order. `servers[stage]`: its parameters;
    `server_trails` likewise."""

    def __init__(self, shape: RunShape, logs: Sequence[Sequence[PushReport | PullReport]]):
        self.replicas = Replicas(shape)
        self.servers = [residues.fresh_state(stage, False)[:1] for stage in range(shape.plan.n_stages)]
        self.server_trails: list[list[TrailEntry]] = [[] for _ in logs]
        self._plan = shape.plan
        self._wave = shape.config.sync.server.wave
        self._logs = [deque(log) for log in logs]
        self._bases: dict[Place, Vector] = {}
        self._pushes: dict[tuple[int, int, int], Vector] = {}  # stage, pipeline, step -> not added yet
        self._pulled: dict[Place, int] = {}  # after which local step

    def run(self, n_steps: Mapping[int, int]) -> None:
        """Do n_steps[pipeline] local steps. LogProblem for logs that cannot be done."""
        is_changed = True
        while is_changed:
            is_changed = any([self._act(stage) for stage in range(len(self._logs))])
            for pipeline, wanted in n_steps.items():
                if self.replicas.n_steps[pipeline] < wanted and self._may_step(pipeline):
                    self._step(pipeline)
                    is_changed = True
        left = [log[0] for log in self._logs if log]
        if left or any(self.replicas.n_steps[pipeline] < n for pipeline, n in n_steps.items()):
            raise LogProblem(f"after {self.replicas.n_steps} local steps of {dict(n_steps)} {left[:1]} is left")

    def _may_step(self, pipeline: int) -> bool:
        step = self.replicas.n_steps[pipeline]
        stages = range(self._plan.n_stages)
        return step % self._wave > 0 or all(self._pulled.get((stage, pipeline)) == step for stage in stages)

    def _step(self, pipeline: int) -> None:
        self.replicas.step(pipeline)
        for stage in range(self._plan.n_stages):
            params = self.replicas.states[stage, pipeline][:1]
            change = residues.difference(params, self._bases[stage, pipeline])
            self._pushes[stage, pipeline, self.replicas.n_steps[pipeline]] = change
            self._bases[stage, pipeline] = params

    def _act(self, stage: int) -> bool:
        """The next push or pull of a server, if it can be done; whether it could."""
        if not self._logs[stage]:
            return False
        report = self._logs[stage][0]
        pipeline = self._plan.seat(report.worker)[1]
        place = (stage, pipeline)
        if isinstance(report, PushReport):
            if (*place, report.step) not in self._pushes:
                return False
            self.servers[stage] = residues.total((self.servers[stage], self._pushes.pop((*place, report.step))))
            self.server_trails[stage].append(TrailEntry(PUSHED, report.step, self.servers[stage][0]))
        else:
            if self.replicas.n_steps[pipeline] != report.step:
                return False
            self._pulled[place] = report.step
            self._bases[place] = self.servers[stage]
            self.replicas.set_state(place, (*self.servers[stage], *self.replicas.states[place][1:]))
        self._logs[stage].popleft()
        return True
