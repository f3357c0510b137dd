"""A run of replicas that may differ, done again in one process from its log of groups.

Everything in such a run is a pure function of its config and of the log: which replicas averaged after how many local
steps. Timing decides the log alone. So the parameters that come out here are those of the run, bit for bit where both
compute with one build on the CPU.

A pipeline that was lost and came back is another one here: wherever a replica is named, its pipeline is the number of
an incarnation (jaxdt.protocol.incarnations).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxdt.model.averaging import ReplicaState, Sent, Vector, added, as_sent, averaged, exchanged, fragment_entries
from jaxdt.model.chain import Chain
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.stage import StageFunctions, Vectors
from jaxdt.model.vectors import TIED_GROUP, group_entries
from jaxdt.protocol.incarnations import Incarnations
from jaxdt.protocol.reports import GroupReport, HeldOutMeanReport, StateMeanReport
from jaxdt.run.config import PIPELINE, RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan

State = tuple[Any, Any]  # parameters, and the optimizer's
Place = tuple[int, int, int]  # a replica's stage and pipeline, and its local steps


class Tokens(Protocol):
    """The source of microbatches, such as a TokenFile."""

    def train_batch(
        self, seed: int, step: int, microbatch: int, microbatch_size: int, seq_len: int, n_microbatches: int
    ) -> Int[np.ndarray, "B T+1"]: ...


@dataclass(frozen=True)
class LoggedGroup:
    """Replicas of a stage that averaged a fragment: their pipelines, in the order of addition, and the local steps
    after which each laid its parameters out. `adopting`: those that adopted the mean; the others have only contributed
    to it."""

    stage: int
    pipelines: tuple[int, ...]
    steps: tuple[int, ...]
    fragment: int
    adopting: frozenset[int]

    @property
    def places(self) -> list[Place]:
        """The places where each of its replicas laid its parameters out."""
        return [(self.stage, pipeline, step) for pipeline, step in zip(self.pipelines, self.steps, strict=True)]

    @property
    def adopting_places(self) -> list[Place]:
        return [place for place in self.places if place[1] in self.adopting]


@dataclass(frozen=True)
class DueMean:
    """The mean of a fragment, which a replica adopts after `step` local steps."""

    step: int
    fragment: int
    mean: Vector


@dataclass(frozen=True)
class LocalGradient:
    """The gradient of one local step: of each stage its vectors, whether they are finite, and the factor on them; and
    the mean loss."""

    mean_loss: float
    vectors: Sequence[Vectors]
    is_finite: Sequence[bool]
    scales: Sequence[np.float32]


class ReplayedSteps:
    """The progress of one pipeline: `n_done[stage]` updates, and the gradients of `n_computed` steps.

    Where forwards run ahead (Plan.n_ahead) the stages are at different steps: a step's gradient is taken at the
    parameters with which each stage did its forward, and a stage may average before another has done the same step."""

    def __init__(self, plan: Plan, version: int = 0):
        self._ahead = [plan.n_ahead(stage) for stage in range(plan.n_stages)]
        self.begin(version)

    def begin(self, version: int) -> None:
        self._first = self.n_computed = version
        self.n_done = [version for _ in self._ahead]
        self._params: list[dict[int, Any]] = [{} for _ in self._ahead]  # of each stage: version -> parameters
        self._gradients: dict[int, LocalGradient] = {}

    def _versions(self, step: int) -> list[int]:
        """The version with which each stage computes a step."""
        return [max(self._first, step - ahead) for ahead in self._ahead]

    def settled(self, stage: int, version: int, params: Any) -> None:
        """A stage has these parameters after so many steps, and after the group that followed, if there was one."""
        self._params[stage][version] = params

    def may_compute(self, n_steps: int) -> bool:
        """Whether the gradient of the next step can be computed, of `n_steps` in all."""
        versions = self._versions(self.n_computed)
        return self.n_computed < n_steps and all(v in of for v, of in zip(versions, self._params, strict=True))

    def params_of(self, step: int) -> list[Any]:
        return [of[version] for version, of in zip(self._versions(step), self._params, strict=True)]

    def computed(self, gradient: LocalGradient) -> None:
        """The gradient of the next step is there. Parameters that no later step computes with are dropped."""
        self._gradients[self.n_computed] = gradient
        self.n_computed += 1
        for version, of in zip(self._versions(self.n_computed), self._params, strict=True):
            for old in [old for old in of if old < version]:
                del of[old]

    def gradient_at(self, stage: int) -> LocalGradient | None:
        """Take the gradient for the next update of a stage; None if the gradient is not there yet."""
        step = self.n_done[stage]
        gradient = self._gradients.get(step)
        if gradient:
            self.n_done[stage] += 1
            if min(self.n_done) > step:
                del self._gradients[step]
        return gradient


def logged_group(
    plan: Plan, incarnations: Incarnations, report: GroupReport | StateMeanReport | HeldOutMeanReport
) -> LoggedGroup:
    """The logged group for a run's report of a group."""
    pipelines = tuple(incarnations.of(plan.seat(member)[1], report.view) for member in report.members)
    fragment = report.fragment if isinstance(report, GroupReport) else 0
    return LoggedGroup(report.stage, pipelines, tuple(report.steps), fragment, frozenset(pipelines))


