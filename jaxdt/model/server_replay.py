"""A run whose replicas push to servers, done again in one process from the servers' logs.

Everything in such a run is a pure function of its config and of the order in which each server has added pushes and
answered pulls. So the parameters that come out here are those of the run, bit for bit where both compute with one build
on the CPU.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdt.model.averaging import as_sent
from jaxdt.model.chain import Chain
from jaxdt.model.float_vector import FloatVector
from jaxdt.model.group_replay import Tokens, local_step
from jaxdt.model.pushed_change import PushedChange, with_change
from jaxdt.model.stage import StageFunctions
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.plan import Plan


@dataclass(frozen=True)
class ServerAct:
    """A server has added the push of a pipeline's local step `step` - 1, or has answered its pull after `step` local
    steps."""

    is_push: bool
    pipeline: int
    step: int


class ServerReplay:
    """Pipelines and servers of a plan in one process. `functions`: of each stage. `params[stage]`: the server's;
    `losses[pipeline]`: the mean loss of each local step."""

    def __init__(self, config: RunConfig, plan: Plan, functions: Sequence[StageFunctions], data: Tokens):
        if any(codec != "none" for codec in plan.codec):
            raise BadInput(f"plan.codec: got {', '.join(plan.codec)}, a replay expects none")
        self._config = config
        self._plan = plan
        self._data = data
        self._chains = [Chain(functions, config.train.seed, config.optim.clip_norm) for _ in range(plan.n_pipelines)]
        self._n_steps = [0] * plan.n_pipelines
        self._changes = [[PushedChange() for _ in range(plan.n_pipelines)] for _ in range(plan.n_stages)]
        self._pushes: dict[tuple[int, int, int], np.ndarray] = {}  # stage, pipeline, step -> not added yet
        self._pulled = [[-1] * plan.n_pipelines for _ in range(plan.n_stages)]  # after which local step, last
        self.params = [stage.init(config.train.seed) for stage in functions]
        self.losses: list[list[float]] = [[] for _ in range(plan.n_pipelines)]

    def state(self, stage: int, members: Collection[int]) -> tuple[Any, Any]:
        """The result of the run at a stage: the server's parameters, and the optimizer state of the least worker among
        the last members."""
        row = self._plan.placement[stage]
        least = min(peer for peer in row if peer in members)
        return self.params[stage], self._chains[row.index(least)].states[stage]

    def run(self, logs: Sequence[Sequence[ServerAct]], n_steps: Mapping[int, int]) -> None:
        """Do n_steps[pipeline] local steps, and push and pull as each stage's log says. BadInput for logs that do not
        fit. A server may have added pushes of a lost pipeline of whose steps nobody else has heard."""
        acts = [act for log in logs for act in log]
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

    def _may_act(self, stage: int, act: ServerAct) -> bool:
        if act.is_push:
            return (stage, act.pipeline, act.step) in self._pushes
        return self._n_steps[act.pipeline] == act.step

    def _may_step(self, pipeline: int) -> bool:
        """A step that follows a whole wave waits for the pulls of all stages."""
        step = self._n_steps[pipeline]
        is_due = step % self._config.sync.server.wave == 0
        return not is_due or all(of_stage[pipeline] == step for of_stage in self._pulled)

    def _act(self, stage: int, act: ServerAct) -> None:
        functions, chain = self._chains[0].stages[stage], self._chains[act.pipeline]
        if act.is_push:
            change_n = self._pushes.pop((stage, act.pipeline, act.step))
            self.params[stage] = functions.place(with_change(self.params[stage], change_n))
            return
        layout = FloatVector(self.params[stage])
        params_n = layout.of(self.params[stage])
        self._changes[stage][act.pipeline].pulled(params_n)
        self._pulled[stage][act.pipeline] = act.step
        chain.params[stage] = functions.place(layout.tree(params_n, 1.0))

    def _step(self, pipeline: int) -> None:
        """One local step of a pipeline, on its own microbatches, and what it changes."""
        train, step, chain = self._config.train, self._n_steps[pipeline], self._chains[pipeline]
        n, seq_len = self._plan.n_microbatches, self._config.seq_lengths.at(step)
        microbatches = [
            self._data.train_batch(train.seed, step, m, train.microbatch_size, seq_len, n)
            for m in self._plan.microbatches(pipeline)
        ]
        self.losses[pipeline].append(local_step(chain, microbatches, self._config.optim.clip_norm))
        self._n_steps[pipeline] += 1
        for stage, params in enumerate(chain.params):
            sent = as_sent(self._config.sync.codec, self._changes[stage][pipeline].next(params))
            self._pushes[stage, pipeline, step + 1] = sent.astype(np.float32)
