"""A whole model whose parameters are one fp32 vector, stage after stage: its local steps and its held-out loss.

The model's functions and its optimizer are those of a run; the cut into stages is only a cut of the vector, and there
are no stage functions, machines or messages. B samples, T tokens, n numbers of all parameters."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxdt.model.averaging import fragment_entries
from jaxdt.model.base import apply_stage, init_stage
from jaxdt.model.data import TokenFile
from jaxdt.model.optim import by_facts, optimizer
from jaxdt.run.config import RunConfig
from jaxdt.run.families.gpt import GPTConfig
from jaxdt.run.plan import Plan

Vector = np.ndarray  # float32 [n]
# XLA sizes its pool of threads by NPROC, and vectorizes for the processor that it runs on: both move the last bits.
ONE_KIND_OF_CORE = {"JAX_PLATFORMS": "cpu", "NPROC": "1", "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}


def compute_on_one_core() -> None:
    """Sums are then added in one order, however many and wide the cores are. To be called before anything is
    computed."""
    os.environ.update(ONE_KIND_OF_CORE)


class WholeModel:
    """The GPT of a config. `stages[s]`: the slice of the vector that holds the parameters of stage s of the plan.
    `n_pipelines`: those whose replicas average, for optim.second_moment."""

    def __init__(self, config: RunConfig, plan: Plan, n_pipelines: int = 1):
        assert isinstance(config.model, GPTConfig)
        self._config, self._model, self._plan = config, config.model, plan
        self._leaves: list[tuple[int, tuple[int, ...]]] = []
        self._structures: list[Any] = []
        self.stages: list[slice] = []
        self._rule = optimizer(config.optim, n_pipelines, by_facts(config.model.facts))
        end = 0
        for lo, hi in plan.stages:
            leaves, structure = jax.tree.flatten(
                jax.eval_shape(lambda lo=lo, hi=hi: init_stage(self._model, lo, hi, 0))
            )
            begin = end
            for leaf in leaves:
                self._leaves.append((end, leaf.shape))
                end += int(np.prod(leaf.shape))
            self._structures.append(structure)
            self.stages.append(slice(begin, end))
        self.n_numbers = end
        self._jitted_step, self._jitted_loss = jax.jit(self._step), jax.jit(self._loss)

    def fragments(self, n_fragments: int) -> list[np.ndarray]:
        """Which numbers of the vector each fragment of the stages has (sync.groups.fragments): bool [n] each."""
        names_of = [fragment_entries(self._model, lo, hi, n_fragments) for lo, hi in self._plan.stages]
        masks = []
        for fragment in range(n_fragments):
            sizes, marks = [int(np.prod(shape)) for _, shape in self._leaves], []
            for structure, names in zip(self._structures, names_of, strict=True):
                tree = jax.tree.unflatten(structure, sizes[: structure.num_leaves])
                sizes = sizes[structure.num_leaves :]
                for name in sorted(tree):
                    marks += [np.full(size, name in names[fragment]) for size in jax.tree.leaves(tree[name])]
            masks.append(np.concatenate(marks))
        return masks

    def init(self, seed: int) -> tuple[Vector, Any]:
        """(the vector, the optimizer's state) of a seed: the same parameters with which a run begins."""
        trees = [init_stage(self._model, lo, hi, seed) for lo, hi in self._plan.stages]
        params_n = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(trees)])
        return params_n, self._rule.init(self._tree(params_n))

    def step(self, params_n: ArrayLike, state: Any, tokens_BT: np.ndarray) -> tuple[float, Vector, Any]:
        """One update by the gradient of these samples, tokens [B, T+1]: (mean loss before it, vector, state)."""
        loss, params_n, state = self._jitted_step(params_n, state, tokens_BT)
        return float(loss), np.asarray(params_n), state

    def loss(self, params_n: ArrayLike, batches: Sequence[np.ndarray]) -> float:
        """The mean loss of equally large batches, in nats per token."""
        return float(np.mean([float(self._jitted_loss(params_n, tokens_BT)) for tokens_BT in batches]))

    def _tree(self, params_n: Any) -> dict[str, Any]:
        leaves = [params_n[begin : begin + int(np.prod(shape))].reshape(shape) for begin, shape in self._leaves]
        tree: dict[str, Any] = {}
        for structure in self._structures:
            tree |= jax.tree.unflatten(structure, leaves[: structure.num_leaves])
            leaves = leaves[structure.num_leaves :]
        return tree

    def _vector(self, tree: dict[str, Any]) -> Any:
        """The opposite of _tree."""
        parts = []
        for structure in self._structures:
            names = jax.tree.unflatten(structure, range(structure.num_leaves))
            parts += jax.tree.leaves({name: tree[name] for name in names})
        return jnp.concatenate([part.reshape(-1) for part in parts])

    def _loss(self, params_n: Any, tokens_BT: Any) -> Any:
        return self._loss_of_tree(self._tree(params_n), tokens_BT)

    def _loss_of_tree(self, params: Any, tokens_BT: Any) -> Any:
        inputs_BT, targets_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        logits_BTV = apply_stage(self._model, 0, self._model.n_layers, jnp.dtype(jnp.float32), params, inputs_BT)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT))

    def _step(self, params_n: Any, state: Any, tokens_BT: Any) -> tuple[Any, Any, Any]:
        params = self._tree(params_n)
        loss, gradient = jax.value_and_grad(self._loss_of_tree)(params, tokens_BT)
        if norm_max := self._config.optim.clip_norm:
            norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))
            scale = jnp.minimum(1.0, norm_max / norm)
            gradient = jax.tree.map(lambda leaf: scale * leaf, gradient)
        change, state = self._rule.update(gradient, state, params)
        return loss, self._vector(optax.apply_updates(params, change)), state


class Samples:
    """The samples of a run's steps and its held-out ones, from a token file."""

    def __init__(self, config: RunConfig, plan: Plan, data: TokenFile):
        self._config, self._plan, self._data = config, plan, data

    def of_step(self, step: int, pipelines: Sequence[int]) -> np.ndarray:
        """Tokens [B, T+1] of a step, of these pipelines' microbatches."""
        train, plan, seq_len = self._config.train, self._plan, self._config.seq_lengths.at(step)
        numbers = [m for pipeline in pipelines for m in plan.microbatches(pipeline)]
        size, n = train.microbatch_size, plan.n_microbatches
        return np.concatenate([self._data.train_batch(train.seed, step, m, size, seq_len, n) for m in numbers])

    def held_out(self) -> list[np.ndarray]:
        """The batches that a run evaluates."""
        size, seq_len = self._config.train.microbatch_size, self._config.seq_len
        n_batches = min(self._config.train.eval_microbatches, self._data.n_eval_batches(size, seq_len))
        return [self._data.eval_batch(index, size, seq_len) for index in range(n_batches)]
