"""Pipelines that do H local steps and then average, or take DiLoCo's outer step, of all parameters or of a fragment
after the other (Douillard et al. 2025, Alg. 2); without groups a plain update by the gradient of all samples. A
reference in plain jax, and the losses of scripts/reproduce.py diloco.

A run writes its state to a file now and then, and goes on from it when it is started again."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from experiments.reproduce.training.whole_model import Samples, WholeModel

from jaxdt.run.config import GroupsConfig, RunConfig
from jaxdt.run.errors import BadInput

SAVE_EVERY_STEPS = 50


@dataclass(frozen=True)
class FragmentMean:
    """The mean of a fragment, to be taken after `n_steps`. `mean_n` is of all parameters."""

    n_steps: int
    fragment: int
    mean_n: np.ndarray


@dataclass
class Progress:
    """A run so far. `params`, `states`: of each replica; all-reduce has one. `anchor`, `momentum`: of the outer
    optimizer. `losses`: the training loss of each step, a mean over replicas; `held_out`: (steps, loss). `due`: the
    mean under way, if one is."""

    params: list[np.ndarray]
    states: list[Any]
    anchor: np.ndarray
    momentum: np.ndarray
    losses: list[float] = field(default_factory=list[float])
    held_out: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    due: FragmentMean | None = None


@dataclass(frozen=True)
class StateFile:
    """The file in which the state of a run is kept, and a text that says of which run it is."""

    path: Path
    of: str


class LocalSteps:
    """A run of `config`. `groups`: the rule by which its replicas average; None for one update by the gradient of all
    samples."""

    def __init__(
        self,
        config: RunConfig,
        groups: GroupsConfig | None,
        model: WholeModel,
        samples: Samples,
        file: StateFile | None = None,
    ):
        self._config, self._groups, self._model, self._samples, self._file = config, groups, model, samples, file
        self._fragments = model.fragments(groups.fragments) if groups else []
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
        if self._groups:
            self._freeze(self._groups, step + 1)
            self._adopt(self._groups, step + 1)

    def _freeze(self, groups: GroupsConfig, n_steps: int) -> None:
        """The replicas' mean, if a fragment is due."""
        fragment = groups.fragment_due(n_steps)
        if fragment is not None:
            mean_n = np.mean(self.progress.params, axis=0, dtype=np.float32)
            self.progress.due = FragmentMean(n_steps + groups.lag_steps, fragment, mean_n)

    def _adopt(self, groups: GroupsConfig, n_steps: int) -> None:
        """All replicas go on from the mean that is due, or from the outer optimizer's step by their mean change, with
        a share of their own parameters."""
        progress, due = self.progress, self.progress.due
        if due is None or due.n_steps != n_steps:
            return
        is_due_n, outcome_n, own_frac = self._fragments[due.fragment], due.mean_n, np.float32(groups.mix_frac)
        if groups.outer != "none":
            change_n = progress.anchor - due.mean_n
            momentum_n = np.float32(groups.outer_momentum) * progress.momentum + change_n
            direction_n = momentum_n
            if groups.outer == "nesterov":
                direction_n = change_n + np.float32(groups.outer_momentum) * momentum_n
            outcome_n = progress.anchor - np.float32(groups.outer_lr) * direction_n
            progress.momentum = np.where(is_due_n, momentum_n, progress.momentum)
        progress.anchor = np.where(is_due_n, outcome_n, progress.anchor)
        progress.params = [
            np.where(is_due_n, own_frac * own_n + (1 - own_frac) * outcome_n, own_n) for own_n in progress.params
        ]
        progress.due = None

    # ------------------------------------------------------------------------------------------------------------ file

    def _save(self, file: StateFile) -> None:
        progress, path = self.progress, file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        head: dict[str, Any] = {"of": file.of, "losses": progress.losses, "held_out": progress.held_out}
        leaves = jax.tree.leaves((progress.params, progress.states, progress.anchor, progress.momentum))
        if progress.due:
            head["due"] = (progress.due.n_steps, progress.due.fragment)
            leaves.append(progress.due.mean_n)
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
        if "due" in head:
            progress.due = FragmentMean(*head["due"], leaves.pop())
        structure = jax.tree.structure((progress.params, progress.states, progress.anchor, progress.momentum))
        trees = jax.tree.unflatten(structure, leaves)
        progress.params, progress.states, progress.anchor, progress.momentum = trees
        progress.losses = head["losses"]
        progress.held_out = [(n_steps, loss) for n_steps, loss in head["held_out"]]
