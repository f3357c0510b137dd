"""A run of replicas that may differ, done again in one process from its log of groups.

Everything in such a run is a pure function of its config and of the log: which replicas averaged after how many local
steps. Timing decides the log alone. So the parameters that come out here are those of the run, bit for bit where both
compute with one build on the CPU.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxdt.model.chain import Chain
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.outer import outer_update
from jaxdt.model.stage import StageFunctions
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.plan import Plan

State = tuple[Any, Any]  # parameters, and the optimizer's
Place = tuple[int, int, int]  # a replica's stage and pipeline, and its local steps


class Tokens(Protocol):
    """Where microbatches come from: a TokenFile."""

    def train_batch(
        self, seed: int, step: int, microbatch: int, microbatch_size: int, seq_len: int, n_microbatches: int
    ) -> Int[np.ndarray, "B T+1"]: ...


@dataclass(frozen=True)
class LoggedGroup:
    """Replicas of a stage that averaged: their pipelines, in the order of addition, and the local steps of each."""

    stage: int
    pipelines: tuple[int, ...]
    steps: tuple[int, ...]


def logged_group(plan: Plan, stage: int, members: Sequence[int], steps: Sequence[int]) -> LoggedGroup:
    """From what a run reports of a group."""
    return LoggedGroup(stage, tuple(plan.seat(member)[1] for member in members), tuple(steps))


class GroupReplay:
    """Pipelines of a plan in one process. `functions`: of each stage. `states[stage][pipeline]`: parameters and
    optimizer state; `losses[pipeline]`: the mean loss of each local step."""

    def __init__(self, config: RunConfig, plan: Plan, functions: Sequence[StageFunctions], data: Tokens):
        if any(codec != "none" for codec in plan.codec):
            raise BadInput(f"plan.codec: got {', '.join(plan.codec)}, a replay expects none")
        self._config = config
        self._plan = plan
        self._data = data
        self._chains = [Chain(functions, config.train.seed, config.optim.clip_norm) for _ in range(plan.n_pipelines)]
        self._n_steps = [0] * plan.n_pipelines
        self._outer: list[list[tuple[Any, ...]]] = []  # anchor and momentum of each replica of each stage
        if config.sync.groups.outer != "none":
            fresh = [(params, jax.tree.map(jnp.zeros_like, params)) for params in self._chains[0].params]
            self._outer = [[outer] * plan.n_pipelines for outer in fresh]
        self.losses: list[list[float]] = [[] for _ in range(plan.n_pipelines)]

    @property
    def states(self) -> list[list[State]]:
        stages = range(self._plan.n_stages)
        return [[self._state(stage, p) for p in range(self._plan.n_pipelines)] for stage in stages]

    def _state(self, stage: int, pipeline: int) -> State:
        """With an outer optimizer its anchor and momentum are a part of the optimizer's state."""
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
        self._n_steps = [version] * self._plan.n_pipelines
        for pipeline in range(self._plan.n_pipelines):
            for stage, state in enumerate(states):
                self._set_state(stage, pipeline, self._placed(stage, state))

    def run(
        self, groups: Sequence[LoggedGroup], n_steps: Mapping[int, int], keep: Collection[Place] = ()
    ) -> dict[Place, State]:
        """Do n_steps[pipeline] local steps, and average as the log says. Returns the states of the places in `keep`, as
        they are after the group, if there was one. BadInput for a log that does not fit."""
        todo = list(groups)
        kept: dict[Place, State] = {}
        while True:
            ready = [group for group in todo if self._is_ready(group)]
            for group in ready:
                self._average(group)
                todo.remove(group)
            waiting = {(pipeline, step) for group in todo for pipeline, step in _places(group)}
            free = [
                pipeline
                for pipeline, done in enumerate(self._n_steps)
                if done < n_steps[pipeline] and (pipeline, done) not in waiting
            ]
            for stage, pipeline, step in keep:
                if self._n_steps[pipeline] == step and (pipeline, step) not in waiting:
                    kept[stage, pipeline, step] = jax.device_get(self._state(stage, pipeline))
            for pipeline in free:
                self._step(pipeline)
            if not ready and not free:
                break
        if todo or self._n_steps != [n_steps[pipeline] for pipeline in range(self._plan.n_pipelines)]:
            raise BadInput(f"log: after {self._n_steps} local steps {len(todo)} groups are left, first {todo[:1]}")
        return kept

    def average_states(self) -> None:
        """The whole state of each stage becomes the mean over its replicas: the result of the run."""
        for stage in range(self._plan.n_stages):
            pipelines = sorted(range(self._plan.n_pipelines), key=lambda p: self._plan.placement[stage][p])
            if len(pipelines) > 1:
                mean = mean_tree([self._state(stage, p) for p in pipelines])
                for p in pipelines:
                    self._set_state(stage, p, self._placed(stage, mean))

    def _is_ready(self, group: LoggedGroup) -> bool:
        return all(self._n_steps[pipeline] == step for pipeline, step in _places(group))

    def _average(self, group: LoggedGroup) -> None:
        stage = group.stage
        if self._outer:
            self._average_changes(group)
            return
        if len(group.pipelines) == 1:
            return
        mean = mean_tree([self._chains[pipeline].params[stage] for pipeline in group.pipelines])
        for pipeline in group.pipelines:
            self._chains[pipeline].params[stage] = self._placed(stage, mean)

    def _average_changes(self, group: LoggedGroup) -> None:
        """The outer optimizer's step; its state is equal on all replicas of a group."""
        stage = group.stage
        replicas = [self._chains[pipeline].params[stage] for pipeline in group.pipelines]
        layout = FloatVector(replicas[0])
        anchor, momentum = (layout.of(tree) for tree in self._outer[stage][group.pipelines[0]])
        total = anchor - layout.of(replicas[0])
        for params in replicas[1:]:
            total = total + (anchor - layout.of(params))
        change = total * np.float32(1.0 / len(replicas))
        after = outer_update(self._config.sync.groups, anchor, momentum, change)
        trees = [self._placed(stage, layout.tree(vector, 1.0)) for vector in after]
        for pipeline in group.pipelines:
            self._chains[pipeline].params[stage] = trees[0]
            self._outer[stage][pipeline] = tuple(trees)

    def _placed(self, stage: int, tree: Any) -> Any:
        return self._chains[0].stages[stage].place(tree)

    def _step(self, pipeline: int) -> None:
        """One local step of a pipeline, on its own microbatches."""
        train, step = self._config.train, self._n_steps[pipeline]
        n, seq_len = self._plan.n_microbatches, self._config.seq_lengths.at(step)
        microbatches = [
            self._data.train_batch(train.seed, step, m, train.microbatch_size, seq_len, n)
            for m in self._plan.microbatches(pipeline)
        ]
        self.losses[pipeline].append(local_step(self._chains[pipeline], microbatches, self._config.optim.clip_norm))
        self._n_steps[pipeline] += 1