def adopted_groups(groups: Sequence[LoggedGroup]) -> list[LoggedGroup]:
    """The groups of a log whose means were adopted, each with its adopting members. When members are lost the others
    average again, so a replica adopts the mean of the last group that names it after as many steps. It may have
    contributed to earlier groups, and a member that is lost may have adopted the mean of one of them."""
    last = {place: number for number, group in enumerate(groups) for place in group.places}
    found: list[LoggedGroup] = []
    for number, group in enumerate(groups):
        adopting = frozenset(place[1] for place in group.places if last[place] == number)
        found += [replace(group, adopting=adopting)] if adopting else []
    return found


class GroupReplay:
    """Pipelines of a plan in one process, by the number of their incarnation. `functions`: of each stage.
    `states[stage][pipeline]`: parameters and optimizer state; `losses[pipeline]`: the mean loss of each local step."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        functions: Sequence[StageFunctions],
        data: Tokens,
        incarnations: Incarnations | None = None,
    ):
        if any(codec != "none" for codec in plan.codec):
            raise BadInput(f"plan.codec: got {', '.join(plan.codec)}, a replay expects none")
        self._config = config
        self._plan = plan
        self._data = data
        self._incarnations = (incarnations or Incarnations(plan.n_pipelines)).all
        self._taken_over: dict[tuple[int, int], State] = {}  # by stage and pipeline, until all stages are there
        self._chains = [Chain(functions, config.train.seed, config.optim.clip_norm) for _ in self._incarnations]
        begun = [number for number, one in enumerate(self._incarnations) if one.donor is None]
        self._steps: dict[int, ReplayedSteps] = {number: ReplayedSteps(plan) for number in begun}
        groups = config.sync.groups
        self._fragments = [fragment_entries(config.model, lo, hi, groups.fragments) for lo, hi in plan.stages]
        self._frozen: dict[Place, Sent] = {}  # what replicas have laid out for groups
        self._due: dict[tuple[int, int], DueMean] = {}  # by stage and pipeline
        self._outer: list[list[tuple[Any, ...]]] = []  # anchor and momentum of each replica of each stage
        if config.sync.groups.outer != "none":
            fresh = [(params, jax.tree.map(jnp.zeros_like, params)) for params in self._chains[0].params]
            self._outer = [[outer] * len(self._incarnations) for outer in fresh]
        self.losses: list[list[float]] = [[] for _ in self._incarnations]

    @property
    def states(self) -> list[list[State]]:
        stages = range(self._plan.n_stages)
        return [[self._state(stage, p) for p in range(len(self._incarnations))] for stage in stages]

    def _state(self, stage: int, pipeline: int) -> State:
        """(parameters, optimizer's state) of a replica. The state includes an outer optimizer's anchor and momentum."""
        params, opt_state = self._chains[pipeline].params[stage], self._chains[pipeline].states[stage]
        return params, (opt_state, *self._outer[stage][pipeline]) if self._outer else opt_state

    def _set_state(self, stage: int, pipeline: int, state: State) -> None:
        params, opt_state = state
        if self._outer:
            opt_state, *outer = opt_state
            self._outer[stage][pipeline] = tuple(outer)
        self._chains[pipeline].params[stage], self._chains[pipeline].states[stage] = params, opt_state

    def begin(self, version: int, states: Sequence[State]) -> None:
        """All replicas begin with these states, one of each stage, after `version` steps."""
        for pipeline, steps in self._steps.items():
            steps.begin(version)
            for stage, state in enumerate(states):
                self._set_state(stage, pipeline, self._placed(stage, state))

    def run(
        self, groups: Sequence[LoggedGroup], n_steps: Mapping[int, int], keep: Collection[Place] = ()
    ) -> dict[Place, State]:
        """Do n_steps[pipeline] local steps, and average as the log says, in its order. Returns the states of the places
        in `keep`, as they are after the mean that is adopted there, if one is. BadInput for a log that does not fit. A
        lost pipeline may have done more steps than are known, as far as groups name them."""
        named = [(pipeline, step) for group in groups for _, pipeline, step in group.places]
        n_steps = {p: max([n, *(step for pipeline, step in named if pipeline == p)]) for p, n in n_steps.items()}
        todo = adopted_groups(groups)
        lag_steps = self._config.sync.groups.lag_steps
        kept: dict[Place, State] = {}
        while True:
            self._freeze(todo)
            ready = [group for group in todo if all(place in self._frozen for place in group.places)]
            for group in ready:
                self._average(group)
                todo.remove(group)
            needed = {place for group in todo for place in group.places}
            self._frozen = {place: vector for place, vector in self._frozen.items() if place in needed}
            self._adopt_due()
            adopting = [place for group in todo for place in group.adopting_places]
            waiting = {(stage, pipeline, step + lag_steps) for stage, pipeline, step in adopting}
            settled = {place for place in self._replicas if place not in waiting}
            for stage, pipeline, step in settled:
                self._steps[pipeline].settled(stage, step, self._chains[pipeline].params[stage])
            for stage, pipeline, step in settled.intersection(keep):
                kept[stage, pipeline, step] = jax.device_get(self._state(stage, pipeline))
            joined = self._take_over(settled)
            computed = [pipeline for pipeline, steps in self._steps.items() if steps.may_compute(n_steps[pipeline])]
            for pipeline in computed:
                self._compute(pipeline)
            updated = [place for place in sorted(settled) if self._update(*place)]
            if not ready and not computed and not updated and not joined:
                break
        n_done = {pipeline: steps.n_done for pipeline, steps in self._steps.items()}
        if todo or {pipeline: [n] * self._plan.n_stages for pipeline, n in n_steps.items()} != n_done:
            raise BadInput(f"log: after {n_done} local steps {len(todo)} groups are left, first {todo[:1]}")
        return kept

    def _take_over(self, settled: Collection[Place]) -> list[int]:
        """Pipelines that come back take over the states that their donor has; those that begin now."""
        begun: list[int] = []
        for pipeline, one in enumerate(self._incarnations):
            if one.donor is None or pipeline in self._steps:
                continue
            for stage in range(self._plan.n_stages):
                if (stage, one.donor, one.first_step) in settled:
                    self._taken_over[stage, pipeline] = jax.tree.map(np.array, self._state(stage, one.donor))
            states = [self._taken_over.get((stage, pipeline)) for stage in range(self._plan.n_stages)]
            if all(states):
                for stage, state in enumerate(states):
                    self._set_state(stage, pipeline, self._placed(stage, state))
                self._steps[pipeline] = ReplayedSteps(self._plan, one.first_step)
                begun.append(pipeline)
        return begun

    def average_states(self, means: Sequence[LoggedGroup]) -> None:
        """The whole state of each stage becomes the mean over these replicas: the result of the run."""
        for group in means:
            if len(group.pipelines) > 1:
                mean = mean_tree([self._state(group.stage, p) for p in group.pipelines])
                for p in group.pipelines:
                    self._set_state(group.stage, p, self._placed(group.stage, mean))

    @property
    def _replicas(self) -> list[Place]:
        """The places of all replicas now."""
        stages = range(self._plan.n_stages)
        return [(stage, p, steps.n_done[stage]) for p, steps in self._steps.items() for stage in stages]

    def _freeze(self, groups: Sequence[LoggedGroup]) -> None:
        """Replicas that are where a group has them lay their parameters out."""
        here = set(self._replicas)
        for group in groups:
            for place in group.places:
                if place in here and place not in self._frozen:
                    self._frozen[place] = self._exchanged(group, place[1])

    def _exchanged(self, group: LoggedGroup, pipeline: int) -> Sent:
        groups, names = self._config.sync.groups, self._fragments[group.stage][group.fragment]
        vector = exchanged(groups, self._replica(group.stage, pipeline), names, self._weight(pipeline))
        return as_sent(self._config.sync.codec, vector)

    def _weight(self, pipeline: int) -> int:
        return self._config.sync.groups.weight(self._plan.shares[self._incarnations[pipeline].pipeline])

    def _replica(self, stage: int, pipeline: int) -> ReplicaState:
        chain = self._chains[pipeline]
        outer = self._outer[stage][pipeline] if self._outer else ()
        return ReplicaState(chain.params[stage], outer, chain.states[stage])

    def _average(self, group: LoggedGroup) -> None:
        """The mean of a group, adopted when it is due. That of one replica means nothing without an outer optimizer."""
        vectors = [self._frozen[place] for place in group.places]
        if len(vectors) == 1 and not self._outer:
            return
        weight = sum(self._weight(pipeline) for pipeline in group.pipelines)
        mean = added(vectors).astype(np.float32) * np.float32(1.0 / weight)
        for stage, pipeline, step in group.adopting_places:
            due = DueMean(step + self._config.sync.groups.lag_steps, group.fragment, mean)
            self._due[stage, pipeline] = due

    def _adopt_due(self) -> None:
        """The means whose time has come. One that is due after the last step is never adopted."""
        for stage, pipeline, step in self._replicas:
            due = self._due.get((stage, pipeline))
            if due and due.step == step:
                del self._due[stage, pipeline]
                chain, names = self._chains[pipeline], self._fragments[stage][due.fragment]
                after = averaged(self._config.sync.groups, self._replica(stage, pipeline), names, due.mean)
                chain.params[stage] = self._placed(stage, after.params)
                chain.states[stage] = self._placed(stage, after.opt_state)
                if self._outer:
                    self._outer[stage][pipeline] = tuple(self._placed(stage, tree) for tree in after.outer)

    def _placed(self, stage: int, tree: Any) -> Any:
        return self._chains[0].stages[stage].place(tree)

    def _compute(self, pipeline: int) -> None:
        """The gradient of a pipeline's next local step, on its own microbatches."""
        steps = self._steps[pipeline]
        train, step = self._config.train, steps.n_computed
        n, seq_len = self._plan.n_microbatches, self._config.seq_lengths.at(step)
        microbatches = [
            self._data.train_batch(train.seed, step, m, train.microbatch_size, seq_len, n)
            for m in self._plan.microbatches(self._incarnations[pipeline].pipeline)
        ]
        params_of = steps.params_of(step)
        clip = self._config.sync.groups.clip
        found = local_gradient(self._chains[pipeline], microbatches, self._config.optim.clip_norm, params_of, clip)
        self.losses[pipeline].append(found.mean_loss)
        steps.computed(found)

    def _update(self, stage: int, pipeline: int, step: int) -> bool:
        """The update of a local step at a stage, if its gradient is there."""
        gradient = self._steps[pipeline].gradient_at(stage)
        if gradient:
            update_stage(self._chains[pipeline], stage, gradient)
        return gradient is not None


def local_step(chain: Chain, microbatches: Sequence[Int[np.ndarray, "B T+1"]], clip_norm: float) -> float:
    """One update of all stages of a chain by its own gradient. Returns the mean loss before the update."""
    gradient = local_gradient(chain, microbatches, clip_norm)
    for stage in range(len(chain.stages)):
        update_stage(chain, stage, gradient)
    return gradient.mean_loss


def local_gradient(
    chain: Chain,
    microbatches: Sequence[Int[np.ndarray, "B T+1"]],
    clip_norm: float,
    params_of: Sequence[Any] | None = None,
    clip: str = PIPELINE,
) -> LocalGradient:
    """The gradient of a chain at the parameters `params_of` of each stage (None: its own), clipped by the norm over the
    chain or over each stage (sync.groups.clip). A shared table is the first stage's."""
    params_of = with_shared_table(chain.stages, params_of or chain.params)
    accs = [stage.zeros() for stage in chain.stages]
    loss_sum = 0.0
    for tokens_BT in microbatches:
        loss, accs = chain.accumulate(tokens_BT, accs, params_of)
        loss_sum += float(loss)
    n_samples = sum(len(tokens_BT) for tokens_BT in microbatches)
    vectors = [stage.gradient_vectors(acc) for stage, acc in zip(chain.stages, accs, strict=True)]
    if len(vectors) > 1 and TIED_GROUP in vectors[0]:
        vectors[0][TIED_GROUP] += vectors[-1].pop(TIED_GROUP)
    sq_norms = [math.fsum(_sq_norm(np.asarray(v)) for v in of_stage.values()) for of_stage in vectors]
    clips_by = [math.fsum(sq_norms)] * len(sq_norms) if clip_norm and clip == PIPELINE else sq_norms
    is_finite = [math.isfinite(sq_norm) for sq_norm in clips_by]
    scales = [_scale(sq_norm, n_samples, clip_norm) for sq_norm in clips_by]
    return LocalGradient(loss_sum / n_samples, vectors, is_finite, scales)


def with_shared_table(stages: Sequence[StageFunctions], params_of: Sequence[Any]) -> list[Any]:
    """The parameters with which stages compute: the last one's with the table that it shares with the first, if it
    does."""
    *others, last = params_of
    end = stages[-1]
    names = group_entries(end.config, end.lo, end.hi).get(TIED_GROUP, [])
    return [*others, last | {name: params_of[0][name] for name in names}]


def _scale(sq_norm: float, n_samples: int, clip_norm: float) -> np.float32:
    """The factor on a summed gradient of this squared norm: the mean over samples, clipped."""
    norm = math.sqrt(sq_norm) / n_samples if math.isfinite(sq_norm) else math.inf
    clip = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
    return np.float32(clip / n_samples)


def update_stage(chain: Chain, stage: int, gradient: LocalGradient) -> None:
    """The local step of one stage. A gradient that is not finite changes nothing."""
    if gradient.is_finite[stage]:
        chain.params[stage], chain.states[stage] = chain.stages[stage].update(
            chain.params[stage], chain.states[stage], gradient.vectors[stage], gradient.scales[stage]
        )


def mean_tree(trees: Sequence[Any]) -> Any:
    """The mean of trees, added in their order."""
    layout = FloatVector(trees[0])
    total = layout.of(trees[0])
    for tree in trees[1:]:
        total = total + layout.of(tree)
    return layout.tree(total, 1.0 / len(trees))


def _sq_norm(vector: np.ndarray) -> float:
    return float(np.einsum("i,i", vector, vector))
