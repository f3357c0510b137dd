"""The stages of a model in one process: the arithmetic of a run without its machines and sockets.

B microbatch samples, T tokens, W boundary width, n numbers of a sync group."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jaxdt.model.base import Params
from jaxdt.model.batches import Batch
from jaxdt.model.stage import Scalar, StageFunctions, Vectors
from jaxdt.model.vectors import TIED_GROUP

Transmit = Callable[[Float[Array, "B T W"]], Float[Array, "B T W"]]


def unchanged(x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
    """A boundary without a codec."""
    return x


class Chain:
    """Stages from the first to the last, with their state: `params[s]` and `states[s]` belong to `stages[s]`.

    initial: a seed, or the parameters of each stage.
    clip_norm: the largest norm of a step's mean gradient over all stages; 0 for no clipping.
    transmit: maps a boundary tensor to the tensor that arrives at the other stage, such as a codec's decode of encode.
    """

    def __init__(
        self,
        stages: Sequence[StageFunctions],
        initial: int | Sequence[Params],
        clip_norm: float,
        transmit: Transmit = unchanged,
    ):
        self.stages = list(stages)
        self.params = [stage.init(initial) for stage in self.stages] if isinstance(initial, int) else list(initial)
        self.states = [stage.init_optimizer(params) for stage, params in zip(self.stages, self.params, strict=True)]
        self._clip_norm = clip_norm
        self._transmit = transmit

    def accumulate(
        self, batch: Batch, accs: list[Params], params_of: Sequence[Params] | None = None
    ) -> tuple[Scalar, list[Params]]:
        """Forward and backward of one microbatch. Returns (loss sum, accumulators); `accs` are donated. `params_of`:
        the parameters of each stage, if not its own."""
        params_of = params_of or self.params
        x: Any = None
        residuals = []
        for stage, params in zip(self.stages[:-1], params_of, strict=False):
            assert stage.forward is not None
            y, residual = stage.forward(params, x, batch)
            residuals.append(residual)
            x = self._transmit(y)
        loss_backward = self.stages[-1].loss_backward
        assert loss_backward is not None
        loss, gx, accs[-1] = loss_backward(params_of[-1], x, batch, accs[-1])
        for s in reversed(range(len(residuals))):
            backward = self.stages[s].backward
            assert backward is not None and gx is not None
            gx, accs[s] = backward(params_of[s], residuals[s], self._transmit(gx), accs[s])
        return loss, accs

    def step(self, microbatches: list[Batch], params_of: Sequence[Params] | None = None) -> float:
        """One update. Returns the mean loss of its samples before the update. `params_of`: the parameters of each stage
        whose gradient is applied, if not its own."""
        accs = [stage.zeros() for stage in self.stages]
        losses = []
        for batch in microbatches:
            loss, accs = self.accumulate(batch, accs, params_of)
            losses.append(loss)
        n_samples = _n_samples(microbatches)
        vectors = [stage.gradient_vectors(acc) for stage, acc in zip(self.stages, accs, strict=True)]
        del accs
        self._update(_with_tied_sum(vectors), n_samples)
        return float(sum(losses)) / n_samples

    def _update(self, vectors: list[Vectors], n_samples: int) -> None:
        """Update each stage by its gradient vectors; both ends hold the same vector of a tied table."""
        distinct = {}
        for s, stage_vectors in enumerate(vectors):
            for name, vector in stage_vectors.items():
                distinct[name if name == TIED_GROUP else s] = vector
        norm = float(_norm(list(distinct.values()))) / n_samples
        clip = min(1.0, self._clip_norm / norm) if self._clip_norm and norm else 1.0
        scale = np.float32(clip / n_samples)
        for s, stage in enumerate(self.stages):
            self.params[s], self.states[s] = stage.update(self.params[s], self.states[s], vectors[s], scale)

    def evaluate(self, batches: list[Batch]) -> float:
        """Mean held-out loss, nats per token. Boundaries are the same as in training."""
        eval_loss = self.stages[-1].eval_loss
        assert eval_loss is not None
        total = 0.0
        for batch in batches:
            x: Any = None
            for stage, params in zip(self.stages[:-1], self.params, strict=False):
                x = self._transmit(stage.evaluate(params, x, batch))
            total += float(eval_loss(self.params[-1], x, batch))
        return total / _n_samples(batches)


def _n_samples(batches: Sequence[Batch]) -> int:
    return sum(len(batch.tokens) for batch in batches)


def _with_tied_sum(vectors: list[Vectors]) -> list[Vectors]:
    """The gradient of a tied table is the sum of those of the first and the last stage."""
    if len(vectors) == 1 or TIED_GROUP not in vectors[0]:
        return vectors
    total = {TIED_GROUP: vectors[0][TIED_GROUP] + vectors[-1][TIED_GROUP]}
    return [vectors[0] | total, *vectors[1:-1], vectors[-1] | total]


@jax.jit
def _norm(vectors: list[Float32[Array, " n"]]) -> Scalar:
    return jnp.sqrt(sum(jnp.sum(jnp.square(vector)) for vector in vectors))