def local_step(chain: Chain, microbatches: Sequence[Int[np.ndarray, "B T+1"]], clip_norm: float) -> float:
    """One update of all stages of a chain by its own gradient, clipped by the norm over the chain. A gradient that is
    not finite changes nothing. Returns the mean loss before the update."""
    accs = [stage.zeros() for stage in chain.stages]
    loss_sum = 0.0
    for tokens_BT in microbatches:
        loss, accs = chain.accumulate(tokens_BT, accs)
        loss_sum += float(loss)
    n_samples = sum(len(tokens_BT) for tokens_BT in microbatches)
    vectors = [stage.gradient_vectors(acc) for stage, acc in zip(chain.stages, accs, strict=True)]
    sq_norms = [math.fsum(_sq_norm(np.asarray(v)) for v in of_stage.values()) for of_stage in vectors]
    norm = math.sqrt(math.fsum(sq_norms)) / n_samples if math.isfinite(math.fsum(sq_norms)) else math.inf
    for s, stage in enumerate(chain.stages):
        if not math.isfinite(norm if clip_norm else sq_norms[s]):
            continue
        clip = min(1.0, clip_norm / norm) if clip_norm and norm else 1.0
        scale = np.float32(clip / n_samples)
        chain.params[s], chain.states[s] = stage.update(chain.params[s], chain.states[s], vectors[s], scale)
    return loss_sum / n_samples


def mean_tree(trees: Sequence[Any]) -> Any:
    """The mean of trees, added in their order."""
    layout = FloatVector(trees[0])
    total = layout.of(trees[0])
    for tree in trees[1:]:
        total = total + layout.of(tree)
    return layout.tree(total, 1.0 / len(trees))


def _sq_norm(vector: np.ndarray) -> float:
    return float(np.einsum("i,i", vector, vector))


def _places(group: LoggedGroup) -> list[tuple[int, int]]:
    """Each pipeline of a group, with its local steps."""
    return list(zip(group.pipelines, group.steps, strict=True))
