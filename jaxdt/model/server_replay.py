"""A run whose replicas push to servers, done again in one process from the servers' logs.

Everything in such a run is a pure function of its config and of the order in which each server has added pushes and
answered pulls. So the parameters that come out here are those of the run, bit for bit where both compute with one build
on the CPU.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxdt.model.averaging import as_sent
from jaxdt.model.chain import Chain
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.group_replay import Tokens, local_step
from jaxdt.model.pushed_change import PushedChange, with_change
from jaxdt.model.stage import StageFunctions
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.plan import Plan

SnapshotName = tuple[int, bool]  # a version, and whether it is that of a checkpoint


@dataclass(frozen=True)
class ServerAct:
    """A server has added the push of a pipeline's local step `step` - 1, or has answered its pull after `step` local
    steps."""

    is_push: bool
    pipeline: int
    step: int


@dataclass(frozen=True)
class SnapshotAct:
    """A server keeps its parameters aside under a name, and adds to them the later pushes of each pipeline up to its
    local step in `cut`."""

    name: SnapshotName
    cut: Sequence[int]


class ServerReplay:
    """Pipelines and servers of a plan in one process. `functions`: of each stage. `params[stage]`: the server's;
    `losses[pipeline]`: the mean loss of each local step. `snapshots[name][stage]`: what servers have kept aside, n
    numbers each. `moments[pipeline, step]`: the optimizer's states of all stages after so many local steps, of those
    that `run` is asked to keep."""

    def __init__(self, config: RunConfig, plan: Plan, functions: Sequence[StageFunctions], data: Tokens):
        if any(codec != "none" for codec in plan.codec):
            raise BadInput(f"plan.codec: got {', '.join(plan.codec)}, a replay expects none")
        self._config = config
        self._plan = plan
        self._functions = functions
        self._data = data
        self._chains = [Chain(functions, config.train.seed, config.optim.clip_norm) for _ in range(plan.n_pipelines)]
        self._n_steps = [0] * plan.n_pipelines
        self._changes = [[PushedChange() for _ in range(plan.n_pipelines)] for _ in range(plan.n_stages)]
        self._pushes: dict[tuple[int, int, int], np.ndarray] = {}  # stage, pipeline, step -> not added yet
        self._pulled = [[-1] * plan.n_pipelines for _ in range(plan.n_stages)]  # after which local step, last
        self.params = [stage.init(config.train.seed) for stage in functions]
        self.losses: list[list[float]] = [[] for _ in range(plan.n_pipelines)]
        self.snapshots: dict[SnapshotName, dict[int, np.ndarray]] = defaultdict(dict)
        self.moments: dict[tuple[int, int], list[Any]] = {}
        self._cuts: list[dict[SnapshotName, Sequence[int]]] = [{} for _ in functions]

    def begin(self, version: int, states: Sequence[tuple[Any, Any]]) -> None:
        """The run begins with a checkpoint of `version` steps: (parameters, optimizer's state) of each stage."""
        self._n_steps = [version] * self._plan.n_pipelines
        self.params = [functions.place(params) for functions, (params, _) in zip(self._functions, states, strict=True)]
        for chain in self._chains:
            chain.states = [functions.place(own) for functions, (_, own) in zip(self._functions, states, strict=True)]

    def state(self, stage: int, members: Collection[int]) -> tuple[Any, Any]:
        """The result of the run at a stage: the server's parameters, and the optimizer state of the least worker among
        the last members."""
        row = self._plan.placement[stage]
        least = min(peer for peer in row if peer in members)
        return self.params[stage], self._chains[row.index(least)].states[stage]

    def kept(self, version: int, stage: int, pipeline: int, step: int) -> tuple[Any, Any]:
        """The state of a stage in a checkpoint of the run: the parameters that the server kept aside for it, and the
        optimizer's state of a pipeline's worker after so many local steps."""
        vector_n = self.snapshots[version, True][stage]
        return FloatVector(self.params[stage]).tree(vector_n, 1.0), self.moments[pipeline, step][stage]

    def run(
        self,
        logs: Sequence[Sequence[ServerAct | SnapshotAct]],
        n_steps: Mapping[int, int],
        keep: Collection[tuple[int, int]] = (),
    ) -> None:
        """Do n_steps[pipeline] local steps, and push and pull as each stage's log says. BadInput for logs that do not
        fit. A server may have added pushes of a lost pipeline whose steps no other process knows. `keep`: pipelines and
        local steps."""
        self.moments = {place: [] for place in keep}
        acts = [act for log in logs for act in log if isinstance(act, ServerAct)]
        n_steps = {p: max([n, *(act.step for act in acts if act.pipeline == p)]) for p, n in n_steps.items()}
        todo = [deque(log) for log in logs]
        while True:
            acts = [stage for stage, log in enumerate(todo) if log and self._may_act(stage, log[0])]
            for stage in acts:
                self._act(stage, todo[stage].popleft())
            free = [] if acts else [p for p, n in n_steps.items() if self._n_steps[p] < n and self._may_step(p)]
            for pipeline in free:
                self._step(pipeline)
            if not acts and not free:
                break
        if any(todo) or self._n_steps != [n_steps[pipeline] for pipeline in range(self._plan.n_pipelines)]:
            left = [list(log)[:1] for log in todo]
            raise BadInput(f"log: after {self._n_steps} local steps the servers cannot go on with {left}")

    def _may_act(self, stage: int, act: ServerAct | SnapshotAct) -> bool:
        if isinstance(act, SnapshotAct):
            return True
        if act.is_push:
            return (stage, act.pipeline, act.step) in self._pushes
        return self._n_steps[act.pipeline] == act.step

    def _may_step(self, pipeline: int) -> bool:
        """A step that follows a whole wave, and the first one, waits for the pulls of all stages."""
        step = self._n_steps[pipeline]
        is_due = step % self._config.sync.server.wave == 0 or any(of[pipeline] < 0 for of in self._pulled)
        return not is_due or all(of_stage[pipeline] == step for of_stage in self._pulled)

    def _act(self, stage: int, act: ServerAct | SnapshotAct) -> None:
        if isinstance(act, SnapshotAct):
            self.snapshots[act.name][stage] = FloatVector(self.params[stage]).of(self.params[stage])
            self._cuts[stage][act.name] = act.cut
            return
        functions, chain = self._chains[0].stages[stage], self._chains[act.pipeline]
        if act.is_push:
            change_n = self._pushes.pop((stage, act.pipeline, act.step))
            self.params[stage] = functions.place(with_change(self.params[stage], change_n))
            for name, cut in self._cuts[stage].items():
                if act.step <= cut[act.pipeline]:
                    self.snapshots[name][stage] = self.snapshots[name][stage] + change_n
            return
        layout = FloatVector(self.params[stage])
        params_n = layout.of(self.params[stage])
        self._changes[stage][act.pipeline].pulled(params_n)
        self._pulled[stage][act.pipeline] = act.step
        chain.params[stage] = functions.place(layout.tree(params_n, 1.0))

    def _step(self, pipeline: int) -> None:
        """One local step of a pipeline, on its own microbatches, and the change that it makes."""
        train, step, chain = self._config.train, self._n_steps[pipeline], self._chains[pipeline]
        self._keep_moments(pipeline)
        n, seq_len = self._plan.n_microbatches, self._config.seq_lengths.at(step)
        microbatches = [
            self._data.train_batch(train.seed, step, m, train.microbatch_size, seq_len, n)
            for m in self._plan.microbatches(pipeline)
        ]
        self.losses[pipeline].append(local_step(chain, microbatches, self._config.optim.clip_norm))
        self._n_steps[pipeline] += 1
        self._keep_moments(pipeline)
        for stage, params in enumerate(chain.params):
            sent = as_sent(self._config.sync.codec, self._changes[stage][pipeline].next(params))
            self._pushes[stage, pipeline, step + 1] = sent.astype(np.float32)

    def _keep_moments(self, pipeline: int) -> None:
        """The next step may donate the optimizer's states, so they are copied."""
        place = (pipeline, self._n_steps[pipeline])
        if place in self.moments and not self.moments[place]:
            self.moments[place] = [jax.device_get(state) for state in self._chains[pipeline].states]
