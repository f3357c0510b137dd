"""Pipelines that do H local steps and then average, or take DiLoCo's outer step; with H = 1 and no outer optimizer, a
plain update by the gradient of all samples: a reference in plain jax, and the losses of scripts/reproduce.py diloco.

A run writes its state to a file now and then, and goes on from it when it is started again."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from experiments.reproduce.training.whole_model import Samples, WholeModel

from jaxdt.spec.config import GroupsConfig, RunConfig
from jaxdt.spec.errors import BadInput

SAVE_EVERY_STEPS = 50


@dataclass
class Progress:
    """A run so far. `params`, `states`: of each replica; all-reduce has one. `anchor`, `momentum`: of the outer
    optimizer. `losses`: the training loss of each step, a mean over replicas; `held_out`: (steps, loss)."""

    params: list[np.ndarray]
    states: list[Any]
    anchor: np.ndarray
    momentum: np.ndarray
    losses: list[float] = field(default_factory=list[float])
    held_out: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])


@dataclass(frozen=True)
class StateFile:
    """Where the state of a run is kept, and what it is of."""

    path: Path
    of: str


class LocalSteps:
    """A run of `config`. `groups`: how its replicas average; None for one update by the gradient of all samples."""

    def __init__(
        self,
        config: RunConfig,
        groups: GroupsConfig | None,
        model: WholeModel,
        samples: Samples,
        file: StateFile | None = None,
    ):
        self._config, self._groups, self._model, self._samples, self._file = config, groups, model, samples, file
        n_pipelines = config.plan.pipelines
        self._shares = [(p,) for p in range(n_pipelines)] if groups else [tuple(range(n_pipelines))]
        params_n, state = model.init(config.train.seed)
        momentum_n = np.zeros_like(params_n)
        self.progress = Progress([params_n] * len(self._shares), [state] * len(self._shares), params_n, momentum_n)

    def run(self, n_steps: int) -> Progress:
        """Go on until `n_steps` steps are done."""
        progress, every = self.progress, self._config.train.eval_every_steps
        if self._file and self._file.path.exists():
            self._load(self._file)
        held_out = self._samples.held_out() if every else []
        while len(progress.losses) < n_steps:
            self._step(len(progress.losses))
            n_done = len(progress.losses)
            if every and n_done % every == 0:
                mean_n = np.mean(progress.params, axis=0)
                progress.held_out.append((n_done, self._model.loss(mean_n, held_out)))
            if self._file and (n_done % SAVE_EVERY_STEPS == 0 or n_done == n_steps):
                self._save(self._file)
        return progress

    def _step(self, step: int) -> None:
        progress, losses = self.progress, []
        for replica, pipelines in enumerate(self._shares):
            tokens_BT = self._samples.of_step(step, pipelines)
            loss, progress.params[replica], progress.states[replica] = self._model.step(
                progress.params[replica], progress.states[replica], tokens_BT
            )
            losses.append(loss)
        progress.losses.append(float(np.mean(losses)))
        if self._groups and (step + 1) % self._groups.every_steps == 0:
            self._average(self._groups)

    def _average(self, groups: GroupsConfig) -> None:
        """All replicas go on from their mean, or from the outer optimizer's step by their mean change."""
        progress = self.progress
        mean_n = np.mean(progress.params, axis=0, dtype=np.float32)
        if groups.outer != "none":
            change_n = progress.anchor - mean_n
            progress.momentum = np.float32(groups.outer_momentum) * progress.momentum + change_n
            direction_n = progress.momentum
            if groups.outer == "nesterov":
                direction_n = change_n + np.float32(groups.outer_momentum) * progress.momentum
            mean_n = progress.anchor - np.float32(groups.outer_lr) * direction_n
        progress.anchor = mean_n
        progress.params = [mean_n] * len(progress.params)

    # ------------------------------------------------------------------------------------------------------------ file

    def _save(self, file: StateFile) -> None:
        progress, path = self.progress, file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {"of": file.of, "losses": progress.losses, "held_out": progress.held_out}
        leaves = jax.tree.leaves((progress.params, progress.states, progress.anchor, progress.momentum))
        part = path.with_suffix(".part.npz")
        np.savez(part, np.frombuffer(json.dumps(head).encode(), np.uint8), *leaves)
        part.replace(path)

    def _load(self, file: StateFile) -> None:
        progress = self.progress
        with np.load(file.path) as entries:
            blob, *leaves = (entries[name] for name in entries.files)
        head = json.loads(blob.tobytes())
        if head["of"] != file.of:
            raise BadInput(f"{file.path}: is the state of {head['of']}, expected that of {file.of}")
        structure = jax.tree.structure((progress.params, progress.states, progress.anchor, progress.momentum))
        trees = jax.tree.unflatten(structure, leaves)
        progress.params, progress.states, progress.anchor, progress.momentum = trees
        progress.losses = head["losses"]
        progress.held_out = [(n_steps, loss) for n_steps, loss in head["held_out"]]
