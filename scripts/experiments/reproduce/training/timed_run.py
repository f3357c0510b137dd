"""Trains the replicas of a bare event simulation: its log says who averages when, and this does the arithmetic, in one
process.

A local step of a pipeline is computed when the first of its stages averages after it: until then nothing that it reads
changes, since a replica of a flushed schedule computes nothing between its last backward and its group."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from experiments.reproduce.training.whole_model import Samples, WholeModel

from jaxdt.sim.stragglers.group_timing import GroupOutcome


class Trained(Protocol):
    """Replicas of which a log is replayed."""

    def until(self, at_s: float) -> None:
        """Do all that the log has before `at_s`."""
        ...

    @property
    def snapshot(self) -> np.ndarray:
        """The parameters that are evaluated."""
        ...


class Pipelines:
    """`params[p]`, `states[p]`: of each pipeline. `n_steps[p]`: its local steps so far."""

    def __init__(self, model: WholeModel, samples: Samples, n_pipelines: int, seed: int):
        self._model, self._samples = model, samples
        params_n, state = model.init(seed)
        self.params = [params_n.copy() for _ in range(n_pipelines)]
        self.states: list[Any] = [state] * n_pipelines
        self.n_steps = [0] * n_pipelines

    def step(self, p: int) -> None:
        """One local step of a pipeline."""
        tokens_BT = self._samples.of_step(self.n_steps[p], (p,))
        _, params_n, self.states[p] = self._model.step(self.params[p], self.states[p], tokens_BT)
        self.params[p] = params_n.copy()  # stages are written to
        self.n_steps[p] += 1


class TrainedGroups:
    """Replicas that average as the groups of an outcome say. The snapshot is the mean over replicas."""

    def __init__(self, model: WholeModel, samples: Samples, seed: int, outcome: GroupOutcome):
        n_pipelines = len(outcome.n_done)
        self._stages = model.stages
        self._pipelines = Pipelines(model, samples, n_pipelines, seed)
        self._n_averaged = [[0] * n_pipelines for _ in self._stages]
        groups = [
            (at_s, stage, [peer % n_pipelines for peer in group.members])
            for stage, row in enumerate(outcome.groups)
            for at_s, group in row
        ]
        self._todo = _Log(sorted(groups, key=lambda entry: entry[0]))

    @property
    def snapshot(self) -> np.ndarray:
        return np.mean(self._pipelines.params, axis=0)

    def until(self, at_s: float) -> None:
        for _, stage, members in self._todo.until(at_s):
            self._average(stage, members)

    def _average(self, stage: int, members: Sequence[int]) -> None:
        pipelines, part, n_averaged = self._pipelines, self._stages[stage], self._n_averaged
        for p in members:
            if pipelines.n_steps[p] == n_averaged[stage][p]:
                assert len({row[p] for row in n_averaged}) == 1  # all stages have averaged after the step before
                pipelines.step(p)
            n_averaged[stage][p] += 1
        if len(members) > 1:
            mean = np.mean([pipelines.params[p][part] for p in members], axis=0)
            for p in members:
                pipelines.params[p][part] = mean


class TrainedServers:
    """Replicas that push to servers and pull from them. The snapshot is the servers' parameters."""

    def __init__(self, model: WholeModel, samples: Samples, seed: int, outcome: GroupOutcome):
        n_pipelines = len(outcome.n_done)
        self._stages, self._n_pipelines = model.stages, n_pipelines
        self._pipelines = Pipelines(model, samples, n_pipelines, seed)
        self.snapshot = self._pipelines.params[0].copy()
        self._changes = dict[tuple[int, int], np.ndarray]()  # (pipeline, local steps) -> what the last of them changed
        transfers = [(act.at_s, stage, act) for stage, row in enumerate(outcome.transfers) for act in row]
        self._todo = _Log(sorted(transfers, key=lambda entry: entry[0]))

    def until(self, at_s: float) -> None:
        pipelines = self._pipelines
        for _, stage, act in self._todo.until(at_s):
            p, part = act.peer % self._n_pipelines, self._stages[stage]
            if not act.is_push:
                pipelines.params[p][part] = self.snapshot[part]
                continue
            if pipelines.n_steps[p] < act.step:
                before_n = pipelines.params[p]
                pipelines.step(p)
                self._changes[p, act.step] = pipelines.params[p] - before_n
            self.snapshot[part] += self._changes[p, act.step][part]
            if stage == 0:  # the last one to push
                del self._changes[p, act.step]


class TrainedAllReduce:
    """Replicas that stay equal: each group of all is an update by the mean gradient, after the first stage's."""

    def __init__(self, model: WholeModel, samples: Samples, seed: int, outcome: GroupOutcome):
        self._model, self._samples = model, samples
        self._all = range(len(outcome.n_done))
        self.snapshot, self._state = model.init(seed)
        self._n_steps = 0
        self._todo = _Log([(at_s, 0, None) for at_s, _ in outcome.groups[0]])

    def until(self, at_s: float) -> None:
        for _ in self._todo.until(at_s):
            tokens_BT = self._samples.of_step(self._n_steps, self._all)
            _, self.snapshot, self._state = self._model.step(self.snapshot, self._state, tokens_BT)
            self._n_steps += 1


class _Log:
    """Entries (seconds, ...) in order of time."""

    def __init__(self, entries: Sequence[tuple[float, int, Any]]):
        self._entries, self._n_done = entries, 0

    def until(self, at_s: float) -> Iterator[tuple[float, int, Any]]:
        for entry in itertools.takewhile(lambda entry: entry[0] < at_s, self._entries[self._n_done :]):
            self._n_done += 1
            yield entry
